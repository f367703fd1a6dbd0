"""Rows of models without RoPE in the rows of those with it: their rope is zero. Scales as they are stored."""

import pytest
import torch
from assertions import assert_attention
from sparse_cases import make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

PAGE_SIZE, TOKENS = 4, 11
layouts = pytest.mark.parametrize("name", ["dsv32", "dsv32_fnuz"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def cache(name: str, device: str) -> torch.Tensor:
    return KV_LAYOUTS[name].empty(3, PAGE_SIZE, device).fill_(0xA5)


def written(latent: torch.Tensor, name: str, **options) -> torch.Tensor:
    kv_cache = cache(name, latent.device)
    slots = torch.arange(len(latent), device=latent.device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=name, page_size=PAGE_SIZE, **options)
    return kv_cache


@layouts
@dtypes
def test_the_bytes_of_rope_are_zero_and_the_others_those_of_a_row_with_it(name, dtype, device):
    latent = torch.randn(TOKENS, 512, device=device).to(dtype)
    got = written(latent, name, zero_rope=True)
    assert torch.equal(got, written(torch.nn.functional.pad(latent, (0, 64)), name))
    assert torch.equal(got, written(latent, name, rope=latent.new_zeros(TOKENS, 64)))
    layout = KV_LAYOUTS[name]
    rows = got.cpu().view(-1, layout.bytes_per_token)
    assert (rows[:TOKENS, layout.rope_offset :] == 0).all() and (rows[TOKENS:] == 0xA5).all()


@layouts
def test_the_reference_writes_the_same(name, device):
    latent, want = torch.randn(TOKENS, 512, device=device).bfloat16(), cache(name, device)
    slots = torch.arange(TOKENS, device=device)
    reference.quantize_kv(latent, slots, want, layout=KV_LAYOUTS[name], page_size=PAGE_SIZE)
    assert torch.equal(written(latent, name, zero_rope=True), want)


def test_a_latent_without_rope_is_refused_unless_zeros_are_asked_for(device):
    for name, width in (("dsv32", 512), ("dsv32_fnuz", 512), ("dsv4", 448), ("fp8_e4m3", 512), ("bf16", 512)):
        layout = KV_LAYOUTS[name]
        kv_cache = cache(name, device)
        scale = torch.ones(1, device=device) if layout.needs_scale else None
        latent = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
        with pytest.raises(RuntimeError, match=rf"latent must have shape \[\*, {layout.head_dim_qk}\]"):
            mla_fp8.quantize_kv(
                latent, torch.zeros(1, dtype=torch.int64, device=device), kv_cache, layout=name,
                page_size=PAGE_SIZE, scale=scale,
            )  # fmt: skip
        assert (kv_cache == 0xA5).all()


@layouts
def test_zeros_are_asked_for_in_place_of_a_rope(name, device):
    latent = torch.zeros(TOKENS, 576, device=device).bfloat16()
    with pytest.raises(RuntimeError, match=r"latent must have shape \[\*, 512\], got \[11, 576\]"):
        written(latent, name, zero_rope=True)
    with pytest.raises(RuntimeError, match="rope must be None with zero_rope, got a tensor"):
        written(latent[:, :512], name, zero_rope=True, rope=latent[:, 512:])


@pytest.mark.parametrize("name", [n for n, x in KV_LAYOUTS.items() if n not in ("dsv32", "dsv32_fnuz")])
def test_rows_of_other_layouts_have_no_zeros_to_ask_for(name, device):
    layout = KV_LAYOUTS[name]
    latent = torch.zeros(TOKENS, layout.nope_dim, device=device).bfloat16()
    scale = torch.ones(1, device=device) if layout.needs_scale else None
    with pytest.raises(RuntimeError, match=f"zero_rope must be False for layout {name}, got True"):
        written(latent, name, zero_rope=True, scale=scale)


@pytest.mark.op("sparse_decode")
def test_scales_that_are_no_powers_of_two_are_read_as_stored(device):
    """vLLM before #49435 wrote amax / 448 as it is."""
    layout, latent = KV_LAYOUTS["dsv32"], torch.randn(64, 512, device=device).bfloat16()
    kv_cache = layout.empty(1, 64, device)
    nope, scale, rope = layout.views(kv_cache, 64)
    tiles = latent.float().view(64, 4, 128)
    amax = tiles.abs().amax(-1)
    scale.copy_((amax / 448)[None])
    nope.copy_((tiles / (amax / 448)[..., None]).view(1, 64, 512).to(nope.dtype))
    rope.zero_()
    rows = nope[0].float() * scale[0].repeat_interleave(128, -1)
    slots = torch.arange(64, device=device)
    got = mla_fp8.dequantize_kv(kv_cache, slots, layout=layout, page_size=64)
    assert torch.equal(got, torch.nn.functional.pad(rows.bfloat16(), (0, 64)))
    assert (scale.frexp().mantissa != 0.5).any()
    q = torch.nn.functional.pad(torch.randn(3, 16, 512, device=device).bfloat16(), (0, 64))
    indices = torch.randint(64, (3, 40), device=device).int()
    options = {"layout": layout, "page_size": 64, "sm_scale": 256**-0.5}
    out, lse = mla_fp8.sparse_decode(q, kv_cache, indices, **options)
    want = reference.sparse_attention(
        q.double(), [(torch.nn.functional.pad(rows, (0, 64)).double(), indices, None)], sm_scale=256**-0.5
    )
    torch.testing.assert_close(out.double(), want[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want[2], rtol=0, atol=4e-3)


@pytest.mark.parametrize("num_q_heads", [5, 8, 16, 32, 64, 128])
def test_scales_below_zero_are_read_as_stored(num_q_heads, device):
    """Nobody writes them. All scales of some 16 keys may be such."""
    layout = KV_LAYOUTS["dsv32"]
    case = make_case(layout, device, num_tokens=3, num_q_heads=num_q_heads, topk=100, num_slots=300)
    scope = case.scopes[0]
    layout.views(scope.kv_cache, scope.page_size)[1].neg_()
    scope.rows[:, : layout.nope_dim].neg_()
    assert_attention(case, case.decode())
    assert_attention(case, case.prefill())
