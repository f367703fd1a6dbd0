"""Every variant of every attention kernel, by its name, over every layout that it reads.

The variants are those that the kernels are compiled from (tests/core/variants.csv is frozen to that table).
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import emulation
import pytest
import torch
from assertions import Results, assert_attention, assert_same
from row_cases import changed, compacted, row_case
from sparse_cases import V4_SCOPES, Case, Scope, case_over, filled_scope, make_case
from window_cases import make_entries_case, make_window_case

from mla_fp8 import KV_LAYOUTS, KVLayout

DEVICE = emulation.hopper()
pytestmark = pytest.mark.device(DEVICE is not None, "a Hopper GPU")


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """Of an emulated GPU: walks go through many queries even if there are few."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "2")


def many(count: int) -> int:
    """Queries enough for a GPU; a twentieth of them for an emulated one."""
    return count if DEVICE == "cuda" else count // 20


@dataclass(frozen=True)
class Variant:
    kernel: str
    schedule: str
    heads: int  # of a CTA
    producers: int
    layout: str  # "dsv41+dsv41_fp4": of two caches
    splits: int = 1

    def __str__(self) -> str:
        shape = f"{self.heads}h-{self.producers}p-{self.splits}s"
        return f"{self.kernel}-{self.schedule}-{shape}-{self.layout}"

    @property
    def first(self) -> KVLayout:
        return KV_LAYOUTS[self.layout.partition("+")[0]]

    def extra(self, given: dict | None) -> dict | None:
        """The second cache of a case; of another layout there always is one."""
        _, mixed, second = self.layout.partition("+")
        return (given or V4_SCOPES) | {"layout": KV_LAYOUTS[second]} if mixed else given

    @property
    def pairs(self) -> bool:
        """Two CTAs of 64 heads, which convert rows for each other."""
        return self.kernel == "bf16_tiles" and self.layout.startswith("dsv4")

    @property
    def some_heads(self) -> tuple[int, ...]:
        """Less than a CTA takes, and more: the last CTA then has 9. For an emulated GPU that is enough."""
        if self.pairs:
            return 65, 128
        more = min(self.heads + 9, 128)
        return (more,) if emulation.executes() and more > self.heads else (self.heads - 3, more)

    def options(self) -> dict:
        names = ("kernel", "schedule", "heads", "splits", "producers")
        return {name: getattr(self, name) for name in names}

    @property
    def finds_largest(self) -> bool:
        """The largest logits, which decode does not want."""
        return self.schedule not in ("segments", "runs")

    def run(self, case: Case, **changes) -> Results:
        options = {"max_logits": self.finds_largest} | self.options() | changes
        out, max_logits, lse = case.run_by(**options)
        return (out, max_logits, lse) if options["max_logits"] else (out, lse)


TILES_ALONE = 48  # heads of a CTA that takes tiles of queries alone: below, and in test_shared_keys.py
SPLITS = {"split": (1, 3, 16), "walk": (1,), "segments": (1, 8), "parts": (1, 3, 8), "runs": (1, 3, 8)}
ALONE = ("split", "segments")  # schedules in which many_heads has one CTA a query


def variants() -> list[Variant]:
    path = Path(__file__).parents[1] / "core/variants.csv"
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            splits = () if int(row["heads"]) == TILES_ALONE else SPLITS[row["schedule"]]
            if row["kernel"] == "many_heads" and row["schedule"] in ALONE:
                splits = splits[:1]
            found += [
                Variant(
                    row["kernel"], row["schedule"], int(row["heads"]), int(row["producers"]), layout, split
                )
                for layout in row["layouts"].split()
                for split in splits
            ]
    return found


every_variant = pytest.mark.parametrize("variant", variants(), ids=str)
UNSPLIT = [v for v in variants() if v.splits == 1]
SEGMENTS = [v for v in UNSPLIT if v.schedule == "segments"]
unsplit_variants = pytest.mark.parametrize("variant", UNSPLIT, ids=str)


def some_tokens(case: Case) -> torch.Tensor:
    """The first eight, which are the odd ones, and some others."""
    count = len(case.q)
    return torch.cat([torch.arange(min(8, count)), torch.randint(count, (16,))]).to(DEVICE)


