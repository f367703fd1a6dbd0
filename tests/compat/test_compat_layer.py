"""vLLM's and SGLang's fused ops around attention: their conventions, over what the specification says."""

import pytest
import torch
from assertions import assert_same
from kv_cache_cases import poisoned_cache
from norm_rope_cases import MAX_POS, assert_same_bf16, insert_case, values

import mla_fp8
from mla_fp8 import KV_LAYOUTS, layer_reference
from mla_fp8.compat import sglang_layer, vllm

PAGES, PAGE_SIZE, EPS = 3, 64, 1e-6


def case(device, layout="dsv4", num_tokens=25):
    """(arguments of the op, cos | sin, complex table); int64 as vLLM has it."""
    arguments = insert_case(KV_LAYOUTS[layout], device, num_tokens, PAGES * PAGE_SIZE)
    cos, sin = arguments["cos"], arguments["sin"]
    return arguments, torch.cat([cos, sin], 1), torch.complex(cos.contiguous(), sin.contiguous())


def cache(device, layout="dsv4"):
    return poisoned_cache(KV_LAYOUTS[layout], PAGES, PAGE_SIZE, device)


def inserted(arguments, device, layout="dsv4", weight=True):
    kv_cache = cache(device, layout)
    given = arguments if weight else arguments | {"kv_weight": None}
    mla_fp8.k_norm_rope_insert(**given, kv_cache=kv_cache, layout=layout, page_size=PAGE_SIZE)
    return kv_cache


def q_of(arguments, q, norm_q, heads):
    at = (arguments[name] for name in ("cos", "sin", "positions"))
    return layer_reference.prepare_q(q, *at, eps=EPS, norm_q=norm_q, num_heads=heads)


def test_vllms_insert_in_its_three_forms(device):
    arguments, table, _ = case(device)
    rest = (arguments["slot_mapping"], arguments["positions"], table)
    q, kv = values(25, 5, 512, device=device), arguments["kv"]
    want = inserted(arguments, device, weight=False)

    kv_cache, own = cache(device), q.clone()
    insert = vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
    assert insert(own, kv, kv_cache, *rest, EPS, PAGE_SIZE) is None
    assert torch.equal(kv_cache, want)
    assert_same_bf16(own, q_of(arguments, q, True, 5))

    kv_cache = cache(device)
    padded = insert(q, kv, kv_cache, *rest, 8, EPS, PAGE_SIZE)
    assert torch.equal(kv_cache, want)
    assert_same_bf16(padded, q_of(arguments, q, True, 8))

    kv_cache = cache(device)
    padded = insert(q, kv, kv_cache, *rest, 8, EPS, PAGE_SIZE, False, False, True, False)
    assert torch.equal(kv_cache, want)
    assert_same_bf16(padded, q_of(arguments, q, False, 8))


@pytest.mark.parametrize(
    "flags", [(True, True, True, False), (True, False, False, False), (True, False, True, True)]
)
def test_vllms_insert_refuses_what_it_cannot_write(flags, device):
    """V4.1's rows, of which vLLM keeps each row's scales behind the row; q for other kernels."""
    arguments, table, _ = case(device)
    rest = (arguments["slot_mapping"], arguments["positions"], table)
    q, kv_cache = values(25, 5, 512, device=device), cache(device)
    want = kv_cache.clone()
    must = "kv_mxfp8 must be False, apply_q_rope True, is_q_interleaved False"
    with pytest.raises(ValueError, match=must):
        vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q, arguments["kv"], kv_cache, *rest, 8, EPS, PAGE_SIZE, *flags
        )
    assert torch.equal(kv_cache, want)


