"""A cache typed as numbers that its layout does not have is refused, by every op and whoever serves it."""

import pytest
import torch
from error_cases import check_refused
from kv_cache_cases import latents, layer_scale, poisoned_cache
from op_samples import NO_KERNEL, SAMPLES

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS
from mla_fp8.compat import deep_gemm, flash_mla, sglang, sglang_layer, vllm

BYTES = (torch.uint8, torch.int8)
FN, FNUZ, E2M1, BF16 = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2, torch.bfloat16,
)  # fmt: skip
NUMBERS = (FN, FNUZ, E2M1, BF16)
# Bytes apart, what a row of each layout holds: its values, a rope in bf16, scales in e4m3fn.
HELD = {
    "dsv32": (FN, BF16), "dsv4": (FN, BF16), "fp8_e4m3": (FN,), "fp8_e4m3_512": (FN,), "bf16": (BF16,),
    "bf16_512": (BF16,), "dsv32_fnuz": (FNUZ, BF16), "dsv4_fnuz": (FNUZ, BF16), "fp8_e4m3_fnuz": (FNUZ,),
    "fp8_e4m3_512_fnuz": (FNUZ,), "dsv41": (FN,), "dsv32_nope": (FN,), "dsv41_fp4": (FN, E2M1),
}  # fmt: skip
CACHES = ("kv_cache", "extra_kv_cache", "index_cache")
layouts = pytest.mark.parametrize("name", KV_LAYOUTS)


def test_every_layout_is_listed():
    assert set(HELD) == set(KV_LAYOUTS)