@every_variant
@pytest.mark.parametrize("extra", [None, V4_SCOPES], ids=["one cache", "two caches"])
@pytest.mark.parametrize("num_tokens", [1, 9, many(700)])
def test_every_variant(variant, num_tokens, extra):
    """One query, and more than the CTAs of a walk have at once."""
    for heads in variant.some_heads:
        shape = {"num_tokens": num_tokens, "num_q_heads": heads, "topk": 333, "num_slots": 2000}
        case = make_case(variant.first, DEVICE, **shape, extra=variant.extra(extra))
        results = variant.run(case)
        assert all(not t.isnan().any() for t in results)
        some = some_tokens(case)
        assert_attention(case, results, some)
        for _ in emulation.runs(2)[1:]:
            assert_same(variant.run(case), results)
        out, *max_logits, lse = variant.run(case, max_logits=False)
        assert torch.equal(out, results[0]) and torch.equal(lse, results[-1])
        assert all(x.numel() == 0 for x in max_logits)


@every_variant
def test_long_rows(variant):
    """Every stage of a ring is filled many times, and every CTA of a query has keys."""
    heads = variant.some_heads[0]
    shape = {"num_tokens": 5, "num_q_heads": heads, "topk": 5000, "num_slots": 9000}
    case = make_case(variant.first, DEVICE, **shape, extra=variant.extra(None))
    results = variant.run(case)
    assert_attention(case, results)
    for _ in range(3):
        assert_same(variant.run(case), results)


@unsplit_variants
def test_rows_of_every_kind(variant):
    """Full next to empty, holes, repeats. Invalid keys are left out: a row has the bits of one without."""
    heads = variant.some_heads[-1]
    second = (variant.extra({}) or {}).get("layout")
    shape = {"num_tokens": max(many(330), 44), "num_q_heads": heads, "extra_topk": 70}
    case = row_case(variant.first, DEVICE, **shape, extra_layout=second)
    results = variant.run(case)
    assert all(not t.isnan().any() for t in results)
    some = torch.arange(44).to(DEVICE)
    assert_attention(case, results, some)
    if not variant.pairs:
        assert_same(variant.run(changed(case, compacted)), results)


@unsplit_variants
def test_holes_of_any_density(variant):
    """Blocks of a row without holes end anywhere in it; the last row has no key."""
    if variant.pairs:
        pytest.skip("keeps invalid keys in their places")
    shape = {"num_tokens": 6, "num_q_heads": variant.some_heads[0], "topk": 777, "num_slots": 2000}
    case = make_case(variant.first, DEVICE, **shape, extra=variant.extra(None))
    share = torch.tensor([0.98, 0.9, 0.5, 0.1, 0.02, 0])[:, None]

    def with_holes(scope: Scope) -> Scope:
        kept = torch.rand(scope.indices.shape) < share
        return replace(scope, indices=scope.indices.where(kept.to(DEVICE), -1))

    case = changed(case, with_holes)
    results = variant.run(case)
    assert_attention(case, results)
    assert_same(variant.run(changed(case, compacted)), results)


