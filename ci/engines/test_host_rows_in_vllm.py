"""Rows that vLLM's layer of DeepSeek V3.2 and GLM-5 stores with HiSparse, without a GPU (probe.py).

vLLM's forward runs up to where it has stored them; its kernels are here as functions of torch.
"""

import without_gpu

without_gpu.pretend_vllm()

import inspect
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from vllm.models.deepseek_v32 import attention
from vllm.v1.hisparse import runtime

from mla_fp8 import KV_LAYOUTS, probes
from mla_fp8.integrations import vllm_host_rows

LAYOUT, PAGES, PAGE = KV_LAYOUTS["dsv32"], 9, 16


@pytest.fixture(scope="module", autouse=True)
def kernels():
    theirs = attention.fused_norm_rope

    @wraps(theirs)
    def of_these(*args, **options):
        given = inspect.signature(theirs).bind(*args, **options).arguments
        return norm(**{name: given[name] for name in probes.parameters(norm)})

    attention.fused_norm_rope = of_these
    for _ in range(2):
        vllm_host_rows.take_over_stores()


def norm(q_c, kv_c, kv_rms_norm_w, slot_mapping, mla_kv_cache, kv_c_out):
    """vLLM's kernel of norms as far as a row's FP8 values: from float32, where it has a cache."""
    latents = torch.nn.functional.rms_norm(kv_c.float(), (LAYOUT.head_dim_v,), kv_rms_norm_w)
    kv_c_out.copy_(latents)
    if mla_kv_cache is not None:
        store(latents, slot_mapping, mla_kv_cache)
    return q_c


def store(latents: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    kept = slots >= 0
    blocks, rows = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    cache[blocks, rows, : LAYOUT.head_dim_v] = latents[kept].to(torch.float8_e4m3fn).view(torch.uint8)


class Done(Exception):
    pass


def rows_stored(cache, monkeypatch, given: torch.Tensor, slots: torch.Tensor, **handle):
    """What the layer's own forward stores of latents, by slot, with HiSparse's cache or without."""
    pages = torch.zeros(PAGES, PAGE, LAYOUT.bytes_per_token, dtype=torch.uint8)
    n, stored_twice = len(given), []
    metadata = SimpleNamespace(num_actual_tokens=int((slots >= 0).sum()), num_decode_tokens=0)

    def project(hidden):
        raise Done

    def concat_and_cache(latents, rope, kv_cache, slot_mapping, *_):
        stored_twice.append(len(latents))
        store(latents.float(), slot_mapping, kv_cache)

    if cache is not None:
        lone = torch.full_like(slots, -1)  # the host's slots: only whether there are some is looked at
        lone[slots >= 0] = 5
        vars(cache).update(
            view=SimpleNamespace(cache=pages), slot_mapping=slots, decode_batch=False,
            num_actual_tokens=metadata.num_actual_tokens,
            **({"dummy_batch": False, "draft_layer": False} | handle),
        )  # fmt: skip
    layer = attention.DeepseekV32Attention.__new__(attention.DeepseekV32Attention)
    torch.nn.Module.__init__(layer)
    weight = torch.linspace(0.9, 1.1, LAYOUT.head_dim_v)
    table = SimpleNamespace(cos_sin_cache=None)
    vars(layer).update(
        fused_qkv_a_proj=lambda hidden: (hidden, None), q_lora_rank=8, kv_lora_rank=LAYOUT.head_dim_v,
        qk_rope_head_dim=64, indexer=None, skip_topk=False, num_local_heads=1, v_head_dim=8,
        hisparse_cache=cache, use_pcp=False, layer_name="layer", kv_cache=pages, kv_cache_dtype="fp8_ds_mla",
        _k_scale=None, _k_scale_float=1.0,
        q_a_layernorm=SimpleNamespace(weight=None, variance_epsilon=1e-6), topk_indices_buffer=None,
        kv_a_layernorm=SimpleNamespace(weight=weight, variance_epsilon=1e-6), rotary_emb=table,
        _index_rope_interleave=False, q_b_proj=project, pcp_shard_decode_requests=False,
        impl=SimpleNamespace(prepare_for_batch=lambda m: None, do_kv_cache_update=concat_and_cache),
        _should_prepare_mqa_query=lambda *_: True,
    )  # fmt: skip
    context = SimpleNamespace(
        slot_mapping={"layer": slots if cache is None else lone}, attn_metadata={"layer": metadata},
        cudagraph_runtime_mode=None, no_compile_layers={"layer": layer},
    )  # fmt: skip
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    monkeypatch.setattr(attention, "get_attention_context", lambda name: (metadata, layer, None, None))
    with pytest.raises(Done):
        layer(torch.arange(n), torch.cat([torch.zeros(n, 8).bfloat16(), given, given[:, :64]], 1))
    return pages, stored_twice


def test_rows_are_those_without_hisparse_but_those_of_draft_models(monkeypatch):
    torch.manual_seed(0)
    given = torch.randn(40, LAYOUT.head_dim_v).bfloat16()
    slots = torch.full((64,), -1)
    slots[:37] = torch.randperm(PAGES * PAGE)[:37]  # three rows pad a graph
    want, _ = rows_stored(None, monkeypatch, given, slots[:40])
    cache = runtime.HiSparseCacheHandle(SimpleNamespace(max_num_reqs=4))
    got, stored_twice = rows_stored(cache, monkeypatch, given, slots)
    assert torch.equal(got, want) and want.any() and not stored_twice
    theirs, stored_twice = rows_stored(cache, monkeypatch, given, slots, draft_layer=True)
    assert stored_twice == [37] and 0.0005 < (theirs != want).float().mean() < 0.1
    nothing, stored_twice = rows_stored(cache, monkeypatch, given, slots, dummy_batch=True)
    assert not stored_twice and not nothing.any()