def test_vllms_inserts_of_latents_alone(device):
    arguments, table, _ = case(device)
    rest = (arguments["slot_mapping"], arguments["positions"], table)
    kv_cache = cache(device)
    vllm.fused_deepseek_v4_kv_rope_quant_insert(arguments["kv"], kv_cache, *rest, PAGE_SIZE)
    assert torch.equal(kv_cache, inserted(arguments, device, weight=False))
    kv_cache = cache(device)
    insert = vllm.fused_deepseek_v4_kv_norm_rope_quant_insert
    insert(arguments["kv"], arguments["kv_weight"], kv_cache, *rest, EPS, PAGE_SIZE)
    assert torch.equal(kv_cache, inserted(arguments, device))


def test_vllms_inverse_rope_takes_padded_heads(device):
    arguments, table, _ = case(device)
    o, at = values(25, 64, 512, device=device), arguments["positions"]
    got = vllm.fused_inv_rope_fp8_quant(o, at, table, 2, 8)
    want = mla_fp8.inverse_rope_quantize(o[:, :16], arguments["cos"], arguments["sin"], at, num_groups=2)
    assert got[0].shape == (25, 2, 4096) and got[1].stride(0) == 1
    assert_same([x.float() for x in got], [x.float() for x in want])
    plain, nothing = vllm.fused_inv_rope_fp8_quant(o, at, table, 2, 8, quantize=False)
    turned = mla_fp8.inverse_rope(o[:, :16], arguments["cos"], arguments["sin"], at)
    assert torch.equal(plain, turned.view(25, 2, 4096)) and nothing.numel() == 0
    for options in ({"tma_aligned_scales": True}, {"nope_dim": 512}, {"rope_dim": 32, "nope_dim": 480}):
        with pytest.raises(ValueError, match="tma_aligned_scales must be False"):
            vllm.fused_inv_rope_fp8_quant(o, at, table, 2, 8, **options)


@pytest.mark.parametrize("eps", [EPS, None])
def test_sglangs_heads(eps, device):
    arguments, _, table = case(device)
    q = values(25, 5, 512, device=device)
    out = torch.full_like(q, 7.0)
    sglang_layer.fused_q_norm_rope(q, out, eps, table, arguments["positions"])
    assert_same_bf16(out, q_of(arguments, q, eps is not None, 5))


@pytest.mark.parametrize("name, layout", [("v4", "dsv4"), ("v41", "dsv41")])
def test_sglangs_latents(name, layout, device):
    arguments, _, table = case(device, layout)
    kv_cache = cache(device, layout)
    inputs = (arguments["kv"], arguments["kv_weight"], EPS, table, arguments["positions"])
    insert = sglang_layer.fused_k_norm_rope_flashmla
    insert(*inputs, arguments["slot_mapping"].int(), kv_cache, PAGE_SIZE, layout=name)
    narrow = arguments | {"slot_mapping": arguments["slot_mapping"].int()}
    assert torch.equal(kv_cache, inserted(narrow, device, layout))
    q, kv_cache = values(25, 5, 512, device=device), cache(device, layout)
    own = q.clone()
    insert(*inputs, narrow["slot_mapping"], kv_cache, PAGE_SIZE, layout=name, q=own)
    assert torch.equal(kv_cache, inserted(narrow, device, layout))
    assert_same_bf16(own, q_of(arguments, q, False, 5))
    with pytest.raises(ValueError, match="layout must be v4 or v41, got 'v32'"):
        insert(*inputs, arguments["slot_mapping"], kv_cache, PAGE_SIZE, layout="v32")


def test_sglangs_rotation_in_place(device):
    arguments, _, table = case(device)
    at = arguments["positions"] % MAX_POS
    q, k = values(25, 5, 64, device=device), values(25, 1, 64, device=device)
    for inverse in (False, True):
        own = q.clone(), k.clone()
        sglang_layer.fused_rope_inplace(*own, table, at, inverse)
        for got, x in zip(own, (q, k), strict=True):
            want = layer_reference.rotated(x, arguments["cos"], arguments["sin"], at, inverse=inverse)
            assert_same_bf16(got, want)
