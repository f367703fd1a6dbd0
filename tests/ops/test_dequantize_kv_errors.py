"""Every argument of both gathers, spoilt: the message names it, what was expected and what came."""

import pytest
import torch
from error_cases import check_refused, error_cases, misaligned, odd_rows, transposed
from kv_cache_cases import layer_scale, poisoned_cache

import mla_fp8
from mla_fp8 import KV_LAYOUTS

NUM_PAGES, NUM_ROWS, NUM_REQUESTS = 7, 5, 3
PAGE = KV_LAYOUTS["dsv4"].page_bytes(64)

CACHE = [
    (
        lambda x: x.double(),
        "have dtype torch.uint8 or torch.int8 or torch.bfloat16 or torch.float8_e4m3fn for layout dsv4",
        "torch.float64",
    ),
    (
        lambda x: x[:, :-1],
        f"have shape [*, {PAGE}]",
        f"[7, {PAGE - 1}] (a page is 64 rows of layout dsv4)",
    ),
    (transposed, "have stride 1 in its last dimension", "7"),
    (lambda x: x[:1].expand(7, -1), f"have a page stride of at least {PAGE} bytes", "0"),
    (misaligned, "be 16-byte aligned", "an address that is 1 past"),
    (odd_rows, "be 16-byte aligned in every page", f"a page stride of {PAGE + 8} bytes"),
]
PAGE_SIZE = [(lambda x, v=v: v, "be in [1, 16777216]", str(v)) for v in (0, -1, 1 << 40)]
OUT = [
    (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
    (lambda x: x.half(), "have dtype torch.bfloat16", "torch.float16"),
    (transposed, "have stride 1 in its last dimension", "5"),
    (
        lambda x: x[:1].expand(5, -1),
        "not overlap itself",
        "stride 0 in dimension 0, expected at least 512",
    ),
    (misaligned, "be 16-byte aligned", "an address that is 2 past"),
    (odd_rows, "be 16-byte aligned in every row", "a stride of 1032 bytes in dimension 0"),
]
UNWANTED_SCALE = [(lambda x: torch.ones(1), "be None for layout dsv4", "a tensor")]
SCALE = {
    "scale": [
        (lambda x: None, "be given for layout fp8_e4m3", "None"),
        (lambda x: x.half(), "have dtype torch.float32", "torch.float16"),
        (lambda x: x.expand(2), "have 1 element", "2"),
        (lambda x: x.repeat(0), "have 1 element", "0"),
    ]
}


def per_request(bad):
    return [
        (lambda x: x.long(), "have dtype torch.int32", "torch.int64"),
        (lambda x: x[:-1], f"have shape [{NUM_REQUESTS}]", "[2]"),
        (lambda x: x[None], f"have shape [{NUM_REQUESTS}]", "[1, 3]"),
        (lambda x: x.repeat_interleave(2)[::2], "be contiguous", "shape [3] with strides [2]"),
    ]


SLOTS_FORM = {
    "kv_cache": CACHE,
    "slots": [
        (lambda x: x.short(), "have dtype torch.int64 or torch.int32", "torch.int16"),
        (lambda x: x.float(), "have dtype torch.int64 or torch.int32", "torch.float32"),
        (lambda x: x[None], "have shape [*]", "[1, 5]"),
        (lambda x: x.repeat_interleave(2)[::2], "be contiguous", "shape [5] with strides [2]"),
    ],
    "page_size": PAGE_SIZE,
    "scale": UNWANTED_SCALE,
    "out": [
        *OUT,
        (lambda x: x[:-1], "have shape [5, 512]", "[4, 512]"),
        (lambda x: x[:, :-64], "have shape [5, 512]", "[5, 448]"),
    ],
}
PAGED_FORM = {
    "kv_cache": CACHE,
    "page_table": [
        (lambda x: x.long(), "have dtype torch.int32", "torch.int64"),
        (lambda x: x[0], "have shape [*, *]", "[4]"),
        (transposed, "have stride 1 in its last dimension", "3"),
    ],
    "seq_lens": per_request("seq_lens"),
    "gather_lens": per_request("gather_lens"),
    "row_offsets": per_request("row_offsets"),
    "page_size": PAGE_SIZE,
    "scale": UNWANTED_SCALE,
    "out": [*OUT, (lambda x: x[:, :-64], "have shape [*, 512]", "[5, 448]")],
}


def common(layout, device):
    out = torch.full((NUM_ROWS, layout.head_dim_qk), float("nan"), dtype=torch.bfloat16, device=device)
    scale = layer_scale(layout, device)
    return {"layout": layout, "page_size": 64, "scale": scale, "out": out}


def slots_case(layout, device):
    """Arguments that work; each test spoils one."""
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device, gap=64)
    return {"kv_cache": kv_cache, "slots": torch.arange(NUM_ROWS, device=device)} | common(layout, device)


