import pytest
import torch
from ragged_cases import make_case

import mla_fp8

pytestmark = pytest.mark.op("paged_attention_ragged")

NAN, INF = float("nan"), float("inf")


def wrong(name, message, change):
    return pytest.param(name, change, message, id=f"{name} {message[:30]}")


# Argument, what the message says, how a good value becomes a bad one (FP8, 7 requests, 8 / 2 heads).
ERRORS = [
    wrong("q", "q must have dtype torch.bfloat16 or torch.float16, got torch.float32", lambda t: t.float()),
    wrong("q", r"q must have shape \[\*, \*, \*\], got \[7, 512\]", lambda t: t.flatten(1)),
    wrong("q", "q must have stride 1 in its last dimension, got 2", lambda t: t.repeat(1, 1, 2)[..., ::2]),
    wrong(
        "q", "q must have a last dimension that is a multiple of 16 up to 256, got 40", lambda t: t[..., :40]
    ),
    wrong("q", "q must have a last dimension .* up to 256, got 272", lambda t: t.new_zeros(7, 8, 272)),
    wrong("q", "q must have a multiple of the cache's 2 heads, got 7", lambda t: t[:, :7]),
    wrong("q", "q must have a multiple of the cache's 2 heads, got 0", lambda t: t[:, :0]),
    wrong("q", "q must be 16-byte aligned, got an address", lambda t: t.new_zeros(7, 8, 72)[..., 1:65]),
    wrong(
        "k_cache",
        r"k_cache must have shape \[\*, 16, \*, 64\], got \[\d+, 16, 2, 48\]",
        lambda t: t[..., :48],
    ),
    wrong("k_cache", r"k_cache must have shape .*, got \[\d+, 16\]", lambda t: t[..., 0, 0]),
    wrong(
        "k_cache",
        "k_cache must have dtype torch.bfloat16 or torch.float8_e4m3fn or .*, got torch.float16",
        lambda t: t.half(),
    ),
    wrong("k_cache", "k_cache must have dtype .*, got torch.float8_e5m2", lambda t: t.to(torch.float8_e5m2)),
    wrong("k_cache", "k_cache must have at least 1 head, got 0", lambda t: t[:, :, :0]),
    wrong("k_cache", "k_cache must have stride 1 in its last", lambda t: t.mT.contiguous().mT),
    wrong(
        "v_cache", "v_cache must have dtype torch.float8_e4m3fn, got torch.bfloat16", lambda t: t.bfloat16()
    ),
    wrong("v_cache", r"v_cache must have shape \[\d+, 16, 2, \*\], got \[\d+, 16, 1", lambda t: t[:, :, :1]),
    wrong("v_cache", "v_cache must have a last dimension that is a multiple of 16", lambda t: t[..., :8]),
    wrong("kv_indptr", "kv_indptr must have dtype torch.int32, got torch.int64", lambda t: t.long()),
    wrong("kv_indptr", "kv_indptr must have at least 1 element, got 0", lambda t: t[:0]),
    wrong("q", r"q must have 7 tokens \(kv_indptr has 7 requests, q_len is 1\), got 6", lambda t: t[:6]),
    wrong("q_len", r"q must have 14 tokens \(kv_indptr has 7 requests, q_len is 2\), got 7", lambda n: 2),
    wrong("q_len", r"q_len must be in \[1, \d+\], got 0", lambda n: 0),
    wrong("num_splits", r"num_splits must be in \[0, 128\] \(0 chooses\), got -1", lambda n: -1),
    wrong("num_splits", r"num_splits must be in \[0, 128\] \(0 chooses\), got 129", lambda n: 129),
    wrong("workspace", "workspace must have dtype torch.float32, got torch.bfloat16", lambda t: t.bfloat16()),
    wrong("workspace", "workspace must be contiguous", lambda t: t[::2]),
    wrong("attn_sink", r"attn_sink must have shape \[8\], got \[7\]", lambda t: t[:7]),
    wrong("attn_sink", "attn_sink must have dtype torch.float32, got torch.float16", lambda t: t.half()),
    wrong("kv_indptr", "kv_indptr must be contiguous", lambda t: t.repeat_interleave(2)[::2]),
    wrong("kv_indices", "kv_indices must have dtype torch.int32, got torch.int16", lambda t: t.short()),
    wrong("kv_indices", r"kv_indices must have shape \[\*\], got", lambda t: t[None]),
    wrong("kv_last_page_len", r"kv_last_page_len must have shape \[7\], got \[8\]", lambda t: t.new_zeros(8)),
    wrong("k_scale", "k_scale must be given for an FP8 cache, got None", lambda t: None),
    wrong("v_scale", "v_scale must be given for an FP8 cache, got None", lambda t: None),
    wrong("k_scale", "k_scale must have dtype torch.float32, got torch.float64", lambda t: t.double()),
    wrong("k_scale", r"k_scale must have 1 element or 2 .*, got 3", lambda t: t.new_ones(3)),
    wrong("sm_scale", "sm_scale must be finite, got nan", lambda x: NAN),
    wrong("sm_scale", r"sm_scale must be finite as a float32, got 1e\+300", lambda x: 1e300),
    wrong("logits_soft_cap", r"logits_soft_cap must be finite as a float32, got 1e\+300", lambda x: 1e300),
    wrong("logits_soft_cap", "logits_soft_cap must be finite, got inf", lambda x: float("inf")),
    wrong("logits_soft_cap", "logits_soft_cap must be at least 0 .*, got -1", lambda x: -1.0),
    wrong("logits_soft_cap", "logits_soft_cap must be at least 0 .*, got nan", lambda x: NAN),
    wrong("out", "out must have dtype torch.bfloat16, got torch.float16", lambda t: t.half()),
    wrong("out", r"out must have shape \[7, 8, 64\], got \[7, 8, 48\]", lambda t: t[..., :48]),
    wrong(
        "out",
        "out must not overlap itself, got stride 0",
        lambda t: t[:1].expand(7, 8, 64),
    ),
    wrong("lse", "lse must have dtype torch.float32, got torch.float64", lambda t: t.double()),
    wrong("lse", r"lse must have shape \[7, 8\], got \[7, 4\]", lambda t: t[:, :4]),
    wrong("lse", "lse must be contiguous", lambda t: t.repeat(1, 2)[:, ::2]),
]
NAMES = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "kv_last_page_len")


