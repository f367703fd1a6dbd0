"""The commonest wrong calls and the whole text that answers: the argument, what was expected, what came."""

import inspect
from collections.abc import Callable

import pytest
import torch
from op_samples import SAMPLES

import mla_fp8
from mla_fp8 import KV_LAYOUTS


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def cache(layout: str = "dsv32", device: str = "cpu") -> torch.Tensor:
    return KV_LAYOUTS[layout].empty(4, 64, device)


def decode(**changes: object) -> Callable[[], object]:
    """Two tokens of 16 heads over a cache of dsv32, with these changes."""
    given = {
        "q": zeros(2, 16, 576), "kv_cache": cache(), "indices": ints(2, 8), "layout": "dsv32",
        "page_size": 64, "sm_scale": 0.1,
    }  # fmt: skip
    return lambda: mla_fp8.sparse_decode(**(given | changes))


def with_scale(scale: object) -> Callable[[], object]:
    return decode(layout="fp8_e4m3", kv_cache=cache("fp8_e4m3"), scale=scale)


def prefill(kv: torch.Tensor, q: torch.Tensor | None = None) -> Callable[[], object]:
    return lambda: mla_fp8.sparse_prefill(zeros(2, 16, 576) if q is None else q, kv, ints(2, 8), sm_scale=0.1)


def quantize(latent: torch.Tensor, slots: torch.Tensor, **options: object) -> Callable[[], object]:
    return lambda: mla_fp8.quantize_kv(latent, slots, cache(), layout="dsv32", page_size=64, **options)


def dequantize(slots: torch.Tensor, out: torch.Tensor | None = None) -> Callable[[], object]:
    return lambda: mla_fp8.dequantize_kv(cache(), slots, layout="dsv32", page_size=64, out=out)


LAYOUTS = ", ".join(KV_LAYOUTS)
DECODE, PREFILL, QUANTIZE = "mla_fp8.sparse_decode: ", "mla_fp8.sparse_prefill: ", "mla_fp8.quantize_kv: "
PAGE = 32 * KV_LAYOUTS["dsv32"].bytes_per_token
PACKED, ROW = KV_LAYOUTS["dsv32"].bytes_per_token, KV_LAYOUTS["bf16"].bytes_per_token

