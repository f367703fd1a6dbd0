"""FlashMLA: the package, or the copy inside vLLM or sgl-kernel. Packed caches on its decode kernels
(`flashmla_kv`), bf16 ones on its prefill kernels (`flashmla_sparse`); each refuses the other (SGLang #23013).

Its conventions: 64 or 128 heads; index widths in blocks; lse is +inf where nothing is attended, and base 2 in
sgl-kernel's prefill; a decode batch above eleven thousand does not fit its scheduler's shared memory; decode
of ``dsv32`` knows neither lengths nor a second cache.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..layout import KVLayout
from ..reference import HEAD_DIM_V
from .convert import empty_is_minus_inf, masked, padded, pages_view, rows_view, to_multiple
from .native import Pair, Triple
from .packages import Api, function, locate

HEADS = (64, 128)
MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface", "sgl_kernel.flash_mla")
DECODE = Api(
    MODULES,
    (
        ("get_mla_metadata", ()),
        ("flash_mla_with_kvcache", ("indices", "attn_sink", "extra_k_cache", "extra_topk_length")),
    ),
)
PREFILL = Api(MODULES, (("flash_mla_sparse_fwd", ("attn_sink", "topk_length")),))
_BASE_2 = ("sgl_kernel.flash_mla",)
_DECODE_WIDTH, _PREFILL_WIDTH = 64, 128  # indices are taken in blocks of so many
_MAX_BATCH = 8192


def sparse_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_page_size: int | None = None,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> Pair:
    if layout.fp8_dtype is None:
        rows = rows_view(kv_cache, page_size, layout.head_dim_qk, torch.bfloat16)
        out, _, lse = sparse_prefill(
            q, rows, indices, sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length
        )
        return out, lse
    num_q_heads, num_tokens = q.shape[1], len(q)
    q, attn_sink = padded(q, attn_sink, HEADS)
    k_cache = pages_view(kv_cache, layout, page_size)
    per_token = _scope(k_cache, indices, topk_length, ("indices", "topk_length"))
    if layout.name == "dsv32":  # its kernel asserts that there is none; the indices beyond are masked anyway
        per_token.pop("topk_length", None)
    options: dict[str, Any] = {
        "softmax_scale": sm_scale, "is_fp8_kvcache": True, "attn_sink": attn_sink,
    }  # fmt: skip
    if extra_kv_cache is not None and extra_indices is not None and extra_page_size is not None:
        extra = pages_view(extra_kv_cache, layout, extra_page_size)
        names = ("extra_indices_in_kvcache", "extra_topk_length")
        per_token |= _scope(extra, extra_indices, extra_topk_length, names)
        options["extra_k_cache"] = extra
    outs = [q.new_empty(0, num_q_heads, layout.head_dim_v)]
    lses = [q.new_empty(0, num_q_heads, dtype=torch.float32)]
    for begin in range(0, num_tokens, _MAX_BATCH):
        part = slice(begin, begin + _MAX_BATCH)
        out, lse = function(DECODE, "flash_mla_with_kvcache")(
            q[part, None], k_cache, None, None, layout.head_dim_v, function(DECODE, "get_mla_metadata")()[0],
            **options, **{name: x[part] for name, x in per_token.items()},
        )  # fmt: skip
        outs.append(out[:, 0, :num_q_heads])
        lses.append(lse[:, :num_q_heads, 0])
    return torch.cat(outs), empty_is_minus_inf(torch.cat(lses))


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> Triple:
    num_tokens, num_q_heads, _ = q.shape
    if num_tokens == 0 or len(kv) == 0:
        nothing = torch.full((num_tokens, num_q_heads), -math.inf, device=q.device)
        return q.new_zeros(num_tokens, num_q_heads, HEAD_DIM_V), nothing, nothing.clone()
    q, attn_sink = padded(q, attn_sink, HEADS)
    rows = to_multiple(masked(indices, len(kv), topk_length), _PREFILL_WIDTH)
    if topk_length is not None:
        topk_length = topk_length.clamp(0, indices.shape[1])
    results = function(PREFILL, "flash_mla_sparse_fwd")(
        q, kv[:, None], rows[:, None], sm_scale, attn_sink=attn_sink, topk_length=topk_length
    )
    out, max_logits, lse = (x[:, :num_q_heads].contiguous() for x in results)
    module, _ = locate(PREFILL)
    if module is not None and module.__name__ in _BASE_2:
        max_logits, lse = max_logits * math.log(2), lse * math.log(2)
    return out, max_logits, empty_is_minus_inf(lse)


def _scope(
    k_cache: Tensor, indices: Tensor, length: Tensor | None, names: tuple[str, str]
) -> dict[str, Tensor]:
    """The indices [num_tokens, 1, width] and the length of one cache, by FlashMLA's names for them."""
    rows = to_multiple(masked(indices, k_cache.shape[0] * k_cache.shape[1], length), _DECODE_WIDTH)
    scope = {names[0]: rows[:, None]}
    if length is not None:
        scope[names[1]] = length.clamp(0, indices.shape[1])
    return scope
