"""index_topk where several CTAs share a row, or one has several."""

import emulation
import pytest
import torch
from index_cases import ints, random_problem

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("index_topk")


@pytest.mark.parametrize("kind", ["few", "many", "one is longer", "as long as each other"])
@pytest.mark.parametrize(("next_n", "heads"), [(1, 16), (2, 16), (1, 64), (2, 64)])
@pytest.mark.only(
    lambda kind, heads, device, **_: device == "cuda" or kind != "many" or heads == 16
)  # minutes
def test_rows_of_short_contexts_are_shared_by_ctas(kind, next_n, heads, device):
    """Requests of as many CTAs each, or that begin and end anywhere in the share of a CTA, and whole ones in
    it: more rows than CTAs answer themselves, or less. The words by which they wait for each other hold
    anything before a call."""
    sms = emulation.num_processors(device)
    count = 4 * sms // next_n + 3 if kind == "many" else 30 if kind == "one is longer" else 12
    lens = [(300, 1025, 64, 257, 700, 1, 513, 40, 900, 256, 301, 12)[i % 12] for i in range(count)]
    if kind == "one is longer":
        lens[7] = 6001
    if kind == "as long as each other":
        lens = [700] * count
    problem = random_problem(device, lens, heads=heads, next_n=next_n)
    want = problem.want_topk(128)
    size = torch.ops.mla_fp8.index_topk_workspace(len(problem.q), 128, sms)
    for byte, calls in ((0x00, 1), (0xA5, 2)):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        for _ in range(calls):
            got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
            out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
            problem.topk(128, **out, workspace=workspace)
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("has_row_lens", [False, True])
@pytest.mark.parametrize(
    ("next_n", "heads", "topk", "room"),
    [
        *((n, 64, 128, 21000) for n in (2, 3, 5, 6, 8)),  # more than lets each row be a unit of its own
        (3, 64, 128, 0),
        (6, 64, 128, 0),
        (4, 16, 2100, 0),
        (8, 16, 2100, 0),
    ],
)
@pytest.mark.parametrize("num_requests", [1, 2, 9])
def test_drafts_that_are_several_units(num_requests, next_n, heads, topk, room, has_row_lens, device):
    """Some take all that they see, or see nothing, beside others that do not; several CTAs share them. The
    page table has room for more than they see."""
    lens = [2 * topk + 300, topk + 2, 5, topk, 0, 3 * topk, topk + next_n, 2000, 1][:num_requests]
    row_lens = [max(n - j * 70 % 400, 0) if j % 3 else n for n in lens for j in range(next_n)]
    options = {"row_lens": ints(row_lens, device)} if has_row_lens else {}
    problem = random_problem(device, lens, heads=heads, next_n=next_n, **options)
    want = problem.want_topk(topk)
    problem.page_table = torch.nn.functional.pad(
        problem.page_table, (0, max(room // 64 - problem.page_table.shape[1], 0)), value=-7
    )
    sms = emulation.num_processors(device)
    size = torch.ops.mla_fp8.index_topk_workspace(len(problem.q), topk, sms)
    for byte in (0x00, 0xA5):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
        out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
        problem.topk(topk, **out, workspace=workspace)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("lens", "next_n", "heads", "processors"),
    [
        ((10_300,), 8, 64, 4),  # four units of a request, by a CTA each
        ((16_000, 15_500, 50, 15_800), 2, 64, 4),  # one takes all
        ((14_000, 13_800, 13_900, 30, 13_700, 13_600), 2, 64, 7),  # and a CTA has none
        ((12_300, 11_900, 12_100, 30, 12_200, 12_000), 2, 64, 7),  # room in equal shares alone
        ((40_000, 300, 300, 300), 2, 64, 4),  # too different: equal shares of all tiles
        ((5400, 5300), 4, 16, 2),
        ((10_300, 10_100, 10_200), 3, 64, 3),
    ],
)
def test_units_whose_keys_have_no_room(lens, next_n, heads, processors, device, monkeypatch):
    """As many CTAs as units of about one length: each has all of one, and the merge has nothing to do."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", str(processors))
    problem = random_problem(device, list(lens), heads=heads, next_n=next_n)
    want = problem.want_topk(64)
    more = max(21_000 // 64 - problem.page_table.shape[1], 0)  # so wide that rows are not units of their own
    problem.page_table = torch.nn.functional.pad(problem.page_table, (0, more), value=-7)
    sms = emulation.num_processors(device)  # of an emulated GPU as it is, not as it is here
    sms = sms if device == "cuda" else min(sms, processors)
    size = torch.ops.mla_fp8.index_topk_workspace(len(problem.q), 64, sms)
    for byte in (0x00, 0xA5):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
        out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
        problem.topk(64, **out, workspace=workspace)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("heads", [24, 64])
def test_prompts_of_more_rows_than_are_gathered(heads, device, monkeypatch):
    """They have kernels that keep no keys. Rows of several chunks, of one, and that take all."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "3")
    seen = [11_500, 11_400, 11_300, 11_501, 3000, 2999, 100, 99, 2100, 0, 2049, 2048, 2500, 70]
    seen = seen * (40 if device == "cuda" else 1)
    options = {"row_lens": ints(seen, device)}
    problem = random_problem(device, [11_501], heads=heads, next_n=len(seen), **options)
    want = problem.want_topk(2048)
    assert all(map(torch.equal, problem.topk(2048), want))
    keys = reference.index_keys(problem.index_cache, problem.layout, problem.page_size)
    slots = problem.slots()[3].long()
    k, scale = keys[0].view(torch.uint8)[slots].view(torch.float8_e4m3fn), keys[1][slots]
    end = options["row_lens"]
    ragged = (problem.q, problem.weights, k, scale, torch.zeros_like(end), end)
    got = mla_fp8.index_topk_ragged(*ragged, topk=2048, k_slots=slots)
    assert all(map(torch.equal, got, want))