SHAPES = {
    "q of another model": (decode(q=zeros(2, 16, 512)), "q must have shape [*, *, 576], got [2, 16, 512]"),
    "q as FlashMLA has it": (
        decode(q=zeros(2, 1, 16, 576)), "q must have shape [*, *, *], got [2, 1, 16, 576]",
    ),
    "too many heads": (decode(q=zeros(2, 129, 576)), "q must have 1 to 128 heads, got 129"),
    "indices of other tokens": (decode(indices=ints(3, 8)), "indices must have shape [2, *], got [3, 8]"),
    "indices with a dimension of 1": (
        decode(indices=ints(2, 1, 8)), "indices must have shape [2, *], got [2, 1, 8]",
    ),
    "another page size": (
        decode(page_size=32),
        f"kv_cache must have shape [*, {PAGE}], got [4, {2 * PAGE}] (a page is 32 rows of layout dsv32)",
    ),
    "no page size of the second cache": (
        decode(extra_kv_cache=cache(), extra_indices=ints(2, 8), extra_page_size=0),
        "extra_page_size must be in [1, 16777216], got 0",
    ),
    "a length that the specification is asked with": (
        decode(topk_length=torch.tensor(1, dtype=torch.int32), backend="reference"),
        "topk_length must have shape [2], got []",
    ),
    "indices that the specification is asked with": (
        decode(indices=ints(1, 8), backend="reference"), "indices must have shape [2, *], got [1, 8]",
    ),
    "no page size": (decode(page_size=0), "page_size must be in [1, 16777216], got 0"),
    "lengths of other tokens": (decode(topk_length=ints(3)), "topk_length must have shape [2], got [3]"),
    "a sink of all ranks": (
        decode(attn_sink=torch.zeros(128)), "attn_sink must have shape [16], got [128]",
    ),
    "a scale per page": (with_scale(torch.ones(4)), "scale must have 1 element, got 4"),
}  # fmt: skip
DTYPES = {
    "q in fp16": (
        decode(q=zeros(2, 16, 576, dtype=torch.float16)),
        "q must have dtype torch.bfloat16, got torch.float16",
    ),
    "indices in int64": (
        decode(indices=zeros(2, 8, dtype=torch.int64)),
        "indices must have dtype torch.int32, got torch.int64",
    ),
    "lengths in int64": (
        decode(topk_length=zeros(2, dtype=torch.int64)),
        "topk_length must have dtype torch.int32, got torch.int64",
    ),
    "a sink in bf16": (
        decode(attn_sink=zeros(16)),
        "attn_sink must have dtype torch.float32, got torch.bfloat16",
    ),
    "a cache in float32": (
        decode(kv_cache=torch.zeros(4, 64 * 164)),
        "kv_cache must have dtype torch.uint8 or torch.int8 or torch.bfloat16 or "
        "torch.float8_e4m3fn for layout dsv32, got torch.float32",
    ),
}  # fmt: skip
KINDS = {
    "no queries": (decode(q=None), "q must be a tensor, got None"),
    "no cache": (decode(kv_cache=None), "kv_cache must be a tensor, got None"),
    "no indices": (decode(indices=None), "indices must be a tensor, got None"),
    "lengths as a list": (decode(topk_length=[8, 8]), "topk_length must be a tensor, got [8, 8]"),
    "more lengths than fit in a line": (
        decode(topk_length=[*range(10000)]),
        "topk_length must be a tensor, got [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...]",
    ),
    "a scale as a number": (with_scale(0.5), "scale must be a tensor, got 0.5"),
    "a page size that is not whole": (decode(page_size=64.0), "page_size must be an int, got 64.0"),
    "a workspace that is a size": (decode(workspace=1 << 20), "workspace must be a tensor, got 1048576"),
}  # fmt: skip
VALUES = {
    "no scale": (with_scale(None), "scale must be given for layout fp8_e4m3, got None"),
    "a scale that is stored in the cache": (
        decode(scale=torch.ones(1)), "scale must be None for layout dsv32, got a tensor",
    ),
    "a scale of 0": (with_scale(torch.zeros(1)), "scale must be finite and positive, got 0"),
    "sm_scale that is no number": (decode(sm_scale=float("nan")), "sm_scale must be finite, got nan"),
    "half of a second cache": (
        decode(extra_kv_cache=cache()),
        "extra_kv_cache, extra_indices and extra_page_size must be given together, got a cache, no indices, "
        "no page size",
    ),
    "lengths of no second cache": (
        decode(extra_topk_length=ints(2)),
        "extra_topk_length must be None without extra_kv_cache, got a tensor",
    ),
    "a cache on another device": (
        decode(kv_cache=cache(device="meta")), "kv_cache must be on cpu like q, got meta",
    ),
    "heads and dims swapped": (
        decode(q=zeros(2, 576, 16).mT), "q must have stride 1 in its last dimension, got 16",
    ),
    "q one element past a multiple of 16 bytes": (
        decode(q=zeros(2 * 16 * 576 + 1)[1:].view(2, 16, 576)),
        "q must be 16-byte aligned, got an address that is 2 past",
    ),
}  # fmt: skip
OF_OTHERS = {
    "kv as FlashMLA has it": (
        prefill(zeros(10, 1, 576)), PREFILL + "kv must have shape [*, 576], got [10, 1, 576]",
    ),
    "rows of another model": (
        prefill(zeros(10, 512)), PREFILL + "kv must have shape [*, 576], got [10, 512]",
    ),
    "a model that is not MLA": (
        prefill(zeros(10, 640), zeros(2, 16, 640)),
        PREFILL + "q must have a last dimension of 512 or 576, got 640",
    ),
    "q without dimensions": (
        prefill(zeros(10, 576), zeros()), PREFILL + "q must have shape [*, *, *], got []",
    ),
    "a part of a latent": (
        quantize(zeros(3, 448), torch.arange(3)), QUANTIZE + "latent must have shape [*, 576], got [3, 448]",
    ),
    "rope twice": (
        quantize(zeros(3, 576), torch.arange(3), rope=zeros(3, 64)),
        QUANTIZE + "latent must have shape [*, 512], got [3, 576]",
    ),
    "more slots than latents": (
        quantize(zeros(3, 576), torch.arange(4)),
        QUANTIZE + "slot_mapping must have at most 3 entries (the rows of latent), got 4",
    ),
    "slots that are no integers": (
        quantize(zeros(3, 576), torch.ones(3)),
        QUANTIZE + "slot_mapping must have dtype torch.int64 or torch.int32, got torch.float32",
    ),
    "a buffer of another size": (
        dequantize(torch.arange(3), zeros(4, 576)),
        "mla_fp8.dequantize_kv: out must have shape [3, 576], got [4, 576]",
    ),
    "fewer rows than none": (
        lambda: mla_fp8.index_topk_workspace(-1, topk=64, device="cpu"),
        "mla_fp8.index_topk_workspace: num_rows must be at least 0, got -1",
    ),
    "more tokens than there can be": (
        lambda: mla_fp8.sparse_attention_workspace(1 << 62, num_q_heads=1, device="cpu"),
        f"mla_fp8.sparse_attention_workspace: num_tokens must be in [0, {(1 << 31) - 1}], got {1 << 62}",
    ),
    "a gradient is wanted": (
        decode(q=zeros(2, 16, 576).requires_grad_()),
        "mla_fp8.sparse_decode: q must not require grad, as the package is for inference and has no "
        "derivatives; call it under torch.no_grad(), or with a detached tensor",
    ),
}  # fmt: skip
CHOICES = {
    "a layout that is no name": (
        decode(layout=["dsv32"]),
        f"mla_fp8: layout must be one of {LAYOUTS}, got ['dsv32'] "
        "(mla_fp8.resolve_kv_cache_dtype says which one an engine's kv_cache_dtype means)",
    ),
    "a layout that is none": (
        decode(layout="dsv3"),
        f"mla_fp8: layout must be one of {LAYOUTS}, got 'dsv3' "
        "(mla_fp8.resolve_kv_cache_dtype says which one an engine's kv_cache_dtype means)",
    ),
    "an engine's name for another cache": (
        decode(layout="fp8_ds_mla", kv_cache=cache("bf16")),
        f"mla_fp8: layout 'fp8_ds_mla' does not fit this cache: row_bytes must be {PACKED} (dsv32) for "
        f"'fp8_ds_mla', backend 'native', got {ROW}",
    ),
    "an engine's name that is none": (
        lambda: mla_fp8.resolve_kv_cache_dtype("fp8_e5m2", "native", 576),
        "mla_fp8.resolve_kv_cache_dtype: name must be one of auto, bfloat16, fp8, fp8_e4m3, fp8_ds_mla, "
        "got 'fp8_e5m2'",
    ),
    "a backend that is none": (
        decode(backend="flashmla"),
        "mla_fp8.sparse_decode: backend must be auto or one of native, flashmla_kv, flashmla_sparse, "
        "flashinfer, flashinfer_fp8, flashinfer_sm120, flashinfer_sm90, aiter, aiter_fp8_fnuz, aiter_fp8, "
        "reference, flash_mla, got 'flashmla'",
    ),
    "a backend that is no name": (
        decode(backend=["native"]),
        "mla_fp8.sparse_decode: backend must be a name, got ['native']",
    ),
    "a backend that is not for this": (
        decode(backend="flashmla_kv"),
        "mla_fp8.sparse_decode: backend='flashmla_kv' cannot run sparse_decode on cpu, dsv32, 16 heads:\n"
        "  native           could\n"
        "  flashmla_kv      runs on sm90, sm100, sm103, not on cpu\n"
        "  flashmla_sparse  runs on sm90, sm100, sm103, not on cpu\n"
        "  flashinfer       runs on sm100, sm103, not on cpu\n"
        "  flashinfer_fp8   runs on sm100, sm103, not on cpu\n"
        "  flashinfer_sm120 runs on sm120, sm121, not on cpu\n"
        "  flashinfer_sm90  runs on sm90, not on cpu\n"
        "  aiter            runs on gfx942, gfx950, not on cpu\n"
        "  aiter_fp8_fnuz   runs on gfx942, not on cpu\n"
        "  aiter_fp8        runs on gfx950, not on cpu\n"
        "  reference        could, if asked for: the specification: for checking, not for serving",
    ),
    "one of two buffers": (
        lambda: mla_fp8.merge_attention_states(
            *(zeros(2, 16, 512), torch.zeros(2, 16)) * 2, out=zeros(2, 16, 512)
        ),
        "mla_fp8.merge_attention_states: expected all of out, lse or none, got no lse",
    ),
    "a way that is none": (
        lambda: mla_fp8.workspace_rows([1], [1], window_size=0, compress_ratio=1, strategy="fast"),
        "mla_fp8: strategy must be one of whole, selected, direct, got 'fast'",
    ),
}  # fmt: skip
RUNTIME = {
    name: (call, DECODE + text) for part in (SHAPES, DTYPES, VALUES) for name, (call, text) in part.items()
}
RUNTIME |= OF_OTHERS
WRONG_KINDS = {name: (call, DECODE + text) for name, (call, text) in KINDS.items()} | {
    "a list in place of a cache": (
        lambda: mla_fp8.paged_attention_ragged(
            zeros(2, 8, 128), [0], zeros(4, 4, 2, 128), ints(3), ints(2), ints(2), sm_scale=0.1
        ),
        "mla_fp8.paged_attention_ragged: k_cache must be a tensor, got [0]",
    ),
}


