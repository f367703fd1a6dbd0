import pytest
import torch

import mla_fp8
from mla_fp8 import reference
from mla_fp8.testing import assert_as_accurate_as

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def make_states(num_tokens=5, num_heads=3, head_dim=512, *, dtype=torch.bfloat16, device, lse_scale=3.0):
    out_a, out_b = (torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype) for _ in "ab")
    lse_a, lse_b = (lse_scale * torch.randn(num_tokens, num_heads, device=device) for _ in "ab")
    return out_a, lse_a, out_b, lse_b


def buffers(out_a, lse_a, *_):
    return {"out": torch.full_like(out_a, NAN), "lse": torch.full_like(lse_a, NAN)}


def same_bits(x, y):
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@all_dtypes
@pytest.mark.parametrize("lse_scale", [0.0, 3.0, 300.0])
@pytest.mark.parametrize("num_tokens, head_dim", [(0, 512), (1, 512), (67, 512), (5, 7), (5, 0)])
def test_matches_float64(num_tokens, head_dim, lse_scale, dtype, device):
    states = make_states(num_tokens, 3, head_dim, dtype=dtype, device=device, lse_scale=lse_scale)
    out, lse = mla_fp8.merge_attention_states(*states)
    assert out.dtype == dtype and out.shape == states[0].shape and lse.shape == (num_tokens, 3)
    if out.numel():
        exact, exact_lse = reference.merge_attention_states(*(x.double() for x in states))
        rounded, rounded_lse = reference.merge_attention_states(*states)
        assert_as_accurate_as(out, rounded, exact)
        assert_as_accurate_as(lse, rounded_lse, exact_lse)


@all_dtypes
def test_splitting_the_keys_does_not_change_attention(dtype, device):
    logits = 4 * torch.randn(3, 2, 40, dtype=torch.float64, device=device)
    values = torch.randn(40, 512, dtype=torch.float64, device=device)

    def attention(keys):
        out = logits[..., keys].softmax(-1) @ values[keys]
        return out.to(dtype), logits[..., keys].logsumexp(-1).float()

    (whole, whole_lse), *halves = (attention(keys) for keys in (slice(40), slice(7), slice(7, 40)))
    out, lse = mla_fp8.merge_attention_states(*halves[0], *halves[1])
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.float(), whole.float(), rtol=0, atol=3 * torch.finfo(dtype).eps)


@all_dtypes
@pytest.mark.parametrize("empty_out", [0.0, NAN, INF])
def test_an_empty_side_leaves_the_other_sides_bits(empty_out, dtype, device):
    out_a, lse_a, out_b, lse_b = make_states(dtype=dtype, device=device)
    out_a[0, 0, :5] = torch.tensor([-0.0, 1e-7, -INF, INF, 3.0], device=device).to(
        dtype
    )  # -0, subnormal half
    nothing = torch.full_like(out_b, empty_out), torch.full_like(lse_b, -INF)
    for states in ((out_a, lse_a, *nothing), (*nothing, out_a, lse_a)):
        out, lse = mla_fp8.merge_attention_states(*states, **buffers(*states))
        assert same_bits(out, out_a) and same_bits(lse, lse_a)


