"""Every argument of quantize_kv, spoilt: the message names it, what was expected and what came."""

import pytest
import torch
from error_cases import check_refused, error_cases, misaligned, odd_rows, transposed
from kv_cache_cases import layer_scale, poisoned_cache

import mla_fp8
from mla_fp8 import KV_LAYOUTS

NUM_PAGES = 7


def case(layout, device):
    """Arguments that work; the error tests spoil one each."""
    latent = torch.randn(5, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    return {
        "latent": latent,
        "slot_mapping": torch.arange(5, device=device),
        "kv_cache": poisoned_cache(layout, NUM_PAGES, 64, device, gap=64),
        "layout": layout,
        "page_size": 64,
        "scale": layer_scale(layout, device),
        "rope": None,
        "fp8_max": None,
    }


PAGE, PAGE_32 = (KV_LAYOUTS["dsv4"].page_bytes(size) for size in (64, 32))
TOKEN = KV_LAYOUTS["dsv4"].bytes_per_token
FLOATS, BYTES = (
    "torch.bfloat16 or torch.float16 or torch.float32",
    "torch.uint8 or torch.int8 or torch.bfloat16 or torch.float8_e4m3fn for layout dsv4",
)
ERRORS = {  # argument: how it is spoilt, what it must be, what came
    "latent": [
        (lambda x: x.double(), f"have dtype {FLOATS}", "torch.float64"),
        (lambda x: x.int(), f"have dtype {FLOATS}", "torch.int32"),
        (lambda x: x[:, :-64], "have shape [*, 512]", "[5, 448]"),
        (lambda x: x[None], "have shape [*, 512]", "[1, 5, 512]"),
        (transposed, "have stride 1 in its last dimension", "5"),
        (misaligned, "be 16-byte aligned", "an address that is 2 past"),
        (odd_rows, "be 16-byte aligned in every row", "a stride of 1032 bytes"),
    ],
    "slot_mapping": [
        (lambda x: x.short(), "have dtype torch.int64 or torch.int32", "torch.int16"),
        (lambda x: x.float(), "have dtype torch.int64 or torch.int32", "torch.float32"),
        (lambda x: x[None], "have shape [*]", "[1, 5]"),
        (lambda x: x.repeat_interleave(2)[::2], "be contiguous", "shape [5] with strides [2]"),
        (lambda x: x.repeat(2)[:6], "have at most 5 entries (the rows of latent)", "6"),
    ],
    "kv_cache": [
        (lambda x: x.float(), f"have dtype {BYTES}", "torch.float32"),
        (lambda x: x[:, :-1], f"have shape [*, {PAGE}]", f"[7, {PAGE - 1}]"),
        (lambda x: x[0], f"have shape [*, {PAGE}]", f"[{PAGE}]"),
        (lambda x: x[:, :640].unflatten(1, (64, 10)), f"have shape [*, 64, {TOKEN}]", "[7, 64, 10]"),
        (
            lambda x: x[:, : 64 * TOKEN].unflatten(1, (64, 2, TOKEN // 2)),
            f"have shape [*, 64, 1, {TOKEN}]",
            f"[7, 64, 2, {TOKEN // 2}]",
        ),
        (
            lambda x: x[:, : 64 * TOKEN].unflatten(1, (64, TOKEN)).repeat(1, 1, 2)[:, :, :TOKEN],
            f"have a stride of {TOKEN} bytes in dimension 1",
            f"{2 * TOKEN}",
        ),
        (transposed, "have stride 1 in its last dimension", "7"),
        (lambda x: x[:1].expand(7, -1), f"have a page stride of at least {PAGE} bytes", "0"),
        (misaligned, "be 16-byte aligned", "an address that is 1 past"),
        (odd_rows, "be 16-byte aligned in every page", f"a page stride of {PAGE + 8} bytes"),
    ],
    "page_size": [
        (lambda x: 0, "be in [1, 16777216]", "0"),
        (lambda x: -64, "be in [1, 16777216]", "-64"),
        (lambda x: 1 << 40, "be in [1, 16777216]", f"{1 << 40}"),
    ],
    "scale": [(lambda x: torch.ones(1), "be None for layout dsv4", "a tensor")],
    "fp8_max": [
        (lambda x, v=v: v, "be a value of the cache's FP8 format in [4, 448]", f"{v:g}")
        for v in (2.0, 449.0, 225.0, -224.0, 0.0, float("nan"), float("inf"))
    ],
}
UNIFORM_ERRORS = {
    "scale": [
        (lambda x: None, "be given for layout fp8_e4m3", "None"),
        (lambda x: x.double(), "have dtype torch.float32", "torch.float64"),
        (lambda x: x.expand(2), "have 1 element", "2"),
    ]
}
BF16_ERRORS = {
    "scale": [(lambda x: torch.ones(1), "be None for layout bf16", "a tensor")],
    "fp8_max": [(lambda x: 224.0, "be None for layout bf16", "224")],
}
ROPE_ERRORS = [
    (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
    (lambda x: x[:, :-1], "have shape [5, 64]", "[5, 63]"),
    (lambda x: x[:-1], "have shape [5, 64]", "[4, 64]"),
    (transposed, "have stride 1 in its last dimension", "5"),
    (misaligned, "be 16-byte aligned", "an address that is 2 past"),
    (odd_rows, "be 16-byte aligned in every row", "a stride of 136 bytes"),
]


@error_cases({"dsv4": ERRORS, "fp8_e4m3": UNIFORM_ERRORS, "bf16": BF16_ERRORS})
def test_bad_arguments_are_refused_before_anything_is_written(layout, argument, spoil, message, device):
    arguments = case(KV_LAYOUTS[layout], device)
    spoilt = spoil(arguments[argument])
    arguments[argument] = spoilt.to(device) if isinstance(spoilt, torch.Tensor) else spoilt
    check_refused(mla_fp8.quantize_kv, arguments, f"mla_fp8.quantize_kv: {message}")


@pytest.mark.parametrize("spoil, must, got", ROPE_ERRORS)
def test_a_bad_rope_is_refused(spoil, must, got, device):
    layout = KV_LAYOUTS["dsv4"]
    arguments = case(layout, device)
    nope, rope = arguments["latent"].split([layout.nope_dim, layout.rope_dim], dim=-1)
    arguments |= {"latent": nope.contiguous(), "rope": spoil(rope.contiguous())}
    check_refused(mla_fp8.quantize_kv, arguments, f"rope must {must}, got {got}")


def test_latent_and_page_size_must_fit_the_layout_and_rope(device):
    layout = KV_LAYOUTS["dsv4"]
    arguments = case(layout, device)
    rope = torch.zeros(5, layout.rope_dim, dtype=torch.bfloat16, device=device)
    check_refused(
        mla_fp8.quantize_kv, arguments | {"rope": rope}, "latent must have shape [*, 448], got [5, 512]"
    )
    check_refused(
        mla_fp8.quantize_kv,
        arguments | {"page_size": 32},
        f"kv_cache must have shape [*, {PAGE_32}], got [7, {PAGE}]",
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_unusable_scale_is_refused_where_it_is_known(value):
    """On a GPU reading it would be a sync: documented there as a precondition."""
    arguments = case(KV_LAYOUTS["fp8_e4m3"], "cpu") | {"scale": torch.tensor([value])}
    before = arguments["kv_cache"].clone()
    with pytest.raises(RuntimeError, match=f"scale must be finite and positive, got {value:g}"):
        mla_fp8.quantize_kv(**arguments)
    assert torch.equal(arguments["kv_cache"], before)


def test_an_unknown_layout_is_refused(device):
    arguments = case(KV_LAYOUTS["dsv4"], device)
    check_refused(
        mla_fp8.quantize_kv,
        arguments | {"layout": "dsv5"},
        "layout must be one of dsv32",
        ValueError,
    )
    tensors = [arguments[name] for name in ("latent", "slot_mapping", "kv_cache")]
    for layout in (-1, len(KV_LAYOUTS), 1 << 40):
        with pytest.raises(RuntimeError, match=rf"layout must be in \[0, {len(KV_LAYOUTS)}\), got {layout}"):
            torch.ops.mla_fp8.quantize_kv(*tensors, layout=layout, page_size=64)


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
@pytest.mark.parametrize("argument", ["latent", "slot_mapping", "scale"])
def test_tensors_must_be_on_the_caches_device(argument):
    arguments = case(KV_LAYOUTS["fp8_e4m3"], "cuda")
    arguments[argument] = arguments[argument].cpu()
    check_refused(mla_fp8.quantize_kv, arguments, f"{argument} must be on cuda:0 like")
