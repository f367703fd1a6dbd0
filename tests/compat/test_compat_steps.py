"""Of every function with another package's name: steps without tokens, errors by the caller's names."""

import inspect
import re

import pytest
import torch

from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS, dequantize_kv, quantize_kv
from mla_fp8.compat import aiter, deep_gemm, flash_mla, sglang, sglang_layer, vllm

DSV4, DSV32 = KV_LAYOUTS["dsv4"], KV_LAYOUTS["dsv32"]
I32, I64, BF16, F32 = torch.int32, torch.int64, torch.bfloat16, torch.float32


def calls(device):
    """name: (function, arguments by name) of a step without a token."""

    def none(*shape, dtype=BF16):
        return torch.zeros(shape, dtype=dtype, device=device)

    cache, norm = DSV4.empty(1, 64, device), torch.ones(512, device=device)
    pages, rows = DSV4.flash_mla_view(cache, 64), DSV32.flash_mla_view(DSV32.empty(1, 64, device), 64)
    at, table = none(0, dtype=I64), none(8, 64, dtype=F32)
    cis, floats = none(8, 32, dtype=torch.complex64), none(8, 64, dtype=F32)
    starts = none(3, dtype=I32)
    insert = {"k_cache": cache, "slot_mapping": at, "position_ids": at, "cos_sin_cache": table}
    store = {
        "norm_weight": norm,
        "positions": at,
        "eps": 1e-6,
        "freqs_cis": floats,
        "k_cache": cache,
        "page_size": 64,
    }
    ring = {"kv_input": none(0, 1024, dtype=F32), "kv_state": none(16, 1024, dtype=F32), "req": at,
            "raw_out_loc": at, "ring_size": 4} | store  # fmt: skip
    index = INDEX_LAYOUTS["index_fp8"].empty(1, 64, device).view(1, 64, 1, 132)
    e4m3 = torch.float8_e4m3fn
    return {
        "flash_mla_with_kvcache": (flash_mla.flash_mla_with_kvcache, {
            "q": none(0, 1, 8, 512), "k_cache": pages, "block_table": None, "cache_seqlens": None,
            "head_dim_v": 512, "tile_scheduler_metadata": None, "is_fp8_kvcache": True,
            "indices": none(0, 1, 64, dtype=I32), "topk_length": none(0, dtype=I32),
            "attn_sink": none(8, dtype=F32), "extra_k_cache": pages,
            "extra_indices_in_kvcache": none(0, 1, 4, dtype=I32), "extra_topk_length": none(0, dtype=I32),
        }),
        "flash_mla_sparse_fwd": (flash_mla.flash_mla_sparse_fwd, {
            "q": none(0, 8, 512), "kv": none(3, 1, 512), "indices": none(0, 1, 64, dtype=I32),
            "sm_scale": 1.0, "attn_sink": none(8, dtype=F32), "topk_length": none(0, dtype=I32),
        }),
        "fp8_paged_mqa_logits": (deep_gemm.fp8_paged_mqa_logits, {
            "q": none(0, 1, 32, 128, dtype=e4m3), "kv_cache": index, "weights": none(0, 32, dtype=F32),
            "context_lens": none(0, dtype=I32), "block_table": none(0, 3, dtype=I32), "schedule_meta": None,
            "max_context_len": 64,
        }),
        "fp8_mqa_logits": (deep_gemm.fp8_mqa_logits, {
            "q": none(0, 32, 128, dtype=e4m3), "kv": (none(0, 128, dtype=e4m3), none(0, dtype=F32)),
            "weights": none(0, 32, dtype=F32), "cu_seq_len_k_start": none(0, dtype=I32),
            "cu_seq_len_k_end": none(0, dtype=I32), "max_seqlen_k": 5,
        }),
        "dequantize_k_cache_paged": (sglang.dequantize_k_cache_paged, {
            "quant_k_cache": cache, "page_table_1_flattened": at, "page_size": 64, "out": none(0, 1, 512),
        }),
        "dequantize_k_cache_paged_dsa": (sglang.dequantize_k_cache_paged_dsa, {
            "quant_k_cache": rows.view(e4m3), "page_table_1_flattened": at,
        }),
        "combine_topk_swa_indices": (sglang.combine_topk_swa_indices, {
            "topk_indices": none(0, 8, dtype=I32), "query_start_loc": none(1, dtype=I32),
            "seq_lens": none(0, dtype=I32), "gather_lens": none(0, dtype=I32),
            "compressed_base": none(0, dtype=I32), "swa_base": none(0, dtype=I32),
            "window_size": 4, "compress_ratio": 4, "topk": 8,
        }),
        "build_swa_token_ids": (sglang.build_swa_token_ids, {
            "seq_lens": none(0, dtype=I32), "extend_seq_lens": none(0, dtype=I32), "req_pool_indices": at,
            "req_to_token": none(0, 5, dtype=I32), "full_to_swa": at, "swa_window": 4, "total_swa": 0,
        }),
        "fused_q_norm_rope": (sglang_layer.fused_q_norm_rope, {
            "q_input": none(0, 8, 512), "q_output": none(0, 8, 512), "eps": 1e-6,
            "freqs_cis": cis, "positions": at,
        }),
        "fused_k_norm_rope_flashmla": (sglang_layer.fused_k_norm_rope_flashmla, {
            "kv": none(0, 512), "kv_weight": norm, "eps": 1e-6, "freqs_cis": cis, "positions": at,
            "out_loc": at, "kvcache": cache, "page_size": 64, "q": none(0, 8, 512),
        }),
        "fused_rope_inplace": (sglang_layer.fused_rope_inplace, {
            "q": none(0, 8, 64), "k": none(0, 1, 64), "freqs_cis": cis, "positions": at,
        }),
        "c1_decode_norm_rope_store": (sglang_layer.c1_decode_norm_rope_store, {
            "kv_input": none(0, 512, dtype=F32), "out_loc": at, "out": none(0, 512), **store,
        }),
        "c2_decode_norm_rope_store": (sglang_layer.c2_decode_norm_rope_store, {**ring, "out": none(0, 512)}),
        "c2_prefill_norm_rope_store": (sglang_layer.c2_prefill_norm_rope_store, {
            **ring, "extend_start_loc": none(1, dtype=I32), "extend_seq_lens": none(1, dtype=I32),
        }),
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": (
            vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
            {"q": none(0, 8, 512), "kv": none(0, 512), **insert, "q_head_padded": 64, "eps": 1e-6,
             "cache_block_size": 64},
        ),
        "fused_deepseek_v4_kv_rope_quant_insert": (
            vllm.fused_deepseek_v4_kv_rope_quant_insert,
            {"kv": none(0, 512), **insert, "cache_block_size": 64},
        ),
        "fused_deepseek_v4_kv_norm_rope_quant_insert": (
            vllm.fused_deepseek_v4_kv_norm_rope_quant_insert,
            {"kv": none(0, 512), "norm_weight": norm, **insert, "eps": 1e-6, "cache_block_size": 64},
        ),
        "fused_inv_rope_fp8_quant": (vllm.fused_inv_rope_fp8_quant, {
            "o": none(0, 16, 512), "positions": at, "cos_sin_cache": table, "n_groups": 2,
            "heads_per_group": 8,
        }),
        "fused_inv_rope_fp8_quant in bf16": (vllm.fused_inv_rope_fp8_quant, {
            "o": none(0, 16, 512), "positions": at, "cos_sin_cache": table, "n_groups": 2,
            "heads_per_group": 8,
            "quantize": False,
        }),
        "fused_save_compress_norm": (vllm.fused_save_compress_norm, {
            "kv_score": none(0, 1024, dtype=F32), "positions": at, "state_cache": none(2, 8, 1024, dtype=F32),
            "slot_mapping": at, "query_start_loc": starts, "token_to_req_indices": None,
            "rms_norm_weight": norm, "rms_norm_eps": 1e-6, "compress_ratio": 2, "latent_out": none(0, 512),
        }),
        "rope_quant_insert": (vllm.rope_quant_insert, {
            "latent": none(0, 512), "positions": at, "cos_sin_cache": table, "kv_cache": pages[:, :, 0],
            "slot_mapping": at, "compress_ratio": 2,
        }),
        "paged_attention_ragged": (aiter.paged_attention_ragged, {
            "out": none(0, 8, 64), "workspace_buffer": none(64), "query": none(0, 8, 64),
            "key_cache": none(2, 16, 1, 64), "value_cache": none(2, 16, 1, 64), "scale": 1.0,
            "kv_indptr": none(1, dtype=I32), "kv_page_indices": none(0, dtype=I32),
            "kv_last_page_lens": none(0, dtype=I32), "block_size": 16,
            "max_num_partitions": 1, "alibi_slopes": None, "kv_cache_dtype": "auto", "kv_cache_layout": "NHD",
            "logits_soft_cap": 0.0, "k_scale": None, "v_scale": None,
        }),
    }  # fmt: skip


