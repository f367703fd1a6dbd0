"""Why the softmax weights and the queries stay in 16 bits: what AITER's FP8 arithmetic would lose.

A model of the roundings in AITER's paged_attention_ragged (csrc/cpp_itfs/pa/pa_kernels.cuh, August 2026), not
of its instruction order: queries to FP8 without a scale, weights normalised in partitions of 256 keys and
cast to FP8 without a scale, the partitions' outputs to bf16.
"""

import pytest
import torch

import mla_fp8

KEYS, DIM, HEADS, PARTITION = 4096, 128, 16, 256
FORMATS = {"fnuz": torch.float8_e4m3fnuz, "fn": torch.float8_e4m3fn}
formats = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)


def through(x, dtype):
    return x.to(dtype).float()


def aiter_model(q, k, v, dtype):
    logits = through(q, dtype) @ k.float().T * DIM**-0.5
    outs, lses = [], []
    for keys in logits.split(PARTITION, dim=1):
        first = len(outs) * PARTITION
        weights = through(keys.softmax(1), dtype)
        outs.append(through(weights @ v[first : first + PARTITION].float(), torch.bfloat16))
        lses.append(keys.logsumexp(1))
    share = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * share[..., None]).sum(0)


def ours(q, k, v):
    pages = torch.arange(KEYS, dtype=torch.int32)
    indptr, one = torch.tensor([0, KEYS], dtype=torch.int32), torch.ones(1)
    caches = (k.view(KEYS, 1, 1, DIM), v.view(KEYS, 1, 1, DIM))
    ragged = (indptr, pages, torch.ones(1, dtype=torch.int32))
    out, _ = mla_fp8.paged_attention_ragged(
        q.bfloat16()[None], *caches, *ragged, sm_scale=DIM**-0.5, k_scale=one, v_scale=one
    )
    return out[0].float()


def relative_error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@formats
def test_fp8_weights_lose_more_than_ten_times_as_much(dtype):
    torch.manual_seed(0)
    q = torch.randn(HEADS, DIM).bfloat16().float()
    k, v = (torch.randn(KEYS, DIM).to(dtype) for _ in "kv")
    exact = torch.softmax(q.double() @ k.double().T * DIM**-0.5, 1) @ v.double()
    theirs, mine = relative_error(aiter_model(q, k, v, dtype), exact), relative_error(ours(q, k, v), exact)
    at_least = {torch.float8_e4m3fnuz: 5e-2, torch.float8_e4m3fn: 9e-2}[dtype]
    assert at_least < theirs < 1.5 * at_least
    assert mine < 5e-3 and theirs > 10 * mine


@formats
def test_flat_weights_below_the_smallest_fp8_number_vanish(dtype):
    """One key at 0 and 255 near -7 in each partition, every value 1: the exact answer is 1."""
    k, q = torch.zeros(KEYS, DIM), torch.zeros(1, DIM)
    k[:, 0] = -80.0
    k[::PARTITION, 0] = 0.0
    q[0, 0] = 1.0
    v = torch.ones(KEYS, DIM)
    theirs = aiter_model(q, k.to(dtype), v.to(dtype), dtype)
    torch.testing.assert_close(ours(q, k.to(dtype), v.to(dtype)), v[:1], rtol=2**-8, atol=0)
    assert (theirs - 1).abs().max() > 0.05
