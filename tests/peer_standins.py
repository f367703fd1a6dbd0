"""Stand-ins for packages that cannot run here: their signatures (versions in third_party/README.md), their
conventions and their limits, over plain PyTorch.
"""

import math
import sys
from dataclasses import dataclass
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


# flashinfer


def trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    sparse_mla_top_k=0,
    out=None,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    sinks=None,
    skip_softmax_threshold_scale_factor=None,
    enable_pdl=None,
    backend="auto",
    is_var_seq=True,
    uses_shared_paged_kv_idx=True,
    lse=None,
    return_lse=False,
    cute_dsl_impl="auto",
    kv_scale_format="auto",
    cum_seq_lens_q=None,
    max_q_len=None,
    multi_ctas_kv_counter_buffer=None,
    sparse_mla_top_k_lens=None,
    enable_dcp=False,
    cp_world=1,
    cp_rank=0,
    causal_seqlens_kv_global=None,
    use_fp16_softmax=None,
    return_lse_base=None,
):
    batch, q_len, heads, head_dim = query.shape
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64) and head_dim == 576
    assert (workspace_buffer == 0).all() and heads in (8, 16, 32, 64, 128)
    assert block_tables.shape == (batch, q_len, sparse_mla_top_k) and sparse_mla_top_k > 0
    indices, lengths = block_tables.flatten(0, 1), seq_lens.flatten()
    column = torch.arange(sparse_mla_top_k, device=query.device)
    assert ((indices >= 0) == (column < lengths[:, None])).all(), "valid slots come first"
    assert (lengths > 0).all(), "no row may be empty"
    if kv_scale_format == "pow2_fp32":  # SM120: packed
        layout, page_size = KV_LAYOUTS["dsv32"], kv_cache.shape[2]
        assert kv_cache.shape[1::2] == (1, layout.bytes_per_token) and query.dtype == torch.bfloat16
        pages = kv_cache.transpose(1, 2).as_strided(
            (len(kv_cache), layout.page_bytes(page_size)), (kv_cache.stride(0), 1)
        )
        rows = reference.dequantize_cache(pages, layout=layout, page_size=page_size)
    else:
        assert kv_cache.dtype == query.dtype and kv_cache.shape[1::2] == (1, 576)
        rows = kv_cache.reshape(-1, 576).float()
    scale = bmm1_scale if isinstance(bmm1_scale, Tensor) else torch.tensor(bmm1_scale)
    q = (query.flatten(0, 1).float() * scale.to(query.device)).to(torch.float32)
    result, _, natural = attention(q, [(rows, indices, lengths)], 1.0)
    result = (result * bmm2_scale).bfloat16()
    if not return_lse:
        return result.view(batch, q_len, heads, 512)
    base = 1.0 if return_lse_base == "basee" else math.log(2)
    return result.view(batch, q_len, heads, 512), (natural / base).view(batch * q_len, heads)


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None


class BatchMLAPagedAttentionWrapper:
    """As its FA3 backend: what plan() declares is what run() has to be."""

    planned = None

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        assert float_workspace_buffer.nbytes >= 128 << 20 and not use_cuda_graph and backend == "auto"

    def plan(
        self,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        num_heads=None,
        head_dim_ckv=None,
        head_dim_kpe=None,
        page_size=None,
        causal=None,
        sm_scale=None,
        q_data_type=None,
        kv_data_type=None,
        use_profiler=False,
        *,
        metadata=None,
        cum_seq_lens_q=None,
        block_tables=None,
        seq_lens=None,
        max_q_len=None,
        query_layout=None,
        kv_cache_layout=None,
        lse_mode="none",
        output_dtype=None,
        output_scale="none",
        scale_mode="default",
        skip_softmax=False,
        enable_pdl=None,
        use_sinks=False,
    ):
        assert qo_indptr is kv_indptr is kv_indices is kv_len_arr is None, "deprecated"
        assert (head_dim_ckv, causal, q_data_type) == (512, False, torch.bfloat16) and head_dim_kpe in (0, 64)
        assert kv_data_type in (torch.bfloat16, torch.float8_e4m3fn) and isinstance(sm_scale, float)
        parts = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        assert all(x.dtype == torch.int32 and x.dim() == 1 and x.is_contiguous() for x in parts)
        queries, keys, indices, lengths = parts
        assert queries.tolist() == list(range(len(lengths) + 1)) and len(lengths) <= 16384
        assert (
            torch.equal(keys.diff(), -(-lengths // page_size)) and keys[0] == 0 and keys[-1] <= len(indices)
        )
        self.planned = (metadata, num_heads, head_dim_kpe, page_size, sm_scale, kv_data_type, lse_mode)

    def run(
        self,
        q_nope=None,
        q_pe=None,
        ckv_cache=None,
        kpe_cache=None,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        query=None,
        kv_cache=None,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        bmm1_scale=None,
        bmm2_scale=None,
    ):
        assert q_nope is q_pe is ckv_cache is kpe_cache is None, "deprecated"
        metadata, num_heads, kpe_dim, page_size, sm_scale, kv_dtype, lse_mode = self.planned
        assert lse_mode == ("none", "base2", "basee")[return_lse + return_lse_base_on_e]
        assert query.shape == (len(metadata.kv_len_arr), num_heads, 512 + kpe_dim)
        assert kv_cache.shape[1:] == (page_size, 512 + kpe_dim) and kv_cache.dtype == kv_dtype
        rows = kv_cache.flatten(0, 1).to(query.dtype)
        if kv_dtype == torch.bfloat16:
            assert ckv_scale is kpe_scale is None, "only valid when kv_data_type is FP8"
        else:  # multiplied in bf16
            rows = torch.cat([rows[:, :512] * ckv_scale, rows[:, 512:] * kpe_scale], 1)
        indices = padded_lists(metadata.kv_indptr, metadata.kv_indices, len(rows))
        result, _, natural = attention(query, [(rows, indices, None)], sm_scale)
        return result, natural if return_lse_base_on_e else natural / math.log(2)


def flashinfer(monkeypatch) -> ModuleType:
    functions = (trtllm_batch_decode_with_kv_cache_mla, MLAPlanMetadata, BatchMLAPagedAttentionWrapper)
    return install(monkeypatch, "flashinfer.mla", *functions)


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