@pytest.mark.parametrize("lengths", [None, "of one cache", "of all"])
@pytest.mark.parametrize("extra", [None, {"topk": 160}], ids=["alone", "and a cache"])
@pytest.mark.parametrize("variant", [v for v in variants() if v.splits in (3, 8)], ids=str)
def test_rows_that_are_nearly_full(variant, extra, lengths):
    """Producers may fetch their first rows before the keys are surveyed, as if all were valid."""
    num_slots = 1024

    def without_length(scope: Scope) -> Scope:
        if scope.length is None:
            return scope
        counts = torch.arange(scope.indices.shape[1], device=DEVICE) < scope.length[:, None]
        return replace(scope, indices=scope.indices.where(counts, -1), length=None)

    def scope(layout: str, topk: int, has_lengths: bool) -> Scope:
        holes = [0, 3, 20, topk // 2 - 1, topk - 17, topk - 16, topk - 1]
        counts = [0, 1, 15, 16, 17, 31, 32, 33, topk // 4 - 1, topk // 4, topk // 2 + 1, topk - 1, topk]
        indices = torch.stack([torch.randperm(num_slots)[:topk] for _ in range(34)]).int()
        for row, hole in enumerate(holes):
            indices[row, hole] = num_slots if row % 2 else -1
        prefixes = indices[len(holes) :]
        for row, count in enumerate(counts):
            prefixes[row, count:] = -1
        prefixes[8, 5] = prefixes[9, topk // 4 - 2] = prefixes[10, topk // 2] = -1
        for row, count in enumerate([40, topk // 2, topk - 1]):  # without a hole
            prefixes[len(counts) + row, count:] = -1
        indices[-2] = indices[-2, 0]
        indices[-3, 8] = indices[-3, 0]
        indices[-4, 7 : topk - 8 : 16] = indices[-4, 15:topk:16]
        indices[-5, : topk // 2] = -1
        length = torch.full((len(indices),), topk).int()
        length[::3] = topk // 2
        return filled_scope(
            KV_LAYOUTS[layout], DEVICE, indices.to(DEVICE), length.to(DEVICE) if has_lengths else None,
            num_slots // 64, 64,
        )  # fmt: skip

    first, _, second = variant.layout.partition("+")
    scopes = [scope(first, 460, lengths == "of all")]
    if second or extra:
        scopes.append(scope(second or first, 160, lengths is not None))
    elif lengths == "of one cache":
        pytest.skip("one cache")
    case = case_over(scopes, variant.some_heads[0])
    results = variant.run(case, max_logits=False)
    assert_attention(case, results)
    in_front = changed(changed(case, without_length), compacted)
    assert_same(variant.run(in_front, max_logits=False), results)


@pytest.mark.parametrize("variant", [v for v in UNSPLIT if v.finds_largest], ids=str)
@pytest.mark.parametrize("window_size", [33, 128, 200])
@pytest.mark.parametrize("extra", [None, V4_SCOPES | {"topk": 40}], ids=["alone", "and a cache"])
def test_windows(variant, window_size, extra):
    queries = [many(150), 1, 0, many(200)]
    lengths = {"query_lens": queries, "seq_lens": [400, 90, 30, queries[3]], "window_size": window_size}
    heads = variant.some_heads[-1]
    window = make_window_case(variant.first, DEVICE, **lengths, num_q_heads=heads, extra=variant.extra(extra))
    results = torch.ops.mla_fp8._sparse_attention_window(
        *window.arguments(), **window.op_options(), **variant.options()
    )
    assert all(not t.isnan().any() for t in results)
    count = sum(queries)
    some = torch.cat([torch.arange(min(24, count)), torch.arange(max(count - 11, 0), count)]).to(DEVICE)
    assert_attention(window.case, results, some)


@pytest.mark.parametrize(
    "num_q_heads, drafts, rows",
    [
        (8, [3] * 4, 32), (5, [1] * 4, 32), (16, [3] * 4, 48), (32, [2] * 4, 64), (128, [1] * 4, 64),
        (8, [8, 8, 7, 0, 2, 5], 64),
    ],
)  # fmt: skip
def test_ctas_share_the_keys_of_all_tiles(num_q_heads, drafts, rows, monkeypatch):
    """Requests with hundreds of keys, with a few, and of fewer tokens than queries; some end within tiles."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper")
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "13")
    query_lens, seq_lens = drafts, [900, 40, 2, 400, 3, 7][: len(drafts)]
    case = make_entries_case(
        KV_LAYOUTS["dsv4"], DEVICE, query_lens=query_lens, seq_lens=seq_lens, ratio=1,
        num_q_heads=num_q_heads, window_size=100, padding=0,
    )  # fmt: skip
    options = case.op_options() | {"kernel": "many_heads", "schedule": "split", "heads": rows, "splits": 0}

    def attend():
        return torch.ops.mla_fp8._sparse_attention_window(*case.arguments(), **options)

    results = attend()
    assert_attention(case.case, results)
    assert_same(attend(), results)


@unsplit_variants
def test_a_query_does_not_depend_on_its_place_or_its_neighbours(variant):
    heads = variant.some_heads[0]
    count = many(600)
    case = make_case(
        variant.first, DEVICE, num_tokens=count, num_q_heads=heads, extra=variant.extra(V4_SCOPES)
    )
    whole = variant.run(case)
    order = torch.randperm(count, device=DEVICE)
    order[count // 2 :] = order[0]
    assert_same(variant.run(case.tokens(order)), tuple(t[order] for t in whole))


@unsplit_variants
def test_heads_of_a_variant_keep_their_bits_next_to_padding(variant):
    heads = variant.some_heads[0]
    count = many(200)
    case = make_case(
        variant.first, DEVICE, num_tokens=count, num_q_heads=heads, extra=variant.extra(V4_SCOPES)
    )
    padded = 128 if variant.pairs else variant.heads
    q = case.q.new_zeros(count, padded, case.q.shape[2])
    q[:, :heads] = case.q
    sink = torch.full((padded,), -float("inf"), device=DEVICE)
    sink[:heads] = case.attn_sink
    wide = variant.run(replace(case, q=q, attn_sink=sink))
    assert_same(tuple(t[:, :heads] for t in wide), variant.run(case))


@pytest.mark.parametrize("variant", SEGMENTS, ids=str)
def test_segments_have_the_same_bits_whoever_takes_them(variant):
    """Of rows from empty to full, with holes; with bases far apart, and where Q is no number. CTAs of
    many_heads may take any number of the heads, too, or leave runs to a second grid."""
    if variant.kernel == "many_heads":
        shares = [replace(variant, heads=heads) for heads in (32, 64) if heads != variant.heads]
        runs = replace(variant, schedule="runs")
        shares += [replace(runs, heads=heads, splits=n) for heads in (32, 64) for n in (1, 3, 8)]
    else:
        shares = [replace(variant, splits=n) for n in (2, 4, 8)]
    shape = {"num_tokens": 10, "num_q_heads": variant.some_heads[0], "topk": 2100, "num_slots": 4000}
    case = make_case(variant.first, DEVICE, **shape)
    lengths = torch.tensor([2100, 2100, 0, 1, 63, 65, 400, 1300, 1999, 2100], dtype=torch.int32)
    kept = torch.rand(10, 2100) < torch.linspace(0.3, 2.0, 10)[:, None]

    def of_some_lengths(scope: Scope) -> Scope:
        length = torch.minimum(scope.length, lengths.to(DEVICE))  # what lies behind the old ones holds NaN
        return replace(scope, indices=scope.indices.where(kept.to(DEVICE), -1), length=length)

    case = changed(case, of_some_lengths)
    case.q[1] *= 30
    case.q[7] *= 30
    results = variant.run(case)
    assert_attention(case, results)
    for other in shares:
        assert_same(other.run(case), results)
    case.q[5, :, -1] = float("nan")
    case.q[9, 1:] = float("inf")
    results = variant.run(case)
    for other in shares:
        assert_same(other.run(case), results)
    with pytest.raises(RuntimeError, match="kernel must be one of"):
        case.run_by(**variant.options())  # with the largest logits
    with pytest.raises(RuntimeError, match="kernel must be one of"):
        replace(variant, splits=3).run(case)


def test_what_no_kernel_runs_is_refused():
    case = make_case(KV_LAYOUTS["bf16"], DEVICE)
    with pytest.raises(RuntimeError, match=r"must be one of .* reads bf16 with 16 heads"):
        case.run_by("many_heads", schedule="split", heads=64, splits=1)


@pytest.mark.parametrize("room", [None, 0.5, 1, 2])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decode_does_without_parts_where_they_have_no_room(room, batch_invariant, monkeypatch):
    """Few queries of many heads: the op's own workspace, none, one that is too small, enough, more. One CTA a
    query has the bits of runs."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "6")
    if DEVICE == "cuda" and torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("a plan for 132 SMs")
    tokens, heads, topk, parts = (8, 128, 2048, 4) if DEVICE == "cuda" else (1, 64, 768, 3)
    shape = {"num_tokens": tokens, "num_q_heads": heads, "topk": topk, "num_slots": 4000}
    case = make_case(KV_LAYOUTS["dsv32"], DEVICE, **shape)
    runs = 6 if DEVICE == "cuda" else 3
    floats = tokens * heads * (runs * 514 if batch_invariant else parts * 275)
    options = case.op_options() | {"batch_invariant": batch_invariant}
    workspace = torch.full((int((room or 1) * floats),), float("nan"), device=DEVICE)
    out = torch.full((tokens, heads, 512), float("nan"), device=DEVICE).bfloat16()
    lse = torch.full((tokens, heads), float("nan"), device=DEVICE)
    torch.ops.mla_fp8.sparse_decode_out(
        *case.arguments(), **options, out=out, lse=lse, workspace=workspace if room else None
    )
    assert_attention(case, (out, lse))
    has_room = room is not None and room >= 1
    assert workspace.isnan().all() != has_room
    assert workspace[floats:].isnan().all()
    if has_room or batch_invariant:
        assert_same(torch.ops.mla_fp8.sparse_decode(*case.arguments(), **options), (out, lse))


MEETING = [replace(v, splits=3) for v in UNSPLIT if v.schedule in ("parts", "runs")]


@pytest.mark.parametrize("variant", MEETING, ids=str)
def test_parts_of_any_size(variant):
    """Heads far apart in size, queries whose keys all lie in one part or in none, and infinities."""
    shape = {"num_tokens": 6, "num_q_heads": variant.some_heads[0], "topk": 500, "num_slots": 2000}
    case = make_case(variant.first, DEVICE, **shape, extra=variant.extra(None))
    case.q.mul_(2.0 ** torch.linspace(-20, 6, case.q.shape[1], device=DEVICE)[:, None])
    lengths = torch.tensor([500, 1, 64, 65, 0, 129], dtype=torch.int32, device=DEVICE)
    case = changed(case, lambda scope: replace(scope, length=torch.minimum(scope.length, lengths)))
    results = variant.run(case)
    assert_attention(case, results)
    case.q[0, 1] = float("inf")
    assert not variant.run(case)[0][0, 1].isfinite().any()
    assert_same(tuple(x[1:] for x in variant.run(case)), tuple(x[1:] for x in results))
