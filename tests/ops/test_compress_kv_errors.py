"""Every argument of compress_kv, spoilt: the message names it, what was expected and what came."""

import pytest
import torch
from error_cases import check_refused, misaligned, transposed
from kv_cache_cases import layer_scale, poisoned_cache

import mla_fp8
from mla_fp8 import KV_LAYOUTS


def case(device, ratio=4, layout="dsv4"):
    width = {1: 512, 2: 1024, 4: 2048, 128: 1024}[ratio]
    return {
        "kv_score": torch.randn(5, width, device=device),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
        "start_pos": torch.tensor([0, 7], dtype=torch.int32, device=device),
        "state": torch.zeros(4, max(8, ratio), width, device=device) if ratio > 1 else None,
        "state_slots": torch.tensor([1, 3], device=device),
        "ape": torch.zeros(ratio, width // 2, device=device) if ratio > 2 else None,
        "norm_weight": torch.ones(512, device=device),
        "cos": torch.ones(9, 32, device=device),
        "sin": torch.ones(9, 32, device=device),
        "slot_mapping": torch.arange(5, device=device),
        "kv_cache": poisoned_cache(KV_LAYOUTS[layout], 2, 64, device),
        "ratio": ratio,
        "layout": layout,
        "page_size": 64,
        "eps": 1e-6,
        "scale": layer_scale(KV_LAYOUTS[layout], device),
        "out_latent": torch.full((5, 512), 7.0, device=device).bfloat16(),
    }


ERRORS = [
    ("kv_score", lambda x: x.bfloat16(), "kv_score must have dtype torch.float32, got torch.bfloat16"),
    ("kv_score", lambda x: x[:, :1024], "kv_score must have shape [*, 2048], got [5, 1024]"),
    ("kv_score", transposed, "kv_score must have stride 1 in its last dimension, got 5"),
    ("kv_score", misaligned, "kv_score must be 16-byte aligned, got an address that is 4 past"),
    ("query_start_loc", lambda x: x.long(), "query_start_loc must have dtype torch.int32, got torch.int64"),
    ("query_start_loc", lambda x: x[:0], "query_start_loc must have at least 1 element, got 0"),
    ("start_pos", lambda x: x[:1], "start_pos must have shape [2], got [1]"),
    ("start_pos", lambda x: x.long(), "start_pos must have dtype torch.int32, got torch.int64"),
    ("state", lambda x: None, "state must be given for ratio 4, got None"),
    ("state", lambda x: x.bfloat16(), "state must have dtype torch.float32, got torch.bfloat16"),
    ("state", lambda x: x[:, :, :1024], "state must have shape [*, *, 2048], got [4, 8, 1024]"),
    ("state", lambda x: x[:, :7], "state must have at least 8 rows per slot for ratio 4, got 7"),
    (
        "state",
        lambda x: x[:1].expand(4, -1, -1),
        "state must not overlap itself",
    ),
    (
        "state_slots",
        lambda x: x.short(),
        "state_slots must have dtype torch.int64 or torch.int32, got torch.int16",
    ),
    ("state_slots", lambda x: x[:1], "state_slots must have shape [2], got [1]"),
    ("ape", lambda x: x[:2], "ape must have shape [4, 1024], got [2, 1024]"),
    ("ape", lambda x: x.bfloat16(), "ape must have dtype torch.float32, got torch.bfloat16"),
    (
        "norm_weight",
        lambda x: x.half(),
        "norm_weight must have dtype torch.bfloat16 or torch.float32, got torch.float16",
    ),
    ("norm_weight", lambda x: x[:448], "norm_weight must have shape [512], got [448]"),
    ("cos", lambda x: x.double(), "cos must have dtype torch.float32, got torch.float64"),
    ("sin", lambda x: x[:, :16], "sin must have shape [9, 32], got [9, 16]"),
    ("slot_mapping", lambda x: x[:4], "slot_mapping must have shape [5], got [4]"),
    (
        "slot_mapping",
        lambda x: x.float(),
        "slot_mapping must have dtype torch.int64 or torch.int32, got torch.float32",
    ),
    ("kv_cache", lambda x: x[:, :-1], "kv_cache must have shape [*, "),
    ("ratio", lambda x: 8, "ratio must be 1, 2, 4 or 128, got 8"),
    ("layout", lambda x: "dsv32", "layout must have rows of 512 dims, got dsv32"),
    ("page_size", lambda x: 0, "page_size must be in [1, 16777216], got 0"),
    ("eps", lambda x: float("nan"), "eps must be finite, got nan"),
    ("eps", lambda x: -1.0, "eps must not be negative, got -1"),
    ("scale", lambda x: torch.ones(1), "scale must be None for layout dsv4, got a tensor"),
    ("out_latent", lambda x: x.float(), "out_latent must have dtype torch.bfloat16, got torch.float32"),
    ("out_latent", lambda x: x[:4], "out_latent must have shape [5, 512], got [4, 512]"),
    ("out_latent", misaligned, "out_latent must be 16-byte aligned"),
]


@pytest.mark.parametrize("argument, spoil, message", ERRORS, ids=[f"{a}-{m[-20:]}" for a, _, m in ERRORS])
def test_bad_arguments_are_refused_before_anything_is_written(argument, spoil, message, device):
    arguments = case(device)
    spoilt = spoil(arguments[argument])
    arguments[argument] = spoilt.to(device) if isinstance(spoilt, torch.Tensor) else spoilt
    check_refused(mla_fp8.compress_kv, arguments, f"mla_fp8.compress_kv: {message}")


def test_ratios_without_a_state_or_a_bias_refuse_one(device):
    two, one, four = (case(device, ratio) for ratio in (2, 1, 4))
    message = "ape must be None for ratio 2, got a tensor"
    check_refused(mla_fp8.compress_kv, two | {"ape": four["ape"]}, message)
    message = "state must be None for ratio 1, got a tensor"
    check_refused(mla_fp8.compress_kv, one | {"state": two["state"]}, message)
    message = "online must be False for ratio 4, got True"
    check_refused(mla_fp8.compress_kv, four | {"online": True}, message)


def test_an_online_state_is_max_sum_and_mean(device):
    arguments = case(device, 128) | {"online": True}
    message = "state must have shape [*, *, 1536], got [4, 128, 1024]"
    check_refused(mla_fp8.compress_kv, arguments, message)
    arguments["state"] = torch.zeros(4, 1, 1536, device=device)
    message = "state must have at least 2 rows per slot for ratio 128 online, got 1"
    check_refused(mla_fp8.compress_kv, arguments, message)
