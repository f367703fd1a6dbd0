import pytest
import torch

import mla_fp8
from mla_fp8 import reference

POISON = 1 << 30
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INPUTS = ("seq_lens", "extend_seq_lens", "req_pool_indices", "req_to_token", "full_to_swa")
OUTPUTS = ("ids", "first_pos", "gather_lens", "offsets")


def make_case(
    seq_lens, extend_seq_lens, *, device, window=128, spare=7, pool_dtype=torch.int64, max_tokens=1100
):
    """The arguments by name. Both tables are views into larger ones that hold ids like their own."""

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_slots, num_pool_rows = 5000, len(seq_lens) + 3
    req_to_token = torch.randint(num_slots, (num_pool_rows + 2, max_tokens + 9), device=device).int()
    full_to_swa = torch.randperm(num_slots + 20, device=device)
    gathered = sum(min(s, e + window - 1) for s, e in zip(seq_lens, extend_seq_lens, strict=True))
    return {
        "seq_lens": ints(seq_lens),
        "extend_seq_lens": ints(extend_seq_lens),
        "req_pool_indices": torch.randperm(num_pool_rows, device=device)[: len(seq_lens)].to(pool_dtype),
        "req_to_token": req_to_token[1:-1, 4 : 4 + max_tokens],
        "full_to_swa": full_to_swa[10:-10],
        "window_size": window,
        "capacity": gathered + spare,
    }


def rule(case):
    """Request by request, position by position."""

    def entry(table, *index):
        inside = all(0 <= i < n for i, n in zip(index, table.shape, strict=True))
        return int(table[index]) if inside else -1

    ids, first_pos, gather_lens, offsets = [], [], [], [0]
    for r, seq_len in enumerate(case["seq_lens"].tolist()):
        gather_lens.append(max(0, min(seq_len, int(case["extend_seq_lens"][r]) + case["window_size"] - 1)))
        first_pos.append(seq_len - gather_lens[r])
        for pos in range(first_pos[r], first_pos[r] + min(gather_lens[r], case["capacity"])):
            slot = entry(case["req_to_token"], int(case["req_pool_indices"][r]), pos)
            swa_slot = entry(case["full_to_swa"], slot)
            ids.append(swa_slot if 0 <= swa_slot <= INT_MAX else -1)
        offsets.append(offsets[r] + gather_lens[r])
    ids = (ids + [-1] * case["capacity"])[: case["capacity"]]
    return ids, first_pos, gather_lens, [min(x, INT_MAX) for x in offsets]


def poisoned(case):
    """Output buffers inside of larger ones, which come first."""
    num_requests, device = len(case["seq_lens"]), case["seq_lens"].device
    sizes = (case["capacity"], num_requests, num_requests, num_requests + 1)
    around = [torch.full((n + 16,), POISON, dtype=torch.int32, device=device) for n in sizes]
    return around, {f"out_{name}": x[8:-8] for name, x in zip(OUTPUTS, around, strict=True)}


def check(case):
    """Both forms against the rule and the reference; nothing around the buffers is touched."""
    around, out = poisoned(case)
    results = mla_fp8.build_swa_token_ids(**case, **out)
    want = rule({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in case.items()})
    for got in (results, mla_fp8.build_swa_token_ids(**case), reference.build_swa_token_ids(**case)):
        for x, expected in zip(got, want, strict=True):
            assert x.dtype == torch.int32 and x.tolist() == expected
    for buffer, result, whole in zip(out.values(), results, around, strict=True):
        assert buffer is result
        buffer.fill_(POISON)
        assert (whole == POISON).all()
    return want


