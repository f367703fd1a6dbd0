import pytest
import torch

import mla_fp8
from mla_fp8 import reference

INF = float("inf")
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def random_bits(*shape, dtype, device):
    """Any bit pattern, NaN with payloads too: a copy keeps them."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device).view(dtype)


def buffers(q, num_heads):
    out_q = q.new_full((q.shape[0], num_heads, q.shape[2]), float("nan"))
    return {"out_q": out_q, "out_attn_sink": q.new_full((num_heads,), float("nan"), dtype=torch.float32)}


def assert_same_bits(got, want):
    bits = torch.int16 if want.element_size() == 2 else torch.int32
    assert got.dtype == want.dtype and torch.equal(got.view(bits), want.view(bits))


@both_dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(
    "num_q_heads, num_heads, head_dim", [(8, 64, 576), (16, 16, 512), (5, 64, 7), (0, 4, 8)]
)
def test_bits_match_reference(num_q_heads, num_heads, head_dim, num_tokens, dtype, device):
    q = random_bits(num_tokens, num_q_heads, head_dim, dtype=dtype, device=device)
    sink = torch.randn(num_q_heads, device=device)
    want = reference.pad_q_heads(q, sink, num_heads=num_heads)
    for out in ({}, buffers(q, num_heads)):
        got = mla_fp8.pad_q_heads(q, sink, num_heads=num_heads, **out)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)
    assert got[0] is out["out_q"] and got[1] is out["out_attn_sink"]


@both_dtypes
def test_q_may_have_any_strides_of_tokens_and_heads(dtype, device):
    wide = random_bits(12, 9, 80, dtype=dtype, device=device)
    for q in (wide[::2, 1:6, 8:72], wide.transpose(0, 1)[..., :64], wide[:1].expand(4, 9, 80)):
        got, _ = mla_fp8.pad_q_heads(q, None, num_heads=16)
        assert_same_bits(got, reference.pad_q_heads(q, None, num_heads=16)[0])


def test_no_sink_stays_none_and_its_buffer_means_no_sink(device):
    q = random_bits(3, 8, 64, dtype=torch.bfloat16, device=device)
    assert mla_fp8.pad_q_heads(q, None, num_heads=64)[1] is None
    out = buffers(q, 64)
    assert mla_fp8.pad_q_heads(q, None, num_heads=64, **out)[1] is None
    assert (out["out_attn_sink"] == -INF).all()


def test_sink_is_written_even_without_tokens(device):
    q = random_bits(0, 2, 64, dtype=torch.bfloat16, device=device)
    sink = torch.tensor([1.0, 2.0], device=device)
    assert mla_fp8.pad_q_heads(q, sink, num_heads=4)[1].tolist() == [1.0, 2.0, -INF, -INF]


def test_offsets_past_2_to_the_31(device):
    """Token 2 of q begins 2^31 elements in. Only the pages of its tokens are ever touched."""
    far = torch.empty(2**31 + 512, dtype=torch.bfloat16, device=device)
    q = far[:512].as_strided((3, 2, 64), (2**30, 64, 1))
    q.copy_(torch.randn(3, 2, 64))
    got, _ = mla_fp8.pad_q_heads(q, None, num_heads=4)
    assert_same_bits(got, reference.pad_q_heads(q.clone(), None, num_heads=4)[0])


@pytest.mark.parametrize("with_sink", [False, True])
def test_opcheck_and_compile(with_sink, device):
    q = torch.randn(3, 8, 64, device=device).bfloat16()
    sink = torch.randn(8, device=device) if with_sink else None
    torch.library.opcheck(torch.ops.mla_fp8.pad_q_heads.default, (q, sink), {"num_heads": 64})
    torch.library.opcheck(
        torch.ops.mla_fp8.pad_q_heads_out.default, (q, sink), {"num_heads": 64} | buffers(q, 64)
    )

    @torch.compile(fullgraph=True)
    def padded(q, sink, out_q, out_attn_sink):
        fresh = mla_fp8.pad_q_heads(q, sink, num_heads=64)
        written = mla_fp8.pad_q_heads(q, sink, num_heads=64, out_q=out_q, out_attn_sink=out_attn_sink)
        return fresh, written

    want = reference.pad_q_heads(q, sink, num_heads=64)
    for got in padded(q, sink, **buffers(q, 64)):
        assert_same_bits(got[0], want[0])
        assert (got[1] is None) if sink is None else torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda t: t.float(), "q must have dtype torch.bfloat16 or torch.float16, got torch.float32"),
        ("q", lambda t: t[0], r"q must have shape \[\*, \*, \*\], got \[8, 64\]"),
        ("q", lambda t: t[..., ::2], "q must have stride 1 in its last dimension, got 2"),
        ("attn_sink", lambda t: t.double(), "attn_sink must have dtype torch.float32, got torch.float64"),
        ("attn_sink", lambda t: t[1:], r"attn_sink must have shape \[8\], got \[7\]"),
        ("attn_sink", lambda t: t.repeat(2)[::2], "attn_sink must be contiguous"),
        ("num_heads", lambda n: 7, r"num_heads must be at least 8 \(the heads of q\), got 7"),
        ("num_heads", lambda n: -1, "num_heads must be at least 8"),
        ("num_heads", lambda n: 32, r"out_q must have shape \[3, 32, 64\], got \[3, 16, 64\]"),
        ("out_q", lambda t: t.half(), "out_q must have dtype torch.bfloat16, got torch.float16"),
        ("out_q", lambda t: t[:2], r"out_q must have shape \[3, 16, 64\], got \[2, 16, 64\]"),
        ("out_q", lambda t: t.mT.contiguous().mT, "out_q must be contiguous"),
        (
            "out_attn_sink",
            lambda t: t.half(),
            "out_attn_sink must have dtype torch.float32, got torch.float16",
        ),
        ("out_attn_sink", lambda t: t[:8], r"out_attn_sink must have shape \[16\], got \[8\]"),
        ("out_attn_sink", lambda t: t.repeat(2)[::2], "out_attn_sink must be contiguous"),
    ],
)
def test_errors_say_expected_and_got_and_nothing_is_written(name, change, message, device):
    q = random_bits(3, 8, 64, dtype=torch.bfloat16, device=device)
    arguments = {"q": q, "attn_sink": torch.randn(8, device=device), "num_heads": 16} | buffers(q, 16)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match="mla_fp8.pad_q_heads: " + message):
        mla_fp8.pad_q_heads(**arguments)
    assert arguments["out_q"].isnan().all() and arguments["out_attn_sink"].isnan().all()


def test_heads_without_elements_leave_the_sink(device):
    q, sink = torch.zeros(3, 2, 0, dtype=torch.bfloat16, device=device), torch.randn(2, device=device)
    out_q, out_sink = mla_fp8.pad_q_heads(q, sink, num_heads=4)
    assert out_q.shape == (3, 4, 0) and out_sink[:2].equal(sink) and out_sink[2:].isneginf().all()


def test_an_allocation_that_fails_says_what_and_why():
    """torch 2.13 tells why; one before it has printed it. It is more than a process can address."""
    q = torch.zeros(0, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"cannot allocate .* shape \[70368744177664\] and dtype torch.float32 on cpu"
    ) as raised:
        mla_fp8.pad_q_heads(q, None, num_heads=2**46)
    tells = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 13)
    assert ("tried to allocate 281474976710656 bytes" if tells else "to stderr") in str(raised.value)


def test_one_buffer_without_the_other_is_refused(device):
    q = random_bits(3, 8, 64, dtype=torch.bfloat16, device=device)
    out_q = buffers(q, 16)["out_q"]
    with pytest.raises(
        ValueError, match="expected all of out_q, out_attn_sink or none, got no out_attn_sink"
    ):
        mla_fp8.pad_q_heads(q, None, num_heads=16, out_q=out_q)
    assert out_q.isnan().all()


def test_heads_that_no_memory_holds_are_refused(device):
    q = torch.zeros(2, 3, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(
        RuntimeError, match=r"cannot allocate .* \[2, 9223372036854775807, 64\] .*: more elements"
    ):
        mla_fp8.pad_q_heads(q, None, num_heads=2**63 - 1)