@pytest.mark.parametrize(("call", "text"), RUNTIME.values(), ids=RUNTIME)
def test_a_wrong_argument_is_named_with_what_was_expected_and_what_came(call, text):
    with pytest.raises(RuntimeError) as error:
        call()
    assert str(error.value) == text


@pytest.mark.parametrize(("call", "text"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_what_is_no_tensor_or_no_whole_number_is_a_type_error_in_one_line(call, text):
    """torch would print the whole schema."""
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == text


@pytest.mark.parametrize(("call", "text"), CHOICES.values(), ids=CHOICES)
def test_a_choice_that_is_none_is_answered_with_those_that_are(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == text


@pytest.mark.parametrize("name", SAMPLES)
def test_none_for_a_tensor_is_named(name, device):
    function = getattr(mla_fp8, name)
    tensors, options = SAMPLES[name](device)
    parameters = inspect.signature(function).parameters.values()
    pairs = zip(range(len(tensors)), parameters, strict=False)
    required = [i for i, parameter in pairs if parameter.annotation is torch.Tensor]
    assert required
    for i in required:
        given = [None if i == j else x for j, x in enumerate(tensors)]
        with pytest.raises(TypeError, match=rf"^mla_fp8\.{name}: \w+ must be a tensor, got None$"):
            function(*given, **options)