@pytest.mark.parametrize("pool_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("window", [1, 100, 128])
@pytest.mark.parametrize(
    "seq_lens, extend_seq_lens",
    [
        ([96, 144], [3, 2]),
        ([7, 300, 1000], [7, 130, 5]),
        ([1], [1]),
        ([127, 128, 129, 254, 255, 256], [1, 1, 2, 127, 127, 129]),
        ([50, 0, 9, 300], [0, 0, 9, 0]),
        ([], []),
    ],
)
def test_ids_match_the_rule_and_the_reference(seq_lens, extend_seq_lens, window, pool_dtype, device):
    check(make_case(seq_lens, extend_seq_lens, window=window, pool_dtype=pool_dtype, device=device))


def test_example_worked_out_by_hand(device):
    """Window 3: request 0 brings 2 of 5 tokens and needs 2 before them, request 1 both of its 2."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = ints([0, 1, 2, 3, 4], [9, 9, 9, 9, 9], [8, 7, 6, 5, 4]), torch.arange(100, 109, device=device)
    tables[1][2] = -1  # slot 2 has left the sliding window
    ids, first_pos, gather_lens, offsets = mla_fp8.build_swa_token_ids(
        ints(5, 2), ints(2, 1), ints(0, 2), *tables, window_size=3, capacity=8
    )
    assert ids.tolist() == [101, -1, 103, 104, 108, 107, -1, -1]
    assert first_pos.tolist() == [1, 0] and gather_lens.tolist() == [4, 2] and offsets.tolist() == [0, 4, 6]


@pytest.mark.parametrize("spare", [0, -1, -100, -431])
def test_ids_past_the_capacity_are_dropped(spare, device):
    case = make_case([7, 300, 1000], [7, 130, 40], spare=spare, device=device)
    *_, offsets = check(case)
    assert offsets[-1] == case["capacity"] - spare


def test_entries_that_a_table_does_not_hold_are_minus_one(device):
    case = make_case([30, 30, 1110, 30, 30], [5] * 5, window=20, max_tokens=1100, device=device)
    case["req_pool_indices"][0], case["req_pool_indices"][1] = -1, len(case["req_to_token"])
    case["req_to_token"][:, 10:30:6] = torch.tensor([-1, INT_MIN, 5000, INT_MAX], device=device)
    case["full_to_swa"][::5] = -1
    case["full_to_swa"][1::5] = 2**31
    case["full_to_swa"][2::5] = -(2**63)
    ids, *_ = check(case)
    assert ids[:48] == [-1] * 48 and ids[2 * 24 + 14 : 3 * 24] == [-1] * 10 and max(ids) >= 0


@pytest.mark.parametrize("rows, max_tokens, slots", [(0, 1100, 5000), (5, 0, 5000), (5, 1100, 0)])
def test_empty_tables_give_minus_one(rows, max_tokens, slots, device):
    case = make_case([30, 300], [5, 40], device=device)
    case["req_to_token"] = case["req_to_token"][:rows, :max_tokens]
    case["full_to_swa"] = case["full_to_swa"][:slots]
    ids, *_ = check(case)
    assert set(ids) == {-1}


def test_offsets_saturate(device):
    case = make_case([10, 10, 10, 10], [5, 5, 5, 5], device=device)
    for name in ("seq_lens", "extend_seq_lens"):
        case[name][1:] = INT_MAX
    _, _, gather_lens, offsets = check(case)
    assert gather_lens[1:] == [INT_MAX] * 3 and offsets == [0, 10, INT_MAX, INT_MAX, INT_MAX]


@pytest.mark.parametrize("seed", range(8))
def test_hostile_values_never_reach_outside_the_tables(seed, device):
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([INT_MIN, INT_MIN + 1, -129, -1, 0, 1, 5, 64, 4999, 5000, POISON, INT_MAX])

    def hostile(like):
        choice = torch.randint(len(values), like.shape, generator=generator)
        return values[choice].to(like)

    case = make_case([70, 300, 9, 130], [7, 20, 0, 6], window=37, device=device)
    for names in [INPUTS, INPUTS[:3], *([name] for name in INPUTS)]:
        check(case | {name: hostile(case[name]) for name in names})


@pytest.mark.usefixtures("several_threads")
def test_many_ids_on_several_threads(device):
    check(make_case([900, 2, 1100, 0, 1000], [700, 1, 900, 0, 1000], device=device))


def test_offsets_past_2_to_the_31(device):
    """Row 2 of req_to_token begins 2^31 elements in. Only the pages of these rows are ever touched."""
    case = make_case([300, 200], [40, 5], device=device)
    far = torch.empty(2**31 + 1024, dtype=torch.int32, device=device)
    table = far[:1024].as_strided((3, 300), (2**30, 1))
    table.copy_(case["req_to_token"][:3, :300])
    case["req_pool_indices"].copy_(torch.tensor([2, 1]))
    want = mla_fp8.build_swa_token_ids(**case)
    got = mla_fp8.build_swa_token_ids(**case | {"req_to_token": table})
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)) and (got[0] >= 0).any()


def test_opcheck_and_compile(device):
    case = make_case([7, 300, 1000], [7, 130, 5], device=device)
    args, kwargs = tuple(case[x] for x in INPUTS), {k: v for k, v in case.items() if k not in INPUTS}
    _, out = poisoned(case)
    torch.library.opcheck(torch.ops.mla_fp8.build_swa_token_ids.default, args, kwargs)
    torch.library.opcheck(torch.ops.mla_fp8.build_swa_token_ids_out.default, args, kwargs | out)

    def both(case, out):
        return mla_fp8.build_swa_token_ids(**case), mla_fp8.build_swa_token_ids(**case, **out)

    for got in torch.compile(both, fullgraph=True)(case, poisoned(case)[1]):
        for x, want in zip(got, mla_fp8.build_swa_token_ids(**case), strict=True):
            assert torch.equal(x, want)


def strided(t):
    return t.repeat_interleave(2)[::2]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("seq_lens", lambda t: t.long(), "seq_lens must have dtype torch.int32, got torch.int64"),
        ("seq_lens", lambda t: t[0], r"seq_lens must have shape \[\*\], got \[\]"),
        ("seq_lens", strided, "seq_lens must be contiguous"),
        (
            "extend_seq_lens",
            lambda t: t.long(),
            "extend_seq_lens must have dtype torch.int32, got torch.int64",
        ),
        ("extend_seq_lens", lambda t: t[1:], r"extend_seq_lens must have shape \[2\], got \[1\]"),
        ("extend_seq_lens", strided, "extend_seq_lens must be contiguous"),
        (
            "req_pool_indices",
            lambda t: t.short(),
            "req_pool_indices must have dtype torch.int64 or torch.int32, got torch.int16",
        ),
        ("req_pool_indices", lambda t: t[1:], r"req_pool_indices must have shape \[2\], got \[1\]"),
        ("req_pool_indices", strided, "req_pool_indices must be contiguous"),
        ("req_to_token", lambda t: t.long(), "req_to_token must have dtype torch.int32, got torch.int64"),
        ("req_to_token", lambda t: t[0], r"req_to_token must have shape \[\*, \*\], got \[1100\]"),
        ("req_to_token", lambda t: t[:, ::2], "req_to_token must have stride 1 in its last dimension, got 2"),
        ("full_to_swa", lambda t: t.int(), "full_to_swa must have dtype torch.int64, got torch.int32"),
        ("full_to_swa", lambda t: t[None], r"full_to_swa must have shape \[\*\], got \[1, 5000\]"),
        ("full_to_swa", lambda t: t[::2], "full_to_swa must be contiguous"),
        ("window_size", lambda n: 0, r"window_size must be in \[1, 2147483647\], got 0"),
        ("window_size", lambda n: 2**31, r"window_size must be in \[1, 2147483647\], got 2147483648"),
        ("capacity", lambda n: -1, r"capacity must be in \[0, 2147483647\], got -1"),
        ("capacity", lambda n: 2**31, r"capacity must be in \[0, 2147483647\], got 2147483648"),
        ("out_ids", lambda t: t.long(), "out_ids must have dtype torch.int32, got torch.int64"),
        ("out_ids", lambda t: t[1:], r"out_ids must have shape \[247\], got \[246\]"),
        ("out_ids", strided, "out_ids must be contiguous"),
        ("out_first_pos", lambda t: t.long(), "out_first_pos must have dtype torch.int32, got torch.int64"),
        ("out_first_pos", lambda t: t[1:], r"out_first_pos must have shape \[2\], got \[1\]"),
        ("out_first_pos", strided, "out_first_pos must be contiguous"),
        (
            "out_gather_lens",
            lambda t: t.long(),
            "out_gather_lens must have dtype torch.int32, got torch.int64",
        ),
        ("out_gather_lens", lambda t: t[1:], r"out_gather_lens must have shape \[2\], got \[1\]"),
        ("out_gather_lens", strided, "out_gather_lens must be contiguous"),
        ("out_offsets", lambda t: t.long(), "out_offsets must have dtype torch.int32, got torch.int64"),
        ("out_offsets", lambda t: t[1:], r"out_offsets must have shape \[3\], got \[2\]"),
        ("out_offsets", strided, "out_offsets must be contiguous"),
    ],
)
def test_errors_say_expected_and_got_and_nothing_is_written(name, change, message, device):
    case = make_case([96, 144], [3, 20], window=127, device=device)
    case["capacity"] = 247
    _, out = poisoned(case)
    arguments = case | out
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match="mla_fp8.build_swa_token_ids: " + message):
        mla_fp8.build_swa_token_ids(**arguments)
    assert all((x == POISON).all() for x in out.values())


def test_some_buffers_without_the_others_are_refused(device):
    case = make_case([96, 144], [3, 2], device=device)
    _, out = poisoned(case)
    del out["out_first_pos"]
    with pytest.raises(ValueError, match=r"build_swa_token_ids: expected all of .* got no out_first_pos"):
        mla_fp8.build_swa_token_ids(**case, **out)
    assert all((x == POISON).all() for x in out.values())