def paged_case(layout, device):
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device, gap=64)
    numbers = {"dtype": torch.int32, "device": device}
    return {
        "kv_cache": kv_cache,
        "page_table": torch.zeros(NUM_REQUESTS, 4, **numbers),
        "seq_lens": torch.full((NUM_REQUESTS,), 1, **numbers),
        "gather_lens": torch.full((NUM_REQUESTS,), 1, **numbers),
        "row_offsets": torch.arange(NUM_REQUESTS, **numbers),
    } | common(layout, device)


def spoilt(case, argument, spoil, device):
    value = spoil(case[argument])
    return case | {argument: value.to(device) if isinstance(value, torch.Tensor) else value}


@error_cases({"dsv4": SLOTS_FORM, "fp8_e4m3": SCALE})
def test_bad_arguments_of_the_slots_form_are_refused(layout, argument, spoil, message, device):
    arguments = spoilt(slots_case(KV_LAYOUTS[layout], device), argument, spoil, device)
    check_refused(mla_fp8.dequantize_kv, arguments, f"mla_fp8.dequantize_kv: {message}")
    if argument != "out":
        del arguments["out"]
        check_refused(mla_fp8.dequantize_kv, arguments, f"mla_fp8.dequantize_kv: {message}")


@error_cases({"dsv4": PAGED_FORM, "fp8_e4m3": SCALE})
def test_bad_arguments_of_the_paged_form_are_refused(layout, argument, spoil, message, device):
    arguments = spoilt(paged_case(KV_LAYOUTS[layout], device), argument, spoil, device)
    check_refused(mla_fp8.dequantize_kv_paged, arguments, f"mla_fp8.dequantize_kv_paged: {message}")


def test_num_rows_must_not_be_negative(device):
    arguments = paged_case(KV_LAYOUTS["dsv4"], device) | {"out": None, "num_rows": -1}
    check_refused(mla_fp8.dequantize_kv_paged, arguments, "num_rows must be at least 0, got -1")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_unusable_scale_is_refused_where_it_is_known(value):
    """On a GPU reading it would be a sync: documented there as a precondition."""
    arguments = slots_case(KV_LAYOUTS["fp8_e4m3"], "cpu") | {"scale": torch.tensor([value])}
    check_refused(mla_fp8.dequantize_kv, arguments, f"scale must be finite and positive, got {value:g}")


def test_an_unknown_layout_is_refused(device):
    arguments = slots_case(KV_LAYOUTS["dsv4"], device)
    unknown = arguments | {"layout": "dsv5"}
    check_refused(mla_fp8.dequantize_kv, unknown, "layout must be one of dsv32", ValueError)
    for layout in (-1, len(KV_LAYOUTS), 1 << 40):
        with pytest.raises(RuntimeError, match=rf"layout must be in \[0, {len(KV_LAYOUTS)}\), got {layout}"):
            torch.ops.mla_fp8.dequantize_kv(
                arguments["kv_cache"], arguments["slots"], layout=layout, page_size=64
            )


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
@pytest.mark.parametrize(
    "function, make, argument",
    [(mla_fp8.dequantize_kv, slots_case, name) for name in ("slots", "out", "scale")]
    + [
        (mla_fp8.dequantize_kv_paged, paged_case, name)
        for name in ("page_table", "seq_lens", "gather_lens", "row_offsets", "out", "scale")
    ],
)
def test_tensors_must_be_on_the_caches_device(function, make, argument):
    arguments = make(KV_LAYOUTS["fp8_e4m3"], "cuda")
    arguments[argument] = arguments[argument].cpu()
    check_refused(function, arguments, f"{argument} must be on cuda:0 like")