def call_with(args, options, **changed):
    """The op, with NaN outputs that it must not have touched when it raises."""
    outputs = {
        "out": torch.full_like(args[0], NAN),
        "lse": torch.full(args[0].shape[:2], NAN).to(args[0].device),
    }
    device = args[0].device
    defaults = {
        "logits_soft_cap": 0.0,
        "q_len": 1,
        "num_splits": 0,
        "attn_sink": torch.zeros(8, device=device),
        "workspace": torch.zeros(10**6, device=device),
    }
    arguments = dict(zip(NAMES, args, strict=True)) | defaults | options | outputs
    for name, change in changed.items():
        arguments[name] = change(arguments[name])
    try:
        mla_fp8.paged_attention_ragged(**arguments)
    finally:
        assert arguments["out"].isnan().all() and arguments["lse"].isnan().all()


@pytest.mark.parametrize("name, change, message", ERRORS)
def test_errors_say_expected_and_got_before_anything_is_written(name, change, message, device):
    args, options = make_case(device, torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=f"mla_fp8.paged_attention_ragged: .*{message}"):
        call_with(args, options, **{name: change})


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_must_be_finite_and_positive(name, value):
    args, options = make_case("cpu", torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=f"{name} must be finite and positive, got"):
        call_with(args, options, **{name: lambda t: torch.tensor([1.0, value])})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_are_refused_without_fp8(name, device):
    args, options = make_case(device)
    with pytest.raises(RuntimeError, match=f"{name} must be None for a bf16 or fp16 cache, got a tensor"):
        mla_fp8.paged_attention_ragged(*args, **options, **{name: torch.ones(1, device=device)})


def test_page_size_must_be_that_of_the_cache(device):
    args, options = make_case(device)
    op = torch.ops.mla_fp8.paged_attention_ragged
    with pytest.raises(
        RuntimeError, match=r"k_cache must have shape \[\*, 32, \*, 64\], got \[\d+, 16, 2, 64\]"
    ):
        op(*args, **options, page_size=32)
    with pytest.raises(RuntimeError, match=r"page_size must be in \[1, \d+\], got 0"):
        op(*args, **options, page_size=0)


def test_out_and_lse_come_together(device):
    args, options = make_case(device)
    with pytest.raises(
        ValueError, match=r"mla_fp8\.paged_attention_ragged: expected all of out, lse or none, got no lse"
    ):
        mla_fp8.paged_attention_ragged(*args, **options, out=torch.empty_like(args[0]))
    with pytest.raises(
        ValueError,
        match=r"mla_fp8\.paged_attention_ragged: expected out and lse with a workspace, got neither",
    ):
        mla_fp8.paged_attention_ragged(*args, **options, workspace=torch.empty(9, device=device))


def test_explicit_splits_need_a_workspace(device):
    args, options = make_case(device)
    buffers = {"out": torch.empty_like(args[0]), "lse": torch.empty(7, 8, device=device)}
    for workspace, got in ((None, 0), (torch.empty(100, device=device), 100)):
        with pytest.raises(
            RuntimeError, match=f"workspace must have at least 14560 elements for 4 splits, got {got}"
        ):
            mla_fp8.paged_attention_ragged(*args, **options, **buffers, num_splits=4, workspace=workspace)
