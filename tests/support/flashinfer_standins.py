"""Stand-ins for FlashInfer's functions, with the signatures of the version in third_party/README.md."""

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from peer_standins import attention, install, padded_lists
from torch import Tensor

from mla_fp8 import KV_LAYOUTS, reference


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
    assert kv_scale_format == "auto" and kv_cache.dtype == query.dtype and kv_cache.shape[1::2] == (1, 576)
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


class SparseMLASm120Wrapper:
    def __init__(
        self,
        max_num_tokens=None,
        max_num_heads=None,
        *,
        d_v=512,
        kv_scale_format="auto",
        kv_cache_format="fp8",
        extra_kv_fp4=False,
        compute_precision="default",
        device=None,
        backend="auto",
    ):
        assert (d_v, kv_scale_format, kv_cache_format, backend) == (512, "auto", "fp8", "auto")
        assert max_num_tokens is max_num_heads is None and not extra_kv_fp4 and compute_precision == "default"
        self.device = device

    def run(
        self,
        q,
        kv_cache,
        indices,
        output,
        sm_scale,
        *,
        topk_length=None,
        attn_sink=None,
        extra_kv_cache=None,
        extra_indices=None,
        extra_topk_length=None,
        out_lse=None,
        mid_out=None,
        mid_lse=None,
        prefill_impl=None,
        return_lse=False,
        lse_scale=1.0,
    ):
        num_tokens, heads, head_dim = q.shape
        layout = KV_LAYOUTS[{576: "dsv32", 512: "dsv4"}[head_dim]]
        assert q.device == self.device and q.is_contiguous() and q.dtype == torch.bfloat16
        assert output.shape == (num_tokens, heads, 512) and output.is_contiguous()
        assert extra_kv_cache is None or layout.name == "dsv4", "a second cache with DSV4 only"
        assert topk_length is extra_topk_length is out_lse is mid_out is mid_lse is prefill_impl is None
        if num_tokens == 0:
            return torch.empty(0, heads) if return_lse else None
        scopes = []
        for cache, rows in ((kv_cache, indices), (extra_kv_cache, extra_indices)):
            assert (cache is None) == (rows is None)
            if cache is None:
                continue
            pages, page_size, kv_heads, row_bytes = cache.shape
            assert cache.dtype == torch.uint8 and (kv_heads, row_bytes) == (1, layout.bytes_per_token)
            assert cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0 and cache.stride(1) == row_bytes
            assert rows.dtype == torch.int32 and rows.is_contiguous() and len(rows) == num_tokens
            assert rows.shape[1] > 0, "indices shape/stride mismatch"
            if num_tokens > 64:
                assert heads in (8, 16, 32, 64, 128) and rows.shape[1] % 64 == 0, "no prefill kernel"
            assert ((rows >= -1) & (rows < pages * page_size)).all(), "followed without a check"
            strided = cache.as_strided((pages, layout.page_bytes(page_size)), (cache.stride(0), 1))
            dequantised = reference.dequantize_cache(strided, layout=layout, page_size=page_size)
            scopes.append((dequantised, rows, None))
        result, _, lse = attention(q, scopes, sm_scale, attn_sink)
        output.copy_(result)
        if attn_sink is not None:
            lse = torch.logaddexp(lse, attn_sink.expand_as(lse))
        return lse / math.log(2) * lse_scale if return_lse else None


def flashinfer(monkeypatch) -> ModuleType:
    return install(
        monkeypatch, "flashinfer.mla", trtllm_batch_decode_with_kv_cache_mla, MLAPlanMetadata,
        BatchMLAPagedAttentionWrapper, SparseMLASm120Wrapper,
    )  # fmt: skip
