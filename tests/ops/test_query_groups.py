"""`sparse_decode` and `sparse_prefill_paged` with `query_groups`: the results of queries alone."""

from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_attention, assert_same
from draft_cases import draft_case, hostile_starts, plan_of, refilled, uneven
from sparse_cases import INT_MAX, INT_MIN, all_layouts, packed_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS

OPS = torch.ops.mla_fp8


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """Of an emulated GPU: sharing pays for few queries, too."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "2")


def many(count: int, device: str) -> int:
    """Groups; on a GPU enough for sharing to pay."""
    return 16 * count if device == "cuda" else count


GROUPS = [(2, 8), (4, 8), (6, 8), (8, 8), (3, 16), (4, 16), (6, 16), (2, 32), (5, 32)]


@packed_layouts
@pytest.mark.parametrize("group, num_q_heads", GROUPS)
@pytest.mark.parametrize("overlap", [0.0, 0.9, 1.0])
@pytest.mark.sampled(5)
def test_agrees_with_float64_over_poisoned_caches(layout, group, num_q_heads, overlap, device):
    case = draft_case(
        layout, device, many(9, device), group, num_q_heads=num_q_heads, extra_topk=70, overlap=overlap
    )
    got = case.decode(query_groups=group)
    assert_attention(case, got)
    for _ in emulation.runs(2)[1:]:
        assert_same(case.decode(query_groups=group), got)
    assert_attention(case, case.prefill(query_groups=group))


@all_layouts
def test_every_layout_and_a_group_that_is_short(layout, device):
    case = draft_case(layout, device, 4, 3, num_q_heads=8).tokens(slice(0, 10))
    assert_attention(case, case.decode(query_groups=3))


COUNTS = [4, 1, 0, 6, 5, 6, 3, *[6] * 11]  # of requests: most have all, else nothing is shared


@packed_layouts
@pytest.mark.parametrize("overlap", [0.0, 0.9])
@pytest.mark.parametrize("group, num_q_heads", [(6, 8), (4, 8), (6, 16), (4, 32)])
def test_requests_with_other_numbers_of_tokens_are_groups(layout, num_q_heads, overlap, group, device):
    """Tokens that pad a step, and those behind the first ones of a request, are in no group."""
    counts = COUNTS * many(1, device)
    case = draft_case(layout, device, len(counts), 6, num_q_heads=num_q_heads, extra_topk=70, overlap=overlap)
    case, starts = uneven(case, 6, counts, padding=5)
    options = {"query_groups": group, "query_start_loc": starts + 7}
    got = case.decode(**options)
    assert_attention(case, got)
    for _ in emulation.runs(2)[1:]:
        assert_same(case.decode(**options), got)
    assert_attention(
        case, case.decode(**options, shared_keys=plan_of(case, group, query_start_loc=starts + 7))
    )
    assert_attention(case, case.prefill(**options))
    assert_same(case.decode(**options, batch_invariant=True), case.decode(batch_invariant=True))


@pytest.mark.op("plan_shared_keys")
def test_hostile_starts_of_requests_change_no_result(device):
    case = draft_case(KV_LAYOUTS["dsv4"], device, many(6, device), 4, num_q_heads=8)
    for starts in hostile_starts(len(case.q), device):
        options = {"query_groups": 4, "query_start_loc": starts}
        assert_attention(case, case.decode(**options))
        assert_attention(case, case.decode(**options, shared_keys=plan_of(case, **options)))


@pytest.mark.parametrize("num_q_heads", [1, 5, 12, 64, 128])
def test_heads_that_fill_no_tile_go_alone(num_q_heads, device):
    case = draft_case(KV_LAYOUTS["dsv4"], device, 3, 4, num_q_heads=num_q_heads)
    assert_same(case.decode(query_groups=4), case.decode())


@packed_layouts
def test_a_slot_that_a_query_names_twice_counts_twice(layout, device):
    case = draft_case(layout, device, many(10, device), 4, num_q_heads=8)
    indices = case.scopes[0].indices.clone()
    indices[5, :150] = indices[5, 0]
    indices[30:32] = 7
    case = replace(case, scopes=[refilled(case.scopes[0], indices, case.scopes[0].length)])
    assert_attention(case, case.decode(query_groups=4))


@packed_layouts
def test_hostile_indices_and_lengths(layout, device):
    case = draft_case(layout, device, many(10, device), 4, num_q_heads=8, extra_topk=50)
    scopes = []
    for scope in case.scopes:
        indices, length = scope.indices.clone(), scope.length.clone()
        values = torch.tensor([INT_MIN, -1, len(scope.rows), INT_MAX], device=device).int()
        where = torch.rand(indices.shape, device=device) < 0.2
        indices[where] = values[torch.randint(4, indices.shape, device=device)][where]
        length[:5] = torch.tensor([0, -3, INT_MIN, INT_MAX, 1], device=device).int()
        indices[8:12] = -1
        scopes.append(refilled(scope, indices, length))
    case = replace(case, scopes=scopes)
    got = case.decode(query_groups=4)
    assert_attention(case, got)
    assert (got[0][8:12] == 0).all() and (got[1][8:12] == -float("inf")).all()


@packed_layouts
def test_nan_reaches_those_queries_only_that_attend_to_it(layout, device):
    """Of a group the others see the key, and do not attend to it."""
    group, topk = 4, 200
    case = draft_case(layout, device, many(10, device), group, num_q_heads=8, topk=topk, holes=0.0)
    scope = refilled(case.scopes[0], case.scopes[0].indices, None)
    case = replace(case, scopes=[scope])
    want = case.decode(query_groups=group)
    slot = scope.indices[6, 0]
    latent = torch.full((1, layout.head_dim_qk), float("nan"), device=device).bfloat16()
    mla_fp8.quantize_kv(latent, slot[None].long(), scope.kv_cache, layout=layout, page_size=scope.page_size)
    reached = (scope.indices == slot).any(1)
    assert 0 < reached.sum() < len(reached)
    got = case.decode(query_groups=group)
    assert got[0][reached].isnan().all() and got[1][reached].isnan().all()
    for a, b in zip(got, want, strict=True):
        one_code = 2**-7 if a.dtype == torch.bfloat16 else 2**-19
        torch.testing.assert_close(a[~reached], b[~reached], rtol=one_code, atol=2**-12)


@pytest.mark.op("plan_shared_keys")
def test_there_are_as_many_lists_as_the_tokens_want(device):
    """Not as a group of 65,536 of them would: 640 MB for one token."""
    indices = torch.zeros(3, 2048, dtype=torch.int32, device=device)
    options = {"num_q_heads": 8, "layout": "dsv4", "num_slots": 10}
    for tokens in (1, 2, 3):
        for group in (2, 3, 8, 1 << 16):
            lists = mla_fp8.plan_shared_keys(indices[:tokens], query_groups=group, **options)
            assert lists.nbytes <= tokens * 2048 * 10


@pytest.mark.op("plan_shared_keys")
@packed_layouts
def test_a_plan_serves_several_layers(layout, device):
    group = 4
    case = draft_case(layout, device, many(10, device), group, num_q_heads=8, extra_topk=50)
    lists = plan_of(case, group)
    want = case.decode(query_groups=group)
    assert_same(case.decode(query_groups=group, shared_keys=lists), want)
    other = replace(case, q=torch.randn_like(case.q))
    assert_same(other.decode(query_groups=group, shared_keys=lists), other.decode(query_groups=group))
    into = torch.full_like(lists, 77)
    assert plan_of(case, group, out=into) is into
    assert torch.equal(into[:, 0], lists[:, 0])


def test_without_room_for_lists_queries_go_alone(device):
    """The _out form allocates nothing: the workspace may be none."""
    group = 4
    case = draft_case(KV_LAYOUTS["dsv4"], device, many(10, device), group, num_q_heads=8)
    outs = case.nan_outputs()
    del outs["max_logits"]
    OPS.sparse_decode_out(*case.arguments(), **case.op_options(), query_groups=group, **outs)
    assert_same((outs["out"], outs["lse"]), case.decode())


def test_batch_invariant_queries_go_alone(device):
    case = draft_case(KV_LAYOUTS["dsv4"], device, many(10, device), 4, num_q_heads=8)
    assert_same(case.decode(batch_invariant=True, query_groups=4), case.decode(batch_invariant=True))


def placed(options: dict, device: str) -> dict:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query_groups": 0}, "query_groups must be in [1, 65536], got 0"),
        (
            {"shared_keys": torch.zeros(1, 4).int()},
            "shared_keys must be None without query_groups, got a tensor",
        ),
        (
            {"query_groups": 4, "shared_keys": torch.zeros(1, 4).int()},
            "shared_keys must have shape [4, 504], got [1, 4]",
        ),
        (
            {"query_start_loc": torch.zeros(3).int()},
            "query_start_loc must be None without query_groups, got a tensor",
        ),
        (
            {"query_groups": 4, "query_start_loc": torch.zeros(1).int()},
            "query_start_loc must have at least 2 elements, got 1",
        ),
        (
            {"query_groups": 4, "query_start_loc": torch.zeros(3)},
            "query_start_loc must have dtype torch.int32, got torch.float32",
        ),
    ],
)
def test_what_is_refused(changes, message, device):
    case = draft_case(KV_LAYOUTS["dsv4"], device, 2, 4, num_q_heads=8, topk=200)
    with pytest.raises(RuntimeError) as error:
        case.decode(**placed(changes, device))
    assert f"sparse_decode: {message}" in str(error.value)


@pytest.mark.op("plan_shared_keys")
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query_groups": 1}, "query_groups must be in [2, 65536], got 1"),
        ({"num_q_heads": 129}, "num_q_heads must be in [1, 128], got 129"),
        ({"extra_num_slots": 5}, "extra_indices and extra_num_slots must be given together"),
        ({"num_slots": -1}, "num_slots must be at least 0, got -1"),
        ({"topk_length": torch.zeros(7).int()}, "topk_length must have shape [8], got [7]"),
        ({"query_start_loc": torch.zeros(0).int()}, "query_start_loc must have at least 2 elements, got 0"),
        (
            {"extra_indices": torch.zeros(8, 5), "extra_num_slots": 5},
            "extra_indices must have dtype torch.int32, got torch.float32",
        ),
        (
            {"extra_indices": torch.zeros(9, 5).int(), "extra_num_slots": 5},
            "extra_indices must have shape [8, *], got [9, 5]",
        ),
    ],
)
def test_a_plan_that_is_refused(changes, message, device):
    indices = torch.zeros(8, 16, device=device).int()
    options = {"query_groups": 4, "num_q_heads": 8, "layout": "dsv4", "num_slots": 64}
    with pytest.raises(RuntimeError) as error:
        mla_fp8.plan_shared_keys(indices, **options | placed(changes, device))
    assert f"plan_shared_keys: {message}" in str(error.value)
