"""Which strides an argument may have: none of an empty tensor say anything, and outputs may be permuted."""

import numpy as np
import pytest
import torch
from op_samples import NO_KERNEL, SAMPLES, op_call, schemas

import mla_fp8
from mla_fp8 import KV_LAYOUTS

OPS = [name for name in schemas() if name.removesuffix("_out") in SAMPLES]


def of_numpy(x: torch.Tensor) -> torch.Tensor:
    """As torch.from_numpy has an array without elements: with strides of 0."""
    empty = torch.from_numpy(np.zeros(tuple(x.shape), np.uint8))
    assert not empty.numel() and set(empty.stride()) <= {0}
    return x.as_strided(x.shape, [0] * x.dim())


def without_rows(name: str, device: str) -> dict[str, object]:
    """The sample with each tensor that has tokens, requests or pages cut to none of them."""
    tensors, options = op_call(name, device)
    names = [argument.name for argument in schemas()[name].arguments]
    given = dict(zip(names, tensors, strict=False)) | options
    kept = {
        "cos",
        "sin",
        "norm_weight",
        "kv_weight",
        "ape",
        "attn_sink",
        "scale",
        "out_attn_sink",
        "workspace",
    }
    return {
        key: x[:0] if isinstance(x, torch.Tensor) and key not in kept and "start_loc" not in key
        and "indptr" not in key and not key.startswith("out_indptr") and key != "out_offsets" else x
        for key, x in given.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_empty_tensor_of_numpy_is_as_good_as_any(name, device):
    """Each argument in turn: what is refused for its strides is refused, whatever else is wrong with it."""
    if device in NO_KERNEL.get(name.removesuffix("_out"), ()):
        pytest.skip(f"{name} has no {device} kernel yet")
    arguments = without_rows(name, device)
    empty = [key for key, x in arguments.items() if isinstance(x, torch.Tensor) and not x.numel()]
    assert empty

    def said(changed):
        try:
            getattr(torch.ops.mla_fp8, name)(**changed)
        except RuntimeError as error:
            return str(error)
        return None

    want = said(arguments)
    for key in empty:
        assert said(arguments | {key: of_numpy(arguments[key])}) == want, key
    assert said(arguments | {key: of_numpy(arguments[key]) for key in empty}) == want


def head_major(*shape: int, device: str) -> torch.Tensor:
    """[tokens, heads, dim] in memory of [heads, tokens, dim]."""
    tokens, heads, dim = shape
    return torch.randn(heads, tokens, dim, device=device).bfloat16().transpose(0, 1)


def test_inverse_rope_in_place_on_heads_before_tokens(device):
    o = head_major(6, 4, 512, device=device)
    cos, sin = torch.rand(2, 9, 32, device=device)
    at = torch.arange(6, device=device)
    want = mla_fp8.inverse_rope(o.contiguous(), cos, sin, at)
    assert mla_fp8.inverse_rope(o, cos, sin, at, out=o) is o
    assert torch.equal(o, want)


def test_qk_norm_rope_insert_in_place_on_heads_before_tokens(device):
    q, kv = head_major(6, 4, 512, device=device), torch.randn(6, 512, device=device).bfloat16()
    cos, sin = torch.rand(2, 9, 32, device=device)
    at = torch.arange(6, device=device)
    layout = KV_LAYOUTS["dsv4"]
    options = {"layout": layout, "page_size": 8, "eps": 1e-6, "norm_q": True}
    caches = [layout.empty(1, 8, device).fill_(0xA5) for _ in range(2)]
    want = mla_fp8.qk_norm_rope_insert(q.contiguous(), kv, None, cos, sin, at, at, caches[0], **options)
    assert mla_fp8.qk_norm_rope_insert(q, kv, None, cos, sin, at, at, caches[1], out_q=q, **options) is q
    assert torch.equal(q, want) and torch.equal(*caches)


def test_attention_into_heads_before_tokens(device):
    (q, cache, indices), options = SAMPLES["sparse_decode"](device)
    options = options | {"layout": KV_LAYOUTS[options["layout"]].id}
    out, lse = torch.ops.mla_fp8.sparse_decode(q, cache, indices, **options)
    into = head_major(*out.shape, device=device)
    torch.ops.mla_fp8.sparse_decode_out(q, cache, indices, **options, out=into, lse=torch.empty_like(lse))
    assert torch.equal(into, out)


@pytest.mark.parametrize("strides", [(0, 512), (512, 0), (512, 512), (1024, 256)])
def test_rows_that_share_memory_are_refused(strides, device):
    o = torch.randn(6, 4, 512, device=device).bfloat16()
    cos, sin = torch.rand(2, 9, 32, device=device)
    out = torch.empty(1 << 16, device=device).bfloat16().as_strided((6, 4, 512), (*strides, 1))
    with pytest.raises(RuntimeError, match=r"out must not overlap itself, got stride .* expected at least"):
        mla_fp8.inverse_rope(o, cos, sin, torch.arange(6, device=device), out=out)


def test_no_heads_in_memory_of_another_stride(device):
    """Their address is that of any tensor without elements."""
    q, kv = torch.zeros(6, 3, 520, device=device).bfloat16()[:, :0, :512], torch.randn(6, 512, device=device)
    cos, sin = torch.rand(2, 9, 32, device=device)
    at, layout = torch.arange(6, device=device), KV_LAYOUTS["dsv4"]
    cache = layout.empty(1, 8, device)
    result = mla_fp8.qk_norm_rope_insert(
        q, kv.bfloat16(), None, cos, sin, at, at, cache, layout=layout, page_size=8, eps=1e-6, norm_q=True
    )
    assert result.shape == (6, 0, 512)


@pytest.mark.parametrize("name", [name for name in OPS if name.endswith("_out")])
def test_an_output_that_is_a_lazy_negative_view_is_refused_before_anything_is_written(name):
    tensors, options = op_call(name, "cpu")
    names = [argument.name for argument in schemas()[name].arguments]
    given = dict(zip(names, tensors, strict=False)) | options
    outputs = [a.name for a in schemas()[name].arguments if a.alias_info and a.alias_info.is_write]
    outputs = [x for x in outputs if isinstance(given.get(x), torch.Tensor)]
    before = {x: given[x].clone() for x in outputs}
    last = outputs[-1]
    lazy = torch._neg_view(given[last])
    with pytest.raises(
        ValueError, match=rf"mla_fp8\.\w+: {last} must hold its own values, got a lazy negative view"
    ):
        getattr(torch.ops.mla_fp8, name)(**given | {last: lazy})
    for x in outputs:
        assert torch.equal(
            given[x].contiguous().view(torch.uint8), before[x].contiguous().view(torch.uint8)
        ), x


def test_an_input_that_is_a_lazy_negative_view_is_computed():
    out, lse = torch.empty(1, 2, 64), torch.empty(1, 2)
    a, b, zero = torch.ones(1, 2, 64), torch.full((1, 2, 64), 3.0), torch.zeros(1, 2)
    mla_fp8.merge_attention_states(torch._neg_view(a), zero, b, zero, out=out, lse=lse)
    assert torch.equal(out, torch.ones(1, 2, 64))