NAMES = [*calls("cpu")]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_a_token_returns(name, device):
    function, arguments = calls(device)[name]
    function(**arguments)


CHANGES = {
    "dtype": lambda x: x.double(),
    "one dimension more": lambda x: x[None],
    "a row more": lambda x: torch.cat([x, x.new_zeros(1, *x.shape[1:])]),
    "a column less": lambda x: x[..., :-1],
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_has_the_callers_name(name, change):
    """An error of an op below names its own argument first: it has to be one that the caller knows."""
    function, arguments = calls("cpu")[name]
    known, errors = inspect.signature(function).parameters, {}
    for argument, x in arguments.items():
        if not isinstance(x, torch.Tensor) or (x.dtype.itemsize == 1 and change == "a row more"):
            continue
        try:
            function(**(arguments | {argument: CHANGES[change](x)}))
        except (RuntimeError, ValueError, TypeError) as error:
            errors[argument] = str(error)
    for argument, said in errors.items():
        refused = re.split(r"\W+", said.partition(" must ")[0])
        assert " must " in said and any(word in known for word in refused), f"{argument}: {said}"
    assert errors or change != "dtype"


def test_pages_of_sglangs_cache_may_lie_apart(device):
    """As dequantize_kv takes them; view() of torch does not."""
    wide = torch.zeros(3, 2, DSV32.page_bytes(4), dtype=torch.uint8, device=device)
    latent = torch.randn(12, 576, device=device).bfloat16()
    slots = torch.randperm(12, device=device)
    quantize_kv(latent, slots, wide[:, 0], layout=DSV32, page_size=4)
    pages = DSV32.flash_mla_view(wide[:, 0], 4)
    assert not pages.is_contiguous()
    want = dequantize_kv(wide[:, 0], slots, layout=DSV32, page_size=4)
    for given in (pages, pages.contiguous().view(-1, 1, DSV32.bytes_per_token)):
        got = sglang.dequantize_k_cache_paged_dsa(given.view(torch.float8_e4m3fn), slots)
        assert torch.equal(got[:, 0], want)


def test_a_table_of_floats_where_complex_numbers_are_wanted_is_refused_by_name():
    function, arguments = calls("cpu")["fused_q_norm_rope"]
    with pytest.raises(ValueError, match=r"freqs_cis must be complex64 of shape .* got torch.float32"):
        function(**(arguments | {"freqs_cis": torch.zeros(8, 64)}))
