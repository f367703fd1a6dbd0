"""AITER's ragged paged attention by its positional signature (amd-aiter 0.1.7), over our op on any device.

What differs on purpose: an FP8 cache says its encoding by its dtype, its layer's scales are required, and the
softmax weights are never rounded to FP8 (AITER #5642 does: about 15 % of their size). Bad input raises
ValueError, or the RuntimeError of :func:`mla_fp8.paged_attention_ragged`, with the caller's names.
"""

import torch

from .._arguments import need_tensors
from ..ops.paged_attention_ragged import paged_attention_ragged as _paged_attention_ragged
from ._names import caller_names

__all__ = ["paged_attention_ragged"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_MAX_SPLITS = 128


@caller_names(
    q="query", k_cache="key_cache", v_cache="value_cache", kv_indices="kv_page_indices", sm_scale="scale",
    kv_last_page_len="kv_last_page_lens", page_size="block_size", q_len="mtp", workspace="workspace_buffer",
)  # fmt: skip
def paged_attention_ragged(
    out: torch.Tensor,
    workspace_buffer: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor | None,
    block_size: int,
    max_num_partitions: int,
    alibi_slopes: None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    fp8_out_scale: None = None,
    partition_size: int = 256,
    mtp: int = 1,
) -> torch.Tensor:
    """Writes and returns ``out``.

    =================  ==========================================================================
    out, query         [num_requests * mtp, num_q_heads, head_dim] bf16 or fp16
    key_cache,         NHD: [num_pages, block_size, num_kv_heads, head_dim]; HND has the middle two
    value_cache        exchanged
    workspace_buffer   any dtype and size: the keys are worked on in as many parts as it holds,
                       at most ``max_num_partitions``
    kv_last_page_lens  [num_requests] int32; None with pages of one token
    kv_cache_dtype     auto: the caches have query's dtype; fp8 and fp8_e4m3: e4m3fn or e4m3fnuz
    k_scale, v_scale   1 or num_kv_heads elements, fp32: required for FP8, not looked at without
    =================  ==========================================================================

    ``alibi_slopes``, ``fp8_out_scale`` and kv_cache_dtype fp8_e5m2 are refused; ``partition_size`` is AITER's
    own business.
    """
    need_tensors(
        "paged_attention_ragged", out=out, workspace_buffer=workspace_buffer, query=query,
        key_cache=key_cache, value_cache=value_cache, kv_indptr=kv_indptr,
    )  # fmt: skip
    _expect("number of dimensions of out", (3,), out.dim())
    _expect("kv_cache_layout", ("NHD", "HND"), kv_cache_layout)
    _expect("kv_cache_dtype", ("auto", "fp8", "fp8_e4m3"), kv_cache_dtype)
    _expect("alibi_slopes", (None,), alibi_slopes)
    _expect("fp8_out_scale", (None,), fp8_out_scale)
    scales = {}
    if kv_cache_dtype != "auto":
        _expect("dtype of key_cache", _FP8, key_cache.dtype)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        for name, given in scales.items():
            if given is None:
                raise ValueError(
                    f"paged_attention_ragged: {name} must be the layer's scale with an FP8 cache, got None"
                )
    elif key_cache.dtype != query.dtype:
        raise ValueError(
            f"paged_attention_ragged: kv_cache_dtype must be fp8 for a cache of {key_cache.dtype}, got 'auto'"
        )
    if kv_cache_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    if kv_last_page_lens is None:
        _expect("block_size without kv_last_page_lens", (1,), block_size)
        kv_last_page_lens = torch.ones_like(kv_indptr[1:])
    workspace, num_splits = _workspace(workspace_buffer, out, max_num_partitions)
    _paged_attention_ragged(
        query, key_cache, value_cache, kv_indptr, kv_page_indices, kv_last_page_lens,
        sm_scale=scale, page_size=block_size, logits_soft_cap=logits_soft_cap, q_len=mtp,
        num_splits=num_splits, out=out, lse=out.new_empty(out.shape[:2], dtype=torch.float32),
        workspace=workspace, **scales,
    )  # fmt: skip
    return out


def _workspace(buffer: torch.Tensor, out: torch.Tensor, at_most: int) -> tuple[torch.Tensor | None, int]:
    """(the buffer as float32, into how many parts it lets the keys be split)."""
    num_tokens, num_heads, head_dim = out.shape
    part = 4 * max(num_tokens * num_heads * (head_dim + 1), 1)
    num_splits = min(buffer.numel() * buffer.element_size() // part, at_most, _MAX_SPLITS)
    # An address cannot be traced: in compiled code a workspace that is not aligned is the op's to refuse.
    aligned = torch.compiler.is_compiling() or buffer.data_ptr() % 16 == 0
    if num_splits < 2 or not buffer.is_contiguous() or not aligned:
        return None, 1
    return buffer.view(-1).view(torch.uint8)[: num_splits * part].view(torch.float32), num_splits


def _expect(what: str, known: tuple[object, ...], got: object) -> None:
    if got not in known:
        raise ValueError(
            f"paged_attention_ragged: {what} must be {' or '.join(map(str, known))}, got {got!r}"
        )
