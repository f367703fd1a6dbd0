"""decode_hot_rows: waiting has the bits of attention over all rows, not waiting errs by a rounding more."""

import pytest
import torch
from hot_decode_cases import HEADS, HOT, K, Server
from torch import Tensor

import mla_fp8

pytestmark = pytest.mark.op("decode_hot_rows")


def exact(server: Server, q: Tensor, slots: Tensor) -> Tensor:
    """In float64, of the rows as they are stored."""
    kv = server.stored.double()[slots.cpu().clamp_min(0).long()]
    logits = 0.04 * q.cpu().double() @ kv.mT
    logits = logits.masked_fill((slots.cpu() < 0)[:, None], -torch.inf)
    sink = server.sink.cpu().double()[None, :, None].expand(len(q), -1, 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ kv[..., :512]


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("name", ["dsv32", "dsv4"])
def test_waiting_leaves_the_bits_of_attention_over_all_rows(name, next_n, has_window, device):
    server = Server(name, device, next_n=next_n)
    for step in range(4):
        got, want, *_ = server.step(step, has_window=has_window)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("name", ["dsv32", "dsv4", "bf16"])
def test_not_waiting_errs_by_the_rounding_of_its_parts(name, next_n, has_window, device):
    """The first step has misses alone, others hits too. NaN of slots that hold nothing yet is never seen."""
    server = Server(name, device, next_n=next_n)
    for step in range(4):
        before = server.held.clone()
        (out, lse), (want, want_lse), q, slots = server.step(step, wait=False, has_window=has_window)
        assert step == 0 or (before >= 0).any()
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        # Parts, and the whole: half an ulp of bf16 each, of sizes up to the largest part's.
        assert (out.float() - want.float()).abs().amax() <= 3 * 2.0**-9 * server.stored.float().abs().amax()
        if not has_window:
            truth = exact(server, q, slots)
            errors = [(x.cpu().double() - truth).square().mean().sqrt() for x in (out, want)]
            assert errors[0] <= 2 * errors[1]


def test_all_hits_leave_the_bits_without_waiting(device):
    server = Server("dsv32", device)
    server.step(0)
    torch.manual_seed(0)
    entries = server.choose(0)
    q = torch.randn(len(entries), HEADS, 576, device=device).bfloat16()
    mla_fp8.decode_hot_rows(q, server.host, server.hot, *server.resolve(entries), **server.options())
    plan = server.resolve(entries)
    assert not plan[3].any()
    sink = {"attn_sink": None}  # which joining counts last
    waited = mla_fp8.decode_hot_rows(q, server.host, server.hot, *plan, **server.options(**sink))
    out = mla_fp8.decode_hot_rows(q, server.host, server.hot, *plan, **server.options(wait=False, **sink))
    assert torch.equal(out[0], waited[0]) and torch.equal(out[1], waited[1])


@pytest.mark.parametrize("next_n", [1, 2])
def test_no_value_of_a_plan_reaches_other_rows(next_n, device):
    """Behind a count stands anything; rows that do not exist are nobody's."""
    server = Server("dsv32", device, next_n=next_n)
    server.step(0)
    entries = server.choose(1)
    hot_rows, host_rows, miss_rows, counts = server.resolve(entries)
    q = torch.randn(len(entries), HEADS, 576, device=device).bfloat16()
    columns = torch.arange(K, device=device)
    behind = columns >= counts[:, None]
    miss_rows = miss_rows.masked_fill(behind, (1 << 31) - 1)
    miss_rows[:, -1] = torch.where(behind[:, -1], hot_rows[:, 0], miss_rows[:, -1])
    hot_rows[0, :3] = torch.tensor([-(1 << 31), (1 << 31) - 1, len(server.hot) * HOT], device=device).int()
    server.hit_rows[0, :3] = hot_rows[0, :3]
    caches = server.host, server.hot
    plan = (hot_rows, host_rows, miss_rows, counts)
    out, lse = mla_fp8.decode_hot_rows(q, *caches, *plan, **server.options(wait=False))
    want, want_lse = mla_fp8.decode_hot_rows(q, *caches, *plan, **server.options())
    assert out.isfinite().all()
    if next_n == 2:  # a plan's row is of whoever chose it; with one row a request its own plan is attended to
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[1:], want_lse[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[1:], want[1:], rtol=2e-2, atol=2e-2)


def test_rows_that_were_copied_late_count(device, monkeypatch):
    """Without the second part the misses are lost: what the tests above would not see if it were so."""
    server = Server("dsv32", device)
    original = mla_fp8.hot_rows.merge_partial_states

    def first_alone(outs, lses, **options):
        lses = torch.stack([lses[0], torch.full_like(lses[1], -torch.inf)])
        return original(outs, lses, **options)

    monkeypatch.setattr(mla_fp8.hot_rows, "merge_partial_states", first_alone)
    server.step(0)
    (_, lse), (_, want), *_ = server.step(1, wait=False)
    assert (lse - want).abs().amax() > 0.1


def test_not_waiting_without_hits_is_refused():
    server = Server("dsv32", "cpu")
    plan = server.resolve(server.choose(0))
    q = torch.zeros(len(plan[3]), HEADS, 576, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"mla_fp8\.decode_hot_rows: expected hit_rows with wait=False, got none"
    ):
        mla_fp8.decode_hot_rows(
            q, server.host, server.hot, *plan, **server.options(wait=False, hit_rows=None)
        )
