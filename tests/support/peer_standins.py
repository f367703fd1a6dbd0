"""Stand-ins for packages that cannot run here: their signatures (versions in third_party/README.md), their
conventions and their limits, over plain PyTorch. FlashInfer's are in flashinfer_standins.py.
"""

import math
import sys
from types import ModuleType

import torch
from torch import Tensor

from mla_fp8 import KV_LAYOUTS, reference

INF = float("inf")


def install(monkeypatch, name: str, *functions) -> ModuleType:
    """The module, importable by that name; its parent packages too."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        module.__spec__ = type("Spec", (), {"name": module.__name__})()
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def attention(q, scopes, sm_scale, attn_sink=None):
    """(out, max_logits, lse) of our specification, natural logarithm, -inf for rows without keys."""
    return reference.sparse_attention(q, scopes, sm_scale=sm_scale, attn_sink=attn_sink)


def padded_lists(indptr: Tensor, indices: Tensor, num_slots: int) -> Tensor:
    """Lists of slots, one after another, as rows with -1 behind."""
    counts = indptr.diff()
    used = indices[: int(indptr[-1])]
    assert ((used >= 0) & (used < num_slots)).all(), "followed without a check"
    column = torch.arange(int(counts.max()), device=indices.device)
    at = (indptr[:-1, None] + column).clamp_max(len(indices) - 1)
    return torch.where(column < counts[:, None], indices[at.long()], -1)


# flash_mla


class FlashMLASchedMeta:
    """Remembers the first call's shapes, as the package's does."""

    shapes = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    out=None,
):
    batch, s_q, heads, head_dim = q.shape
    layout = KV_LAYOUTS[{576: "dsv32", 512: "dsv4"}[head_dim]]
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
    shapes = (q.shape, k_cache.shape[1], indices.shape)
    assert tile_scheduler_metadata.shapes in (None, shapes), "another call's schedule"
    tile_scheduler_metadata.shapes = shapes
    assert heads in (64, 128) and 0 < batch < 11673 and is_fp8_kvcache and not causal
    if layout.name == "dsv32":
        assert topk_length is None, "V3.2 does not support dynamic topk length"
        assert extra_k_cache is None, "V3.2 does not support extra KV cache"
    scopes = []
    for cache, rows, length in (
        (k_cache, indices, topk_length),
        (extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
    ):
        if cache is None:
            continue
        assert cache.shape[2:] == (1, layout.bytes_per_token) and cache.stride(1) == layout.bytes_per_token
        num_slots = cache.shape[0] * cache.shape[1]
        assert rows.shape[:2] == (batch, s_q) and rows.shape[2] % 64 == 0 and rows.shape[2] > 0
        assert ((rows == -1) | ((rows >= 0) & (rows < num_slots))).all(), "followed without a check"
        if length is not None:
            assert length.shape == (batch,) and ((length >= 0) & (length <= rows.shape[2])).all()
        pages = cache.as_strided((cache.shape[0], layout.page_bytes(cache.shape[1])), (cache.stride(0), 1))
        dequantised = reference.dequantize_cache(pages, layout=layout, page_size=cache.shape[1])
        per_row = None if length is None else length.repeat_interleave(s_q)
        scopes.append((dequantised, rows.flatten(0, 1), per_row))
    result, _, lse = attention(q.flatten(0, 1), scopes, softmax_scale, attn_sink)
    lse = lse.where(lse != -INF, INF).unflatten(0, (batch, s_q)).mT
    return result.unflatten(0, (batch, s_q)), lse


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    assert q.shape[1] in (64, 128) and kv.shape[1] == 1 and indices.shape[2] % 128 == 0 and len(q) > 0
    if topk_length is not None:
        assert ((topk_length >= 0) & (topk_length <= indices.shape[2])).all()
    result, max_logits, lse = attention(q, [(kv[:, 0], indices[:, 0], topk_length)], sm_scale, attn_sink)
    return result, max_logits, lse.where(lse != -INF, INF)


def flash_mla(monkeypatch, name: str = "flash_mla") -> ModuleType:
    return install(monkeypatch, name, get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)


def sgl_kernel(monkeypatch) -> ModuleType:
    """The copy in sgl-kernel: its prefill gives max_logits and lse in base 2."""
    module = flash_mla(monkeypatch, "sgl_kernel.flash_mla")

    def base_2(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
        return out, max_logits / math.log(2), lse / math.log(2)

    module.flash_mla_sparse_fwd = base_2
    return module


def sgl_flash_mla(monkeypatch, has_legacy: bool = True) -> ModuleType:
    """SGLang's build of 2026: two sides, of which the one that is not asked for knows V4.1 alone."""

    def decode(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
               softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
               extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
               enable_batch_invariant=False, use_legacy=False, kv_format=None):  # fmt: skip
        assert use_legacy and not enable_batch_invariant and kv_format is None, "V4.1's formats only"
        return flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
            softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache,
            extra_indices_in_kvcache, topk_length, extra_topk_length,
        )  # fmt: skip

    def prefill(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False):
        assert use_legacy, "no kernel for Hopper"
        return flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    module = install(monkeypatch, "flash_mla", get_mla_metadata)
    module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd = decode, prefill
    module.has_legacy = lambda: has_legacy
    return module


# aiter


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    num_kv_splits_indptr=None,
    work_meta_data=None,
    work_indptr=None,
    work_info_set=None,
    reduce_indptr=None,
    reduce_final_map=None,
    reduce_partial_map=None,
    q_scale=None,
    kv_scale=None,
    intra_batch_mode=False,
    return_logits=False,
    return_lse=False,
    g_kv_indptr=None,
    cp_world_size=1,
    cp_rank=0,
    causal=True,
):
    num_slots, page, kv_heads, head_dim = kv_buffer.shape
    assert (page, kv_heads, page_size, nhead_kv, max_seqlen_q) == (1, 1, 1, 1, 1) and head_dim == 576
    assert q.shape[1] in (16, 128) and q.dtype == kv_buffer.dtype and (kv_last_page_lens == 1).all()
    assert (q_scale is None) == (q.dtype == torch.bfloat16) == (kv_scale is None)
    assert qo_indptr.tolist() == list(range(len(q) + 1))
    assert (kv_indptr.diff() > 0).all(), "an empty row corrupts the schedule"
    indices = padded_lists(kv_indptr, kv_indices, num_slots)
    rows, queries = kv_buffer.view(num_slots, head_dim).float(), q.float()
    if q_scale is not None:
        rows, queries = rows * kv_scale, queries * q_scale
    result, _, lse = attention(queries, [(rows, indices, None)], sm_scale)
    o.copy_(result)
    return None, lse if return_lse else None


def aiter(monkeypatch) -> ModuleType:
    return install(monkeypatch, "aiter.mla", mla_decode_fwd)