@all_dtypes
@pytest.mark.parametrize("empty_out", [1.0, NAN])
def test_two_empty_sides_give_zero_and_minus_inf(empty_out, dtype, device):
    states = make_states(dtype=dtype, device=device)
    for x, value in zip(states, (empty_out, -INF, empty_out, -INF), strict=True):
        x[1::2] = value
    out, lse = mla_fp8.merge_attention_states(*states)
    assert same_bits(out[1::2], torch.zeros_like(out[1::2])) and (lse[1::2] == -INF).all()
    assert out[::2].isfinite().all() and lse[::2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_nearest_even_once(dtype, device):
    """Halves of neighbouring values are ties; of far ones, anything. Every magnitude that the dtype has."""
    bits = torch.arange(0, 2**15, dtype=torch.int32, device=device).to(torch.int16)
    values = bits.view(dtype)[bits.view(dtype).isfinite()]
    values = values[: len(values) // 8 * 8].view(1, 8, -1)
    lse = torch.zeros(1, 8, device=device)
    for other in (values.roll(1, -1), -values.roll(7, -1), values.flip(-1)):
        out, merged_lse = mla_fp8.merge_attention_states(values, lse, other, lse)
        want = (values.double() / 2 + other.double() / 2).to(dtype)
        if dtype == torch.bfloat16:  # float32 subnormals may be flushed
            normal = want.abs() >= torch.finfo(dtype).tiny
            out, want = out[normal], want[normal]
        assert torch.equal(out, want)
    torch.testing.assert_close(merged_lse, torch.full_like(lse, 2.0).log())


def test_large_lses_do_not_overflow(device):
    states = make_states(dtype=torch.float32, device=device)
    for side in (1, 3):
        states[side].add_(3e38)
    out, lse = mla_fp8.merge_attention_states(*states)
    assert torch.equal(lse, states[1]) and out.isfinite().all()


def test_rows_may_have_any_strides(device):
    states = make_states(6, 4, 64, device=device)
    want, want_lse = mla_fp8.merge_attention_states(*states)
    strided = [torch.full((6, 4, 96), NAN, dtype=torch.bfloat16, device=device)[..., 16:80] for _ in range(2)]
    heads_first = torch.empty(4, 6, 64, dtype=torch.bfloat16, device=device).transpose(0, 1)
    strided[0].copy_(states[0])
    heads_first.copy_(states[2])
    whole = torch.full((6, 6, 64), NAN, dtype=torch.bfloat16, device=device)
    out = whole[:, 1:5]
    got = mla_fp8.merge_attention_states(
        strided[0], states[1], heads_first, states[3], out=out, lse=torch.full_like(states[1], NAN)
    )
    assert got[0] is out and torch.equal(out, want) and torch.equal(got[1], want_lse)
    assert whole[:, [0, 5]].isnan().all()


def test_a_row_does_not_depend_on_the_others_and_repeats_bitwise(device):
    states = make_states(64, 3, 512, device=device)
    out, lse = mla_fp8.merge_attention_states(*states)
    for t in (0, 31, 63):
        alone = mla_fp8.merge_attention_states(*(x[t : t + 1] for x in states))
        assert same_bits(alone[0], out[t : t + 1]) and same_bits(alone[1], lse[t : t + 1])


def test_offsets_past_2_to_the_31(device):
    """Token 2 of each of these begins 2^31 elements in. Only the pages of their tokens are ever touched."""
    states = make_states(3, 2, 64, device=device)
    far = torch.empty(2**31 + 1024, dtype=torch.bfloat16, device=device)
    out_a, out_b, out = (far[:1024].as_strided((3, 2, 64), (2**30, 64, 1), 256 * i) for i in range(3))
    out_a.copy_(states[0])
    out_b.copy_(states[2])
    lse = torch.empty_like(states[1])
    mla_fp8.merge_attention_states(out_a, states[1], out_b, states[3], out=out, lse=lse)
    want, want_lse = mla_fp8.merge_attention_states(*states)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@all_dtypes
def test_opcheck(dtype, device):
    states = make_states(dtype=dtype, device=device)
    torch.library.opcheck(torch.ops.mla_fp8.merge_attention_states.default, states)
    torch.library.opcheck(torch.ops.mla_fp8.merge_attention_states_out.default, states, buffers(*states))


def test_compiles_as_one_graph(device):
    states = make_states(device=device)
    out, lse = (x.clone() for x in mla_fp8.merge_attention_states(*states))

    @torch.compile(fullgraph=True)
    def merged(states, buffers):
        return mla_fp8.merge_attention_states(*states), mla_fp8.merge_attention_states(*states, **buffers)

    for got in merged(states, buffers(*states)):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "out_a",
            lambda t: t.double(),
            "out_a must have dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
        ),
        ("out_a", lambda t: t[0], r"out_a must have shape \[\*, \*, \*\], got \[3, 512\]"),
        ("out_a", lambda t: t[..., ::2], "out_a must have stride 1 in its last dimension, got 2"),
        ("out_b", lambda t: t.half(), "out_b must have dtype torch.bfloat16, got torch.float16"),
        ("out_b", lambda t: t[:, 1:], r"out_b must have shape \[5, 3, 512\], got \[5, 2, 512\]"),
        ("out_b", lambda t: t.mT.contiguous().mT, "out_b must have stride 1 in its last dimension, got 3"),
        ("lse_a", lambda t: t.half(), "lse_a must have dtype torch.float32, got torch.float16"),
        ("lse_a", lambda t: t.mT, r"lse_a must have shape \[5, 3\], got \[3, 5\]"),
        ("lse_a", lambda t: t.mT.contiguous().mT, "lse_a must be contiguous"),
        ("lse_b", lambda t: t.double(), "lse_b must have dtype torch.float32, got torch.float64"),
        ("lse_b", lambda t: t[1:], r"lse_b must have shape \[5, 3\], got \[4, 3\]"),
        ("lse_b", lambda t: t.mT.contiguous().mT, "lse_b must be contiguous"),
        ("out", lambda t: t.float(), "out must have dtype torch.bfloat16, got torch.float32"),
        ("out", lambda t: t[1:], r"out must have shape \[5, 3, 512\], got \[4, 3, 512\]"),
        ("out", lambda t: t.mT.contiguous().mT, "out must have stride 1 in its last dimension, got 3"),
        (
            "out",
            lambda t: t[:1].expand(5, 3, 512),
            "out must not overlap itself, got stride 0",
        ),
        ("lse", lambda t: t.half(), "lse must have dtype torch.float32, got torch.float16"),
        ("lse", lambda t: t[1:], r"lse must have shape \[5, 3\], got \[4, 3\]"),
        ("lse", lambda t: t.mT.contiguous().mT, "lse must be contiguous"),
    ],
)
def test_errors_say_expected_and_got_and_nothing_is_written(name, change, message, device):
    states = make_states(device=device)
    arguments = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states, strict=True)) | buffers(*states)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match="mla_fp8.merge_attention_states: " + message):
        mla_fp8.merge_attention_states(**arguments)
    assert arguments["out"].isnan().all() and arguments["lse"].isnan().all()


def test_one_buffer_without_the_other_is_refused(device):
    states = make_states(device=device)
    with pytest.raises(ValueError, match="expected all of out, lse or none, got no out"):
        mla_fp8.merge_attention_states(*states, lse=states[1].clone())
