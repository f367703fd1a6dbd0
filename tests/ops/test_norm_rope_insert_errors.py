"""Every argument of qk_norm_rope_insert, spoilt: the message names it, what was expected and what came."""

import pytest
import torch
from error_cases import check_refused, error_cases, misaligned, odd_rows, transposed
from kv_cache_cases import layer_scale, poisoned_cache

import mla_fp8
from mla_fp8 import KV_LAYOUTS


def case(layout, device):
    """Arguments that work; the error tests spoil one each."""
    extra = layout.head_dim_qk - 512
    kv = torch.randn(5, 512, device=device).bfloat16()
    return {
        "q": torch.randn(5, 8, 512, device=device).bfloat16(),
        "kv": kv,
        "kv_weight": torch.ones(512, device=device),
        "cos": torch.ones(9, 32, device=device),
        "sin": torch.ones(9, 32, device=device),
        "positions": torch.arange(5, device=device),
        "slot_mapping": torch.arange(5, device=device),
        "kv_cache": poisoned_cache(layout, 7, 64, device, gap=64),
        "layout": layout,
        "page_size": 64,
        "eps": 1e-6,
        "norm_q": False,
        "k_rope": kv[:, :extra].contiguous() if extra else None,
        "num_heads": 8,
        "scale": layer_scale(layout, device),
        "out_q": torch.full((5, 8, 512), 7.0, device=device).bfloat16(),
    }


PAGE = KV_LAYOUTS["dsv4"].page_bytes(64)
TABLE = [
    (lambda x: x.double(), "have dtype torch.float32", "torch.float64"),
    (lambda x: x.bfloat16(), "have dtype torch.float32", "torch.bfloat16"),
]
SLOTS = [
    (lambda x: x.short(), "have dtype torch.int64 or torch.int32", "torch.int16"),
    (lambda x: x.repeat_interleave(2)[::2], "be contiguous", "shape [5] with strides [2]"),
]
ERRORS = {
    "q": [
        (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
        (lambda x: x[:4], "have shape [5, *, *]", "[4, 8, 512]"),
        (lambda x: x[:, 0], "have shape [5, *, *]", "[5, 512]"),
        (lambda x: x.mT.contiguous().mT, "have stride 1 in its last dimension", "8"),
        (misaligned, "be 16-byte aligned", "an address that is 2 past"),
        (
            lambda x: x.new_zeros(5, 8, 68)[..., :60],
            "be 16-byte aligned in every row",
            "a stride of 136 bytes in dimension 1",
        ),
        (
            lambda x: x[..., :56],
            "have a multiple of 8 as its last dimension, at least 64 (what is rotated)",
            "56",
        ),
        (
            lambda x: x[..., :100],
            "have a multiple of 8 as its last dimension, at least 64 (what is rotated)",
            "100",
        ),
    ],
    "kv": [
        (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
        (lambda x: x[:, :448], "have shape [*, 512]", "[5, 448]"),
        (transposed, "have stride 1 in its last dimension", "5"),
        (misaligned, "be 16-byte aligned", "an address that is 2 past"),
        (odd_rows, "be 16-byte aligned in every row", "a stride of 1032 bytes"),
    ],
    "kv_weight": [
        (lambda x: x.half(), "have dtype torch.bfloat16 or torch.float32", "torch.float16"),
        (lambda x: x[:448], "have shape [512]", "[448]"),
        (lambda x: x.repeat_interleave(2)[::2], "be contiguous", "shape [512] with strides [2]"),
        (misaligned, "be 16-byte aligned", "an address that is 4 past"),
        (lambda x: 1.0, "be a tensor", "1.0"),
    ],
    "cos": [
        *TABLE,
        (lambda x: x[0], "have shape [*, *]", "[32]"),
        (lambda x: x[None], "have shape [*, *]", "[1, 9, 32]"),
    ],
    "sin": [*TABLE, (lambda x: x[:, :16], "have shape [9, 32]", "[9, 16]")],
    "positions": [*SLOTS, (lambda x: x[:4], "have shape [5]", "[4]")],
    "slot_mapping": [
        *SLOTS,
        (lambda x: x[None], "have shape [*]", "[1, 5]"),
        (lambda x: x.repeat(2)[:6], "have at most 5 entries (the rows of kv)", "6"),
    ],
    "kv_cache": [(lambda x: x[:, :-1], f"have shape [*, {PAGE}]", f"[7, {PAGE - 1}]")],
    "page_size": [(lambda x: 0, "be in [1, 16777216]", "0")],
    "eps": [
        (lambda x: float("nan"), "be finite", "nan"),
        (lambda x: 1e300, "be finite as a float32", "1e+300"),
        (lambda x: -1e-6, "not be negative", "-1e-06"),
    ],
    "k_rope": [(lambda x: torch.zeros(5, 64).bfloat16(), "be None for layout dsv4", "a tensor")],
    "num_heads": [(lambda x: 7, "be at least 8 (the heads of q)", "7")],
    "scale": [(lambda x: torch.ones(1), "be None for layout dsv4", "a tensor")],
    "out_q": [
        (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
        (lambda x: x[:, :7], "have shape [5, 8, 512]", "[5, 7, 512]"),
        (misaligned, "be 16-byte aligned", "an address that is 2 past"),
        (
            lambda x: x[:, :1].expand(-1, 8, -1),
            "not overlap itself",
            "stride 0 in dimension 1, expected at least 512",
        ),
    ],
}
V32_ERRORS = {
    "k_rope": [
        (lambda x: x.float(), "have dtype torch.bfloat16", "torch.float32"),
        (lambda x: x[:, :32], "have shape [5, 64]", "[5, 32]"),
        (lambda x: x[:4], "have shape [5, 64]", "[4, 64]"),
        (misaligned, "be 16-byte aligned", "an address that is 2 past"),
        (lambda x: None, "be given for layout dsv32 if anything is rotated", "None and 32 columns of cos"),
    ]
}
UNIFORM_ERRORS = {"scale": [(lambda x: None, "be given for layout fp8_e4m3", "None")]}


@error_cases({"dsv4": ERRORS, "dsv32": V32_ERRORS, "fp8_e4m3": UNIFORM_ERRORS})
def test_bad_arguments_are_refused_before_anything_is_written(layout, argument, spoil, message, device):
    arguments = case(KV_LAYOUTS[layout], device)
    spoilt = spoil(arguments[argument])
    arguments[argument] = spoilt.to(device) if isinstance(spoilt, torch.Tensor) else spoilt
    if argument == "cos":
        arguments["sin"] = spoilt.float().to(device) if spoilt.dim() == 2 else arguments["sin"]
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, f"mla_fp8.qk_norm_rope_insert: {message}")
    if argument in ("q", "num_heads", "out_q"):
        return
    for name in ("q", "norm_q", "num_heads", "out_q"):
        del arguments[name]
    check_refused(mla_fp8.k_norm_rope_insert, arguments, f"mla_fp8.k_norm_rope_insert: {message}")


@pytest.mark.parametrize("half", [3, 30, 132])
def test_a_number_of_pairs_that_is_no_multiple_of_four(half, device):
    table = torch.ones(9, half, device=device)
    arguments = case(KV_LAYOUTS["dsv4"], device) | {"cos": table, "sin": table}
    message = f"cos must have a multiple of 4 columns, at most 128, got {half}"
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, message)


def test_all_of_k_rope_is_rotated(device):
    table = torch.ones(9, 16, device=device)
    arguments = case(KV_LAYOUTS["dsv32"], device) | {"cos": table, "sin": table}
    message = "cos must have 32 columns (all of k_rope is rotated), got 16"
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, message)


