"""``out=``, ``lse=``, ``workspace=`` and ``return_max_logits=`` of the four attention functions."""

import pytest
import torch
from assertions import assert_same
from op_samples import SAMPLES, Size, sparse_prefill_entries
from torch.profiler import ProfilerActivity, profile

import mla_fp8

NAMES = ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window", "entries")
every_function = pytest.mark.parametrize("name", NAMES)


def sample(name, device, size=None):
    """(function, tensors, options)."""
    given = sparse_prefill_entries if name == "entries" else SAMPLES[name]
    function = mla_fp8.sparse_prefill_window if name == "entries" else getattr(mla_fp8, name)
    return function, *(given(device) if size is None else given(device, size))


def without_max_logits(name):
    return {} if name == "sparse_decode" else {"return_max_logits": False}


def buffers(q, batch_invariant=False):
    """out with other strides, lse and a workspace, full of NaN."""
    tokens, heads = q.shape[:2]
    size = mla_fp8.sparse_attention_workspace(
        tokens, num_q_heads=heads, device=q.device, batch_invariant=batch_invariant
    )
    nan = float("nan")
    return {
        "out": q.new_full((tokens, heads, 520), nan)[:, :, :512],
        "lse": q.new_full((tokens, heads), nan, dtype=torch.float32),
        "workspace": q.new_full((size,), nan, dtype=torch.float32),
    }


@every_function
@pytest.mark.parametrize("which", [("out",), ("lse",), ("workspace",), ("out", "lse", "workspace")])
@pytest.mark.parametrize("max_logits", [True, False])
def test_what_the_caller_gives_is_written_and_returned_and_the_rest_is_new(name, which, max_logits, device):
    function, tensors, options = sample(name, device)
    if name == "sparse_decode":
        max_logits = False
        want = function(*tensors, **options)
    else:
        options = options | {"return_max_logits": max_logits}
        out, largest, lse = function(*tensors, **options | {"return_max_logits": True})
        want = (out, largest, lse) if max_logits else (out, lse)
    given = {key: x for key, x in buffers(tensors[0]).items() if key in which}
    got = function(*tensors, **options, **given)
    assert len(got) == len(want) == 2 + max_logits
    assert_same(tuple(x.contiguous() for x in got), want)
    assert ("out" in given) == (got[0] is given.get("out")) and ("lse" in given) == (
        got[-1] is given.get("lse")
    )


def allocated(call, device):
    """Bytes that a call takes."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        call()
        return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    assert kept
    return sum(event.cpu_memory_usage for event in seen.events())


@every_function
def test_with_all_of_them_nothing_is_allocated(name, device):
    function, tensors, options = sample(name, device)
    options = options | without_max_logits(name)
    given = buffers(tensors[0])
    size = sum(x.numel() * x.itemsize for x in (given["out"][:, :, :512], given["lse"]))
    assert allocated(lambda: function(*tensors, **options), device) >= size  # so it would be seen
    assert allocated(lambda: function(*tensors, **options, **given), device) == 0


@every_function
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_it_is_one_graph_that_writes_them(name, dynamic, device):
    function, _, _ = sample(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (Size(), Size(num_tokens=4, heads=12, topk=24)):
        _, tensors, options = sample(name, device, size)
        options = options | without_max_logits(name)
        want = function(*tensors, **options)
        given = {key: x.contiguous() for key, x in buffers(tensors[0]).items()}
        assert_same(compiled(*tensors, **options, **given), want)
        assert_same((given["out"], given["lse"]), want)
        assert_same(compiled(*tensors, **options), want)


@every_function
def test_another_backend_writes_them_too(name, device):
    function, tensors, options = sample(name, device)
    options = options | without_max_logits(name) | {"backend": "reference"}
    want, given = function(*tensors, **options), buffers(tensors[0])
    out, lse = function(*tensors, **options, **given)
    assert out is given["out"] and lse is given["lse"]
    assert_same((out.contiguous(), lse), want)


@every_function
def test_buffers_of_other_shapes_are_refused(name, device):
    function, tensors, options = sample(name, device)
    given = buffers(tensors[0])
    for key, x, message in (
        ("out", given["out"][1:], "out must have shape"),
        ("lse", given["lse"].double(), "lse must have dtype torch.float32, got torch.float64"),
        ("workspace", given["lse"].bfloat16(), "workspace must have dtype torch.float32, got torch.bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=rf"^mla_fp8\.{function.__name__}: {message}"):
            function(*tensors, **options, **{key: x})
    wanting = given["out"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="out must not require grad"):
        function(*tensors, **options, out=wanting)
