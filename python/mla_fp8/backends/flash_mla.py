"""FlashMLA: the package, or the copy inside vLLM or sgl-kernel. Packed caches on its decode kernels
(`flashmla_kv`), bf16 ones on its prefill kernels (`flashmla_sparse`); each refuses the other (SGLang #23013).

Its conventions: 64 or 128 heads; index widths in blocks; lse is +inf where nothing is attended, and base 2 in
sgl-kernel's prefill; a decode batch above eleven thousand does not fit its scheduler's shared memory; decode
of ``dsv32`` knows neither lengths nor a second cache.

Its release of 2026-09-30 has kernels for V4.1 on Blackwell alone. SGLang's build (``sgl-flash-mla``) keeps
those for our layouts behind ``use_legacy=True``.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import probes
from ..call import Pair, Scope, SparseCall, Triple
from .convert import empty_is_minus_inf, masked, padded, pages_view, rows_view, to_multiple
from .packages import Api, function, locate

HEADS = (64, 128)
MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface", "sgl_kernel.flash_mla")


def _why_not(module: ModuleType) -> str | None:
    decode = getattr(module, "flash_mla_with_kvcache", None)
    taken = (probes.parameters(decode) if decode else None) or []
    if "use_legacy" in taken:
        has_legacy = getattr(module, "has_legacy", lambda: True)
        return None if has_legacy() else f"{module.__name__} was built without its legacy kernels"
    if "enable_batch_invariant" in taken:
        return f"{module.__name__} has the kernels of 2026-09-30 alone, which read none of our layouts"
    return None


DECODE = Api(
    MODULES,
    (
        ("get_mla_metadata", ()),
        ("flash_mla_with_kvcache", ("indices", "attn_sink", "extra_k_cache", "extra_topk_length")),
    ),
    _why_not,
)
PREFILL = Api(MODULES, (("flash_mla_sparse_fwd", ("attn_sink", "topk_length")),), _why_not)
_BASE_2 = ("sgl_kernel.flash_mla",)
_DECODE_WIDTH, _PREFILL_WIDTH = 64, 128  # indices are taken in blocks of so many
_MAX_BATCH = 8192


def has_sides(function: Callable[..., Any]) -> bool:
    """Whether it is of SGLang's build."""
    return "use_legacy" in (probes.parameters(function) or [])


@functools.cache
def for_our_layouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlashMLA's, on the side that has kernels for our layouts."""
    return functools.partial(function, use_legacy=True) if has_sides(function) else function


def sparse_decode(call: SparseCall) -> Pair:
    q, layout, (main, *extra) = call.q, call.layout, call.scopes
    if layout.fp8_dtype is None:
        rows = rows_view(main.kv, main.page_size, layout.head_dim_qk, torch.bfloat16)
        out, _, lse = _over_rows(call, rows)
        return out, lse
    num_q_heads, num_tokens = q.shape[1], len(q)
    q, attn_sink = padded(q, call.attn_sink, HEADS)
    k_cache = pages_view(main.kv, layout, main.page_size)
    per_token = _slots(main, k_cache, ("indices", "topk_length"))
    if layout.name == "dsv32":  # its kernel asserts that there is none; the indices beyond are masked anyway
        per_token.pop("topk_length", None)
    options: dict[str, Any] = {
        "softmax_scale": call.sm_scale, "is_fp8_kvcache": True, "attn_sink": attn_sink,
    }  # fmt: skip
    for scope in extra:
        options["extra_k_cache"] = pages_view(scope.kv, layout, scope.page_size)
        names = ("extra_indices_in_kvcache", "extra_topk_length")
        per_token |= _slots(scope, options["extra_k_cache"], names)
    outs = [q.new_empty(0, num_q_heads, layout.head_dim_v)]
    lses = [q.new_empty(0, num_q_heads, dtype=torch.float32)]
    for begin in range(0, num_tokens, _MAX_BATCH):
        part = slice(begin, begin + _MAX_BATCH)
        out, lse = for_our_layouts(function(DECODE, "flash_mla_with_kvcache"))(
            q[part, None], k_cache, None, None, layout.head_dim_v, function(DECODE, "get_mla_metadata")()[0],
            **options, **{name: x[part] for name, x in per_token.items()},
        )  # fmt: skip
        outs.append(out[:, 0, :num_q_heads])
        lses.append(lse[:, :num_q_heads, 0])
    return torch.cat(outs), empty_is_minus_inf(torch.cat(lses))


def sparse_prefill(call: SparseCall) -> Triple:
    return _over_rows(call, call.scopes[0].kv)


def _over_rows(call: SparseCall, kv: Tensor) -> Triple:
    """The prefill kernels over the first scope's slots as rows of ``kv``."""
    q, scope = call.q, call.scopes[0]
    num_tokens, num_q_heads, _ = q.shape
    if num_tokens == 0 or len(kv) == 0:
        nothing = torch.full((num_tokens, num_q_heads), -math.inf, device=q.device)
        return q.new_zeros(num_tokens, num_q_heads, call.layout.head_dim_v), nothing, nothing.clone()
    q, attn_sink = padded(q, call.attn_sink, HEADS)
    indices = masked(scope, len(kv))
    results = for_our_layouts(function(PREFILL, "flash_mla_sparse_fwd"))(
        q, kv[:, None], to_multiple(indices, _PREFILL_WIDTH)[:, None], call.sm_scale, attn_sink=attn_sink,
        topk_length=None if scope.length is None else scope.length.clamp(0, indices.shape[1]),
    )  # fmt: skip
    out, max_logits, lse = (x[:, :num_q_heads].contiguous() for x in results)
    module, _ = locate(PREFILL)
    if module is not None and module.__name__ in _BASE_2:
        max_logits, lse = max_logits * math.log(2), lse * math.log(2)
    return out, max_logits, empty_is_minus_inf(lse)


def _slots(scope: Scope, k_cache: Tensor, names: tuple[str, str]) -> dict[str, Tensor]:
    """The indices [num_tokens, 1, width] and the length of one cache, by FlashMLA's names for them."""
    indices = masked(scope, k_cache.shape[0] * k_cache.shape[1])
    found = {names[0]: to_multiple(indices, _DECODE_WIDTH)[:, None]}
    if scope.length is not None:
        found[names[1]] = scope.length.clamp(0, indices.shape[1])
    return found