def test_only_heads_of_512_dims_are_normed(device):
    arguments = case(KV_LAYOUTS["dsv4"], device) | {"norm_q": True}
    for name in ("q", "out_q"):
        arguments[name] = arguments[name][..., :448]
    message = "q must have a last dimension of 512 to be normed, got 448"
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, message)


def test_q_may_not_be_its_own_padded_result(device):
    wide = torch.zeros(5 * 16 * 512, device=device).bfloat16()
    arguments = case(KV_LAYOUTS["dsv4"], device) | {"q": wide[: 5 * 8 * 512].view(5, 8, 512)}
    arguments |= {"out_q": wide.view(5, 16, 512), "num_heads": 16}
    message = "out_q must not be q where heads are added, got 16 heads for 8"
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, message)
    arguments |= {"out_q": wide.view(5, 16, 512)[:, :8], "num_heads": 8}
    message = "out_q must be q itself or lie apart from it, got its address with other strides"
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, message)


def test_norm_q_has_no_default(device):
    """V4 norms its heads, V4.1 does not: a model that runs with the wrong one is fluent and wrong."""
    arguments = case(KV_LAYOUTS["dsv4"], device)
    del arguments["norm_q"]
    check_refused(mla_fp8.qk_norm_rope_insert, arguments, "norm_q", TypeError)


def test_too_few_latents_for_the_queries_are_those_to_blame(device):
    """Not the positions, of which there are as many as queries."""
    q, kv = torch.zeros(6, 2, 512, device=device).bfloat16(), torch.zeros(5, 512, device=device).bfloat16()
    cos, sin = torch.ones(2, 9, 32, device=device)
    at, cache = torch.arange(6, device=device), KV_LAYOUTS["dsv4"].empty(1, 64, device)
    with pytest.raises(RuntimeError, match=r"kv must have shape \[6, 512\], got \[5, 512\]"):
        mla_fp8.qk_norm_rope_insert(
            q, kv, None, cos, sin, at, at[:5], cache, layout="dsv4", page_size=64, eps=0.0, norm_q=True
        )