def typed(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cache.view(torch.uint8).view(dtype)


@layouts
def test_a_cache_is_read_as_bytes_or_as_what_its_rows_hold(name, device):
    layout = KV_LAYOUTS[name]
    cache, slots = poisoned_cache(layout, 2, 16, device), torch.arange(32, device=device)
    options = {"layout": layout, "page_size": 16, "scale": layer_scale(layout, device)}
    mla_fp8.quantize_kv(latents(layout, 32, device), slots, cache, **options)
    want = mla_fp8.dequantize_kv(cache, slots, **options)
    for dtype in (*BYTES, *HELD[name]):
        assert torch.equal(mla_fp8.dequantize_kv(typed(cache, dtype), slots, **options), want)
        layout.views(typed(cache, dtype), 16)
    for dtype in set(NUMBERS) - set(HELD[name]):
        arguments = {"kv_cache": typed(cache, dtype), "slots": slots, **options}
        check_refused(mla_fp8.dequantize_kv, arguments, f"for layout {name}, got ")
        with pytest.raises(
            ValueError, match=f"kv_cache must have dtype torch.uint8 or .* layout {name}, got"
        ):
            layout.views(typed(cache, dtype), 16)


OPS_OF_CACHES = [
    (name, key)
    for name, sample in SAMPLES.items()
    for key in CACHES
    if key in [x.name for x in getattr(torch.ops.mla_fp8, name).default._schema.arguments]
]


@pytest.mark.parametrize("name, key", OPS_OF_CACHES)
def test_every_op_refuses_the_other_encoding(name, key, device):
    if device in NO_KERNEL.get(name, ()):
        pytest.skip(f"{name} has no {device} kernel yet")
    tensors, options = SAMPLES[name](device)
    names = [x.name for x in getattr(torch.ops.mla_fp8, name).default._schema.arguments]
    arguments = dict(zip(names, tensors, strict=False)) | options
    arguments[key] = typed(arguments[key], FNUZ)
    layout = "index_fp8" if key == "index_cache" else options["layout"]
    message = rf"{key} must have dtype torch.uint8 or .* for layout {layout}, got .*e4m3fnuz"
    before = arguments[key].view(torch.uint8).clone()
    with pytest.raises(RuntimeError, match=message):
        getattr(mla_fp8, name)(**arguments)
    assert torch.equal(arguments[key].view(torch.uint8), before)


@pytest.mark.parametrize("name", ["sparse_decode", "sparse_prefill_paged", "sparse_prefill_window"])
@pytest.mark.parametrize("key", ["kv_cache", "extra_kv_cache"])
def test_so_does_whoever_serves_the_op(name, key):
    """The specification reads a cache by itself, as other packages do."""
    tensors, options = SAMPLES[name]("cpu")
    names = [x.name for x in getattr(torch.ops.mla_fp8, name).default._schema.arguments]
    arguments = dict(zip(names, tensors, strict=False)) | options
    arguments[key] = typed(arguments[key], FNUZ)
    with pytest.raises(RuntimeError, match=f"{name}: {key} must have dtype .* got torch.float8_e4m3fnuz"):
        getattr(mla_fp8, name)(**arguments, backend="reference")


@pytest.mark.parametrize("name", INDEX_LAYOUTS)
def test_a_cache_of_index_keys_is_bytes_or_its_values(name, device):
    layout = INDEX_LAYOUTS[name]
    cache = layout.empty(2, 4, device).zero_()
    k, slots = torch.randn(3, 128, device=device), torch.arange(3, device=device)
    values = FN if name == "index_fp8" else E2M1
    for dtype in (*BYTES, values):
        mla_fp8.quantize_index_k(k, slots, typed(cache, dtype), layout=name, page_size=4)
        layout.views(typed(cache, dtype), 4)
    for dtype in {FN, FNUZ, E2M1} - {values}:
        arguments = {"k": k, "slot_mapping": slots, "index_cache": typed(cache, dtype)}
        options = {"layout": name, "page_size": 4}
        check_refused(mla_fp8.quantize_index_k, arguments | options, f"for layout {name}, got ")
        with pytest.raises(ValueError, match=f"index_cache must be .* of layout {name}"):
            layout.views(typed(cache, dtype), 4)


def test_functions_of_other_packages_refuse_it_too(device):
    v32, v4 = KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]
    ints = torch.zeros(1, 1, 4, dtype=torch.int32, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    q = torch.zeros(1, 1, 8, 576, device=device).bfloat16()
    v32_cache = typed(v32.empty(1, 64, device).zero_(), FNUZ)
    v4_bytes = v4.empty(1, 64, device).zero_()
    v4_cache, pages = typed(v4_bytes, FNUZ), v4.flash_mla_view(v4_bytes, 64)
    index = torch.zeros(1, 64, 1, 132, dtype=torch.uint8, device=device)
    kv, table = torch.zeros(1, 512, device=device).bfloat16(), torch.ones(4, 64, device=device)
    freqs = torch.polar(table, table)[:, :32]
    calls = {
        "flash_mla": lambda: flash_mla.flash_mla_with_kvcache(
            q, v32_cache.view(1, 64, 1, -1), None, None, 512, None, None, 1.0, False, True, ints
        ),
        "flash_mla, second cache": lambda: flash_mla.flash_mla_with_kvcache(
            q[..., :512].contiguous(), pages, None, None, 512, None, None, 1.0, False, True, ints, None,
            typed(pages, FNUZ), ints,
        ),
        "sglang, V3.2": lambda: sglang.dequantize_k_cache_paged_dsa(v32_cache.view(64, 1, -1), slot),
        "sglang, V4": lambda: sglang.dequantize_k_cache_paged(v4_cache, slot, 64),
        "sglang's layer": lambda: sglang_layer.fused_k_norm_rope_flashmla(
            kv, torch.ones(512, device=device).bfloat16(), 1e-6, freqs, slot, slot, v4_cache, 64
        ),
        "vllm's layer": lambda: vllm.fused_deepseek_v4_kv_rope_quant_insert(
            kv, v4_cache, slot, slot, table, 64
        ),
        "deep_gemm": lambda: deep_gemm.fp8_paged_mqa_logits(
            torch.zeros(1, 1, 8, 128, device=device).to(FN), typed(index, FNUZ),
            torch.ones(1, 8, device=device), torch.ones(1, dtype=torch.int32, device=device),
            ints[0, :, :1], None, 64,
        ),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"must have dtype .* got torch.float8_e4m3fnuz"):
            call()
            pytest.fail(f"{name} took it")
