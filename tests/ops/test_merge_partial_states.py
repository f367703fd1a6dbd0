"""merge_partial_states against float64, and what must not count."""

import math

import pytest
import torch
from error_cases import check_refused

import mla_fp8
from mla_fp8 import reference
from mla_fp8.testing import assert_as_accurate_as

pytestmark = pytest.mark.op("merge_partial_states")
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_states(num_states=4, num_tokens=5, num_heads=3, head_dim=512, *, dtype=torch.bfloat16, device):
    outs = torch.randn(num_states, num_tokens, num_heads, head_dim, device=device).to(dtype)
    return outs, 3 * torch.randn(num_states, num_tokens, num_heads, device=device)


def same_bits(x, y):
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("base", [math.e, 2.0])
@pytest.mark.parametrize("num_states, head_dim", [(1, 512), (2, 7), (5, 512), (8, 1544), (33, 24)])
def test_matches_float64(num_states, head_dim, base, has_sink, dtype, device):
    outs, lses = make_states(num_states, head_dim=head_dim, dtype=dtype, device=device)
    lses[torch.rand(lses.shape, device=device) < 0.3] = -INF
    sink = torch.randn(3, device=device) if has_sink else None
    options = {"attn_sink": sink, "base": base}
    out, lse = mla_fp8.merge_partial_states(outs, lses, **options)
    assert out.dtype == dtype and out.shape == outs.shape[1:] and lse.shape == lses.shape[1:]
    exact, exact_lse = reference.merge_partial_states(outs.double(), lses.double(), **options)
    rounded, rounded_lse = reference.merge_partial_states(outs, lses, **options)
    assert_as_accurate_as(out, rounded, exact)
    seen = exact_lse > -INF
    assert torch.equal(lse == -INF, ~seen)
    assert_as_accurate_as(lse[seen], rounded_lse[seen], exact_lse[seen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nothing", [-INF, INF, NAN])
def test_what_has_no_keys_does_not_count_whatever_it_holds(nothing, dtype, device):
    outs, lses = make_states(6, dtype=dtype, device=device)
    want = mla_fp8.merge_partial_states(outs[1:4:2], lses[1:4:2])
    outs[[0, 2, 4, 5]], lses[[0, 2, 4, 5]] = NAN, nothing
    got = mla_fp8.merge_partial_states(outs, lses)
    assert all(map(same_bits, got, want))
    lses[:, 2], outs[:, 2] = nothing, NAN
    out, lse = mla_fp8.merge_partial_states(outs, lses, attn_sink=torch.zeros(3, device=device))
    assert same_bits(out[2], torch.zeros_like(out[2])) and (lse[2] == -INF).all()


def test_a_weight_that_is_0_drops_its_row(device):
    outs, lses = make_states(3, device=device)
    lses[1], outs[1] = lses.amin(0) - 200, NAN
    want = mla_fp8.merge_partial_states(outs[::2], lses[::2])
    assert all(map(same_bits, mla_fp8.merge_partial_states(outs, lses), want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_that_counts_leaves_its_bits(dtype, device):
    outs, lses = make_states(3, dtype=dtype, device=device)
    outs[1, 0, 0, :4] = torch.tensor([-0.0, -INF, INF, 3.0], device=device).to(dtype)
    lses[[0, 2]] = -INF
    out, lse = mla_fp8.merge_partial_states(outs, lses)
    assert same_bits(out, outs[1]) and same_bits(lse, lses[1])


def test_two_states_are_merge_attention_states_bit_for_bit(device):
    outs, lses = make_states(2, device=device)
    want = mla_fp8.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    assert all(map(same_bits, mla_fp8.merge_partial_states(outs, lses), want))


@pytest.mark.parametrize("sink, weight", [(-INF, 1.0), (0.0, 0.5), (INF, 0.0), (1e4, 0.0)])
def test_a_sink_takes_its_share_and_leaves_the_lse(sink, weight, device):
    outs = torch.ones(2, 1, 1, 8, device=device)
    lses = torch.full((2, 1, 1), -math.log(2), device=device)
    out, lse = mla_fp8.merge_partial_states(outs, lses, attn_sink=torch.full((1,), sink, device=device))
    assert torch.allclose(out, torch.full_like(out, weight)) and abs(lse.item()) < 1e-6


def test_large_lses_do_not_overflow(device):
    outs, lses = make_states(dtype=torch.float32, device=device)
    lses[1:3] = torch.tensor([3e38, -3e38], device=device)[:, None, None]
    out, lse = mla_fp8.merge_partial_states(outs, lses, base=2.0)
    assert torch.equal(lse, lses[1]) and same_bits(out, outs[1])


def test_any_strides_and_buffers_of_the_caller(device):
    outs, lses = make_states(4, 6, 4, 64, device=device)
    want = mla_fp8.merge_partial_states(outs, lses)
    packed = torch.full((6, 4, 4, 72), NAN, dtype=torch.bfloat16, device=device)
    packed[..., :64] = outs.permute(1, 2, 0, 3)
    packed.view(torch.float32)[..., 32] = lses.permute(1, 2, 0)
    whole = torch.full((6, 6, 64), NAN, dtype=torch.bfloat16, device=device)
    got = mla_fp8.merge_partial_states(
        packed[..., :64].permute(2, 0, 1, 3), packed.view(torch.float32)[..., 32].permute(2, 0, 1),
        out=whole[:, 1:5], lse=torch.full((6, 4), NAN, device=device),
    )  # fmt: skip
    assert all(map(same_bits, got, want)) and whole[:, [0, 5]].isnan().all()


def test_no_tokens_and_no_dims(device):
    for shape in ((2, 0, 3, 8), (2, 3, 2, 0), (1, 1, 0, 8)):
        out, lse = mla_fp8.merge_partial_states(*make_states(*shape, device=device))
        assert out.shape == shape[1:] and lse.shape == shape[1:3]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"outs": torch.zeros(2, 3, 4)}, "outs must have shape [*, *, *, *], got [2, 3, 4]"),
        ({"outs": torch.zeros(0, 3, 2, 4), "lses": torch.zeros(0, 3, 2)},
         "outs must be of at least 1 state, got 0"),
        ({"lses": torch.zeros(2, 3)}, "lses must have shape [2, 3, 2], got [2, 3]"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink must have shape [2], got [3]"),
        ({"base": 1.0}, "base must be finite and above 1, got 1"),
        ({"base": INF}, "base must be finite and above 1, got inf"),
        ({"out": torch.zeros(3, 2, 5), "lse": torch.zeros(3, 2)},
         "out must have shape [3, 2, 4], got [3, 2, 5]"),
        ({"out": torch.zeros(3, 2, 4), "lse": torch.zeros(2, 3).T},
         "lse must be contiguous"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(changes, message):
    given = {"outs": torch.zeros(2, 3, 2, 4), "lses": torch.zeros(2, 3, 2)}
    check_refused(mla_fp8.merge_partial_states, given | changes, f"mla_fp8.merge_partial_states: {message}")
