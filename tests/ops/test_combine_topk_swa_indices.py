import itertools

import pytest
import torch

import mla_fp8
from mla_fp8 import reference

POISON = 1 << 30
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SEQS = [([96, 144], [3, 2]), ([7, 300, 1000], [7, 130, 5]), ([1], [1]), ([50, 0, 9, 9], [0, 0, 9, 0])]
INPUTS = ("topk_indices", "query_start_loc", "seq_lens", "gather_lens", "compressed_base", "swa_base")
OP, RAGGED_OP = "combine_topk_swa_indices", "combine_topk_swa_indices_ragged"


def make_case(
    seq_lens, query_lens, *, device, ratio=4, topk=192, window=128, extra_columns=5, first=0, tail_rows=0
):
    """The arguments by name. Entries that are not to be read are POISON, some of the others are holes."""

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_tokens = sum(query_lens) + tail_rows
    entries = torch.full((num_tokens, topk + extra_columns), POISON, dtype=torch.int32, device=device)
    ends = list(itertools.accumulate(query_lens, initial=0))
    for r, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for t in range(ends[r], ends[r + 1]):
            known = min((seq_len - query_len + t - ends[r] + 1) // ratio, topk)
            entries[t, :known] = torch.randint(0, max(seq_len // ratio, 1), (known,), device=device).int()
    entries[:, 2:topk:7] = -1
    gather_lens = [min(s, q + window - 1) for s, q in zip(seq_lens, query_lens, strict=True)]
    tensors = (entries, ints([first + e for e in ends]), ints(seq_lens), ints(gather_lens))
    bases = (
        ints([1000 * r + 17 for r in range(len(seq_lens))]),
        ints([50_000 + 999 * r for r in range(len(seq_lens))]),
    )
    options = {"window_size": window, "compress_ratio": ratio, "topk": topk}
    return dict(zip(INPUTS, (*tensors, *bases), strict=True)) | options


def row_rule(case, token, request):
    """The row of `token` as one of `request`, said column by column."""
    scalar = {name: int(case[name][request]) for name in INPUTS[2:]}
    end = int(case["query_start_loc"][request + 1]) - int(case["query_start_loc"][0])
    pos = scalar["seq_lens"] - (end - token)
    if case.get("query_pos") is not None:
        pos = int(case["query_pos"][token])
    if pos < 0 or pos >= scalar["seq_lens"]:
        return []
    row = []
    for column in range(min((pos + 1) // case["compress_ratio"], case["topk"])):
        entry = int(case["topk_indices"][token, column])
        hole = entry < 0
        if case.get("compressed_lens") is not None:
            hole |= entry >= int(case["compressed_lens"][request])
        row.append(-1 if hole else scalar["compressed_base"] + entry)
    for other in range(pos - case["window_size"] + 1, pos + 1):
        gathered = other - (scalar["seq_lens"] - scalar["gather_lens"])
        if other >= 0 and gathered >= 0:
            row.append(scalar["swa_base"] + gathered)
    return [x if 0 <= x <= INT_MAX else -1 for x in row]


def possible_rows(case, token):
    """Its row, if query_start_loc does not decrease."""
    begin = [int(x) - int(case["query_start_loc"][0]) for x in case["query_start_loc"]]
    holders = [r for r in range(len(begin) - 1) if begin[r] <= token < begin[r + 1]]
    return [row_rule(case, token, r) for r in holders] or [[]]


def width_of(case):
    return -(-(case["topk"] + case["window_size"]) // 128) * 128


def poisoned(case):
    """Output buffers inside of larger ones, which come too."""
    num_tokens, width = len(case["topk_indices"]), width_of(case)
    device = case["topk_indices"].device
    around = torch.full((num_tokens + 2, width + 64), POISON, dtype=torch.int32, device=device)
    around_lens = torch.full((num_tokens + 2,), POISON, dtype=torch.int32, device=device)
    return around, around_lens, {"out_indices": around[1:-1, 32:-32], "out_lens": around_lens[1:-1]}


def poisoned_ragged(case):
    num_tokens, device = len(case["topk_indices"]), case["topk_indices"].device
    capacity = num_tokens * (case["topk"] + case["window_size"])
    around = torch.full((capacity + 64,), POISON, dtype=torch.int32, device=device)
    around_indptr = torch.full((num_tokens + 3,), POISON, dtype=torch.int32, device=device)
    return around, around_indptr, {"out_indptr": around_indptr[1:-1], "out_indices": around[32:-32]}


def check(case):
    """Both forms of both ops against the rule, entry by entry; nothing around the buffers is touched."""
    around, around_lens, out = poisoned(case)
    indices, lens = mla_fp8.combine_topk_swa_indices(**case, **out)
    again = mla_fp8.combine_topk_swa_indices(**case)
    assert torch.equal(again[0], indices) and torch.equal(again[1], lens)
    ragged_around, around_indptr, ragged_out = poisoned_ragged(case)
    ragged = mla_fp8.combine_topk_swa_indices_ragged(**case, **ragged_out)
    again = mla_fp8.combine_topk_swa_indices_ragged(**case)
    assert torch.equal(again[0], ragged[0]) and torch.equal(again[1], ragged[1])

    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    got_rows, got_lens = indices.tolist(), lens.tolist()
    rows = []
    for t, got in enumerate(got_rows):
        candidates = possible_rows(on_cpu, t)
        padded = [row + [-1] * (width_of(case) - len(row)) for row in candidates]
        assert got in padded
        rows.append(candidates[padded.index(got)])
        assert got_lens[t] in {len(row) for row in candidates if padded[candidates.index(row)] == got}
    kept = [[x for x in row if x >= 0] for row in rows]
    assert ragged[0].tolist() == list(itertools.accumulate(map(len, kept), initial=0))
    flat = list(itertools.chain(*kept))
    assert ragged[1].tolist() == flat + [-1] * (len(ragged[1]) - len(flat))

    out["out_indices"].fill_(POISON)
    out["out_lens"].fill_(POISON)
    ragged_out["out_indptr"].fill_(POISON)
    ragged_out["out_indices"].fill_(POISON)
    for x in (around, around_lens, ragged_around, around_indptr):
        assert (x == POISON).all()
    return got_rows, got_lens


@pytest.mark.parametrize("seq_lens, query_lens", SEQS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("topk, window", [(192, 128), (512, 100), (3, 1), (0, 128), (17, 0), (0, 0)])
def test_rows_match_the_rule_and_the_reference(seq_lens, query_lens, ratio, topk, window, device):
    case = make_case(seq_lens, query_lens, ratio=ratio, topk=topk, window=window, device=device)
    rows, lens = check(case)
    indices, want_lens = reference.combine_topk_swa_indices(**case)
    assert indices.tolist() == rows and want_lens.tolist() == lens
    ragged = reference.without_holes(indices, capacity=len(lens) * (topk + window))
    for got, want in zip(mla_fp8.combine_topk_swa_indices_ragged(**case), ragged, strict=True):
        assert torch.equal(got, want)


def test_example_worked_out_by_hand(device):
    """Request 0 has positions 8, 9 of 10 and 6 gathered tokens, request 1 all of its 2; ratio 4, window 3."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    entries = ints([1, 0, 9], [-1, 1, 9], [0, 0, 9], [0, 0, 9])
    inputs = (entries, ints(10, 12, 14), ints(10, 2), ints(6, 2), ints(100, 200), ints(300, 400))
    options = {"window_size": 3, "compress_ratio": 4, "topk": 3}
    indices, lens = mla_fp8.combine_topk_swa_indices(*inputs, **options)
    assert indices.shape == (4, 128) and (indices[:, 5:] == -1).all()
    assert indices[:, :5].tolist() == [
        [101, 100, 302, 303, 304],
        [-1, 101, 303, 304, 305],
        [400, -1, -1, -1, -1],
        [400, 401, -1, -1, -1],
    ]
    assert lens.tolist() == [5, 5, 1, 2]
    indptr, flat = mla_fp8.combine_topk_swa_indices_ragged(*inputs, **options)
    assert indptr.tolist() == [0, 5, 9, 10, 12] and flat.shape == (24,)
    assert flat[:12].tolist() == [101, 100, 302, 303, 304, 101, 303, 304, 305, 400, 400, 401]


@pytest.mark.parametrize("hole", [-1, -7, INT_MIN])
def test_holes_become_minus_one_in_their_column_and_count(hole, device):
    case = make_case([400], [4], topk=64, device=device)
    case["topk_indices"][:, :64] = torch.tensor([3, hole], device=device).repeat(32)
    rows, lens = check(case)
    assert lens == [64 + 128] * 4
    for row in rows:
        assert row[:64] == [17 + 3, -1] * 32


def test_query_start_loc_may_start_anywhere(device):
    plain = check(make_case(*SEQS[1], device=device, topk=0))
    for first in (10, -5, INT_MAX - 142, INT_MIN):
        assert check(make_case(*SEQS[1], device=device, topk=0, first=first)) == plain


def test_rows_of_no_request_are_empty(device):
    rows, lens = check(make_case([96, 144], [3, 2], tail_rows=4, device=device))
    assert lens[5:] == [0] * 4 and all(set(row) == {-1} for row in rows[5:])
    rows, lens = check(make_case([], [], tail_rows=3, device=device))
    assert lens == [0] * 3 and all(set(row) == {-1} for row in rows)


@pytest.mark.parametrize("seq_lens, query_lens", [([], []), ([5, 9], [0, 0])])
def test_no_tokens(seq_lens, query_lens, device):
    rows, lens = check(make_case(seq_lens, query_lens, device=device))
    assert rows == [] and lens == []


def test_positions_may_be_given_and_those_outside_the_request_are_empty(device):
    case = make_case([300, 40], [6, 3], topk=8, device=device)
    positions = [299, 0, 150, 300, -1, INT_MIN, INT_MAX, 39, 40]
    case["query_pos"] = torch.tensor(positions, dtype=torch.int32, device=device)
    case["topk_indices"][:, :8] = 1
    _, lens = check(case)
    # 300 - 133 = 167 is the first gathered position, and 150 is before it.
    assert lens == [8 + 128, 0, 8, 0, 0, 0, 0, 8 + 40, 0]


def test_entries_past_the_compressed_length_are_holes(device):
    case = make_case([400, 400, 400], [3, 3, 3], topk=64, device=device)
    case["compressed_lens"] = torch.tensor([50, 0, INT_MIN], dtype=torch.int32, device=device)
    case["topk_indices"][0, :3] = torch.tensor([49, 50, 51], device=device)
    rows, lens = check(case)
    assert rows[0][:3] == [49 + 17, -1, -1] and lens == [64 + 128] * 9
    assert all(set(row[:64]) == {-1} for row in rows[3:])


def test_rows_past_int32_become_holes(device):
    case = make_case([400, 400], [2, 2], topk=16, device=device)
    case["topk_indices"][:, :16] = torch.arange(16, device=device)
    case["compressed_base"][:] = torch.tensor([INT_MAX - 7, -3], device=device)
    case["swa_base"][:] = torch.tensor([INT_MAX - 100, -20], device=device)
    rows, lens = check(case)
    assert lens == [16 + 128] * 4
    assert rows[0][:16] == [INT_MAX - 7 + i for i in range(8)] + [-1] * 8
    assert rows[0][16:] == [INT_MAX - 100 + i for i in range(101)] + [-1] * 139
    assert rows[2][:16] == [-1] * 3 + list(range(13))
    assert rows[2][16:144] == [-1] * 20 + list(range(108))


@pytest.mark.parametrize("gather_len", [0, -1, 5, 301, INT_MIN, INT_MAX])
def test_window_stays_within_the_gathered_rows(gather_len, device):
    case = make_case([300], [10], topk=0, device=device)
    case["gather_lens"][:] = gather_len
    rows, _ = check(case)
    gathered = range(50_000, 50_000 + max(gather_len, 0))
    assert all(x == -1 or x in gathered for row in rows for x in row)


@pytest.mark.parametrize("seed", range(8))
def test_hostile_values_never_reach_another_request_or_outside_the_buffers(seed, device):
    """query_start_loc that decreases included: a row is then that of some request whose range holds it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([INT_MIN, INT_MIN + 1, -129, -1, 0, 1, 5, 64, 300, POISON, INT_MAX - 1, INT_MAX])

    def hostile(like):
        choice = torch.randint(len(values), like.shape, generator=generator)
        return values[choice].to(like)

    case = make_case([70, 300, 9, 130], [7, 20, 0, 6], topk=20, window=37, tail_rows=3, device=device)
    case["query_pos"] = case["topk_indices"][:, 0].clone() if seed % 2 else None
    case["compressed_lens"] = case["seq_lens"].clone() if seed % 3 else None
    check({k: hostile(v) if isinstance(v, torch.Tensor) else v for k, v in case.items()})
    for name in INPUTS:  # one at a time: the others let it matter
        check(case | {name: hostile(case[name])})


@pytest.mark.usefixtures("several_threads")
def test_many_tokens_on_several_threads(device):
    """Enough rows to be split, requests that cross the splits."""
    lens = [3, 0, 700, 1, 1, 0, 640, 255]
    case = make_case([x + 50 for x in lens], lens, topk=12, window=20, ratio=8, device=device)
    check(case)


def test_offsets_past_2_to_the_31(device):
    """Row 2 of each tensor begins 2^31 elements in. Only the pages of these rows are ever touched."""
    case = make_case([300], [3], topk=192, extra_columns=0, device=device)
    far = torch.empty(2**31 + 1024, dtype=torch.int32, device=device)
    entries = far[:1024].as_strided((3, 192), (2**30, 1))
    entries.copy_(case["topk_indices"])
    want = mla_fp8.combine_topk_swa_indices(**case)
    out = far[:1024].as_strided((3, 384), (2**30, 1), 512)
    got = mla_fp8.combine_topk_swa_indices(
        **case | {"topk_indices": entries}, out_indices=out, out_lens=torch.zeros_like(want[1])
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", [OP, RAGGED_OP])
def test_opcheck(name, optional, device):
    case = make_case([96, 144], [3, 2], topk=16, device=device)
    if optional:
        case["query_pos"] = torch.arange(5, dtype=torch.int32, device=device)
        case["compressed_lens"] = case["seq_lens"] // 4
    args, kwargs = tuple(case[x] for x in INPUTS), {k: v for k, v in case.items() if k not in INPUTS}
    *_, out = (poisoned if name == OP else poisoned_ragged)(case)
    torch.library.opcheck(getattr(torch.ops.mla_fp8, name).default, args, kwargs)
    torch.library.opcheck(getattr(torch.ops.mla_fp8, name + "_out").default, args, kwargs | out)


@pytest.mark.parametrize("name", [OP, RAGGED_OP])
def test_compiles_as_one_graph(name, device):
    case = make_case([96, 144], [3, 2], topk=16, device=device)
    *_, out = (poisoned if name == OP else poisoned_ragged)(case)
    op = getattr(mla_fp8, name)
    compiled = torch.compile(lambda case, out: (op(**case), op(**case, **out)), fullgraph=True)
    for got in compiled(case, out):
        for x, want in zip(got, op(**case), strict=True):
            assert torch.equal(x, want)


def strided(t):
    return t.repeat_interleave(2)[::2]


INPUT_ERRORS = [
    ("topk_indices", lambda t: t.long(), "topk_indices must have dtype torch.int32, got torch.int64"),
    ("topk_indices", lambda t: t[0], r"topk_indices must have shape \[\*, \*\], got \[21\]"),
    ("topk_indices", lambda t: t.repeat(1, 2)[:, ::2], "topk_indices must have stride 1 in its last dim"),
    ("topk_indices", lambda t: t[:, :15], "topk_indices must have at least topk = 16 columns, got 15"),
    ("query_start_loc", lambda t: t.long(), "query_start_loc must have dtype torch.int32, got torch.int64"),
    ("query_start_loc", lambda t: t[1:], r"query_start_loc must have shape \[3\], got \[2\]"),
    ("query_start_loc", strided, "query_start_loc must be contiguous"),
    ("seq_lens", lambda t: t.long(), "seq_lens must have dtype torch.int32, got torch.int64"),
    ("seq_lens", lambda t: t[:, None], r"seq_lens must have shape \[\*\], got \[2, 1\]"),
    ("seq_lens", strided, "seq_lens must be contiguous"),
    ("gather_lens", lambda t: t.short(), "gather_lens must have dtype torch.int32, got torch.int16"),
    ("gather_lens", lambda t: t[1:], r"gather_lens must have shape \[2\], got \[1\]"),
    ("gather_lens", strided, "gather_lens must be contiguous"),
    ("compressed_base", lambda t: t.long(), "compressed_base must have dtype torch.int32, got torch.int64"),
    ("compressed_base", lambda t: t[1:], r"compressed_base must have shape \[2\], got \[1\]"),
    ("compressed_base", strided, "compressed_base must be contiguous"),
    ("swa_base", lambda t: t.long(), "swa_base must have dtype torch.int32, got torch.int64"),
    ("swa_base", lambda t: t[1:], r"swa_base must have shape \[2\], got \[1\]"),
    ("swa_base", strided, "swa_base must be contiguous"),
    ("query_pos", lambda t: t.long(), "query_pos must have dtype torch.int32, got torch.int64"),
    ("query_pos", lambda t: t[1:], r"query_pos must have shape \[5\], got \[4\]"),
    ("query_pos", strided, "query_pos must be contiguous"),
    (
        "compressed_lens",
        lambda t: t.float(),
        "compressed_lens must have dtype torch.int32, got torch.float32",
    ),
    ("compressed_lens", lambda t: t[1:], r"compressed_lens must have shape \[2\], got \[1\]"),
    ("compressed_lens", strided, "compressed_lens must be contiguous"),
    ("window_size", lambda n: -1, "window_size must be at least 0, got -1"),
    (
        "window_size",
        lambda n: 2**31,
        r"topk \+ window_size must be at most 2147483519, got 16 \+ 2147483648",
    ),
    ("compress_ratio", lambda n: 0, "compress_ratio must be at least 1, got 0"),
    ("topk", lambda n: -1, "topk must be at least 0, got -1"),
    ("topk", lambda n: 22, "topk_indices must have at least topk = 22 columns, got 21"),
]
OUT_ERRORS = [
    ("out_indices", lambda t: t.long(), "out_indices must have dtype torch.int32, got torch.int64"),
    ("out_indices", lambda t: t[1:], r"out_indices must have shape \[5, 256\], got \[4, 256\]"),
    ("out_indices", lambda t: t.mT.contiguous().mT, "out_indices must have stride 1 in its last dimension"),
    (
        "out_indices",
        lambda t: t[:1].expand(5, -1),
        "out_indices must not overlap itself, got stride 0",
    ),
    ("out_lens", lambda t: t.long(), "out_lens must have dtype torch.int32, got torch.int64"),
    ("out_lens", lambda t: t[1:], r"out_lens must have shape \[5\], got \[4\]"),
    ("out_lens", strided, "out_lens must be contiguous"),
]
RAGGED_OUT_ERRORS = [
    ("out_indptr", lambda t: t.long(), "out_indptr must have dtype torch.int32, got torch.int64"),
    ("out_indptr", lambda t: t[1:], r"out_indptr must have shape \[6\], got \[5\]"),
    ("out_indptr", strided, "out_indptr must be contiguous"),
    ("out_indices", lambda t: t.long(), "out_indices must have dtype torch.int32, got torch.int64"),
    ("out_indices", lambda t: t[1:], r"out_indices must have shape \[720\], got \[719\]"),
    ("out_indices", strided, "out_indices must be contiguous"),
]


@pytest.mark.parametrize(
    "op, name, change, message",
    [(OP, *row) for row in INPUT_ERRORS + OUT_ERRORS]
    + [(RAGGED_OP, *row) for row in INPUT_ERRORS + RAGGED_OUT_ERRORS],
)
def test_errors_say_expected_and_got_and_nothing_is_written(op, name, change, message, device):
    case = make_case([96, 144], [3, 2], topk=16, device=device)
    case["query_pos"] = torch.arange(5, dtype=torch.int32, device=device)
    case["compressed_lens"] = case["seq_lens"] // 4
    *_, out = (poisoned if op == OP else poisoned_ragged)(case)
    arguments = case | out
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=f"mla_fp8.{op}: {message}"):
        getattr(mla_fp8, op)(**arguments)
    assert all((x == POISON).all() for x in out.values())


def test_ragged_result_has_to_fit_its_int32_indptr(device):
    case = make_case([96], [3], topk=0, device=device) | {"window_size": 2**31 - 300}
    with pytest.raises(RuntimeError, match=r"topk_indices must have at most 1 rows, as indptr .* got 3"):
        mla_fp8.combine_topk_swa_indices_ragged(**case)


@pytest.mark.parametrize("op, name", [(OP, "out_indices"), (OP, "out_lens"), (RAGGED_OP, "out_indptr")])
def test_one_buffer_without_the_other_is_refused(op, name, device):
    case = make_case([96, 144], [3, 2], topk=16, device=device)
    *_, out = (poisoned if op == OP else poisoned_ragged)(case)
    with pytest.raises(ValueError, match=f"{op}: expected all of .* or none, got no "):
        getattr(mla_fp8, op)(**case, **{name: out[name]})
    assert (out[name] == POISON).all()
