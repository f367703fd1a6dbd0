"""What an op writes has a new version afterwards, as of torch's own ops; what it reads has not."""

import pytest
import torch
from op_samples import NO_KERNEL, OF_LAYERS, SAMPLES, op_call, schemas, tensors_of

import mla_fp8

OPS = [name for name in schemas() if name.removesuffix("_out") in SAMPLES]
every_op = pytest.mark.parametrize("name", OPS)


def given(name: str, device: str) -> dict[str, object]:
    """Arguments of the op by name, with every buffer that it has."""
    if device in NO_KERNEL.get(name.removesuffix("_out"), ()):
        pytest.skip(f"{name} has no {device} kernel yet")
    tensors, options = op_call(name, device)
    names = [argument.name for argument in schemas()[name].arguments]
    arguments = dict(zip(names, tensors, strict=False)) | options
    if "workspace" in names and "workspace" not in arguments:
        dtype = torch.uint8 if name.startswith("index_topk") else torch.float32
        arguments["workspace"] = torch.zeros(1 << 20, dtype=dtype, device=device)
    if "counters" in names and "counters" not in arguments:
        arguments["counters"] = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    if "out_scores" in names:
        arguments["out_scores"] = torch.zeros(arguments["out_positions"].shape, device=device)
    if name == "resolve_hot_rows_out":
        arguments |= {"out_attention_rows": arguments["out_hot_rows"].clone(), "attention_page_stride": 2}
        arguments["out_lens"] = arguments["out_miss_counts"].clone()
        arguments["out_hit_rows"] = arguments["out_hot_rows"].clone()
    if name == "compress_kv":
        arguments["out_latent"] = torch.zeros(len(tensors[0]), 512, dtype=torch.bfloat16, device=device)
    for out, like in (("out_q_a", "q_a"), ("out_kv", "kv"), ("out_k_rope", "k_rope")):
        if name == "prepare_keys":
            arguments[out] = torch.zeros_like(arguments[like])
    for out, like in (("max_logits", "lse"), ("out_slots", "out_positions")):
        if out in names and out not in arguments:
            arguments[out] = torch.zeros_like(arguments[like])
    return {key: x[0] if key in OF_LAYERS else x for key, x in arguments.items()}


def call(name, arguments):
    layers = {key: [arguments[key]] for key in OF_LAYERS if key in arguments}
    getattr(torch.ops.mla_fp8, name)(**arguments | layers)


def written(name: str) -> set[str]:
    return {x.name for x in schemas()[name].arguments if x.alias_info and x.alias_info.is_write}


@every_op
def test_what_an_op_writes_has_a_new_version_and_nothing_else(name, device):
    arguments = given(name, device)
    assert written(name) <= set(arguments)
    tensors = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {key: x._version for key, x in tensors.items()}
    call(name, arguments)
    assert {key for key, x in tensors.items() if x._version > before[key]} == written(name)


@every_op
def test_so_have_the_views_of_its_memory(name, device):
    arguments = given(name, device)
    views = {key: arguments[key][..., :1] for key in written(name)}
    before = {key: x._version for key, x in views.items()}
    call(name, arguments)
    assert all(x._version > before[key] for key, x in views.items())


@every_op
def test_a_tensor_of_inference_mode_is_written_in_it_and_behind_it(name, device):
    """It has no version. torch refuses such writes outside of the mode, we do not."""
    with torch.inference_mode():
        arguments = given(name, device)
        call(name, arguments)
    assert all(arguments[key].is_inference() for key in written(name))
    call(name, arguments)


@every_op
def test_in_inference_mode_a_tensor_of_outside_has_one(name, device):
    arguments = given(name, device)
    before = {key: arguments[key]._version for key in written(name)}
    with torch.inference_mode():
        call(name, arguments)
    assert all(arguments[key]._version > version for key, version in before.items())


@every_op
def test_under_grad_mode_nothing_is_followed(name, device):
    """The op itself takes what requires grad: its result is that of no function that autograd knows."""
    arguments = given(name, device)
    for key in written(name):
        if arguments[key].is_floating_point():
            arguments[key].requires_grad_()
    call(name, arguments)
    assert all(arguments[key].grad_fn is None for key in written(name))


@every_op
def test_a_refused_call_leaves_the_versions(name, device):
    arguments = given(name, device)
    first = next(iter(arguments))
    tensors = tensors_of(arguments.values())
    before = [x._version for x in tensors]
    with pytest.raises(RuntimeError):
        call(name, arguments | {first: arguments[first][None, None]})
    assert [x._version for x in tensors] == before


def test_autograd_sees_that_a_saved_tensor_was_written(device):
    o = torch.randn(4, 2, 512, device=device).bfloat16()
    w = torch.randn(4, 2, 512, device=device).bfloat16().requires_grad_()
    loss = (o * w).sum()
    cos, sin = torch.randn(2, 9, 32, device=device)
    mla_fp8.inverse_rope(o, cos, sin, torch.arange(4, device=device), out=o)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_compiled_call_gives_a_new_version_too(backend, device):
    arguments = given("quantize_kv", device)

    @torch.compile(backend=backend, fullgraph=True)
    def write(latent, kv_cache):
        torch.ops.mla_fp8.quantize_kv(**arguments | {"latent": latent * 2, "kv_cache": kv_cache})

    cache = arguments["kv_cache"]
    for _ in range(2):
        before = cache._version
        write(arguments["latent"], cache)
        assert cache._version > before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
@every_op
def test_counting_puts_nothing_into_a_graph(name):
    """A graph of a call holds the launches that the profiler sees of one, and its replay counts nothing."""
    arguments = given(name, "cuda")
    call = getattr(torch.ops.mla_fp8, name)
    call(**arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(**arguments)
        torch.cuda.synchronize()
    kernels = [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert not any("memcpy" in kernel.lower() for kernel in kernels), kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**arguments)
    graph.replay()


@pytest.mark.parametrize("name", ["sparse_decode", "sparse_prefill", "dequantize_kv", "index_logits"])
def test_what_is_only_read_stays_a_lazy_clone(name):
    """A mutable pointer to one would copy all of a cache."""
    arguments = given(name, "cpu")
    lazy = {key: torch._lazy_clone(x) for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    call(name, arguments | lazy)
    assert all(torch._C._is_cow_tensor(x) for x in lazy.values())
