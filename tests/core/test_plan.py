"""Which kernel runs which shapes (csrc/cuda/sparse_attention/plan.h), without a GPU.

plans.csv and variants.csv are frozen. After a deliberate change of the policy:
python tests/core/test_plan.py
"""

import csv
import re
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

if __name__ == "__main__":
    import conftest  # noqa: F401

import _mla_fp8_core as core

from mla_fp8.prefill import plans as asked

HERE = Path(__file__).parent
LAYOUTS = [layout.name for layout in core.KV_LAYOUTS]
FIRST = [i for i, layout in enumerate(core.KV_LAYOUTS) if not layout.extra_only]
HEADS = (8, 16, 32, 64, 128)
H200, H20, B200, A100 = (9, 132), (9, 78), (10, 148), (8, 108)  # (compute capability, SMs)


def shapes():
    """op, layout, keys, extra keys, whether the first are a window, heads, queries, GPU."""
    caches = [("dsv32", 2048, 0, False), ("dsv4", 128, 512, False), ("bf16", 2048, 0, False)]
    chunks = [*caches, ("bf16_512", 1152, 0, False), ("bf16_512", 128, 0, True), ("dsv4", 128, 512, True)]
    for cache, heads, queries in product(caches, HEADS, (1, 8, 32, 44, 67, 128, 144, 256)):
        yield "decode", *cache, heads, queries, H200
    for cache, heads, queries in product(chunks, HEADS, (32, 256, 4096)):
        yield "prefill", *cache, heads, queries, H200
    for op, heads, queries, gpu in product(
        ("decode", "prefill"), (16, 32, 128), (64, 512), (H20, B200, A100)
    ):
        yield op, "dsv32", 2048, 0, False, heads, queries, gpu
    yield "decode", "dsv32", 2048, 0, False, 128, 1 << 20, H200
    yield "prefill", "dsv32", 2048, 0, False, 128, 1 << 20, H200
    yield "prefill", "dsv32", 2048, 0, False, 8, 1 << 27, H200
    for layout in ("fp8_e4m3_fnuz", "dsv41", "dsv32_nope"):
        yield "decode", layout, 2048, 0, False, 16, 8, H200
        yield "prefill", layout, 2048, 0, False, 128, 4096, H200
    for heads, queries in product(HEADS, (1, 8, 32, 128, 256)):
        yield "decode", "dsv41+dsv41_fp4", 128, 512, False, heads, queries, H200
    for heads, queries in product(HEADS, (32, 256, 4096)):
        yield "prefill", "dsv41+dsv41_fp4", 128, 512, True, heads, queries, H200
    yield "decode", "dsv4+dsv41_fp4", 128, 512, False, 16, 8, H200
    yield "prefill", "dsv4+dsv41_fp4", 128, 512, True, 128, 4096, H200
    yield "decode", "dsv4_fnuz+dsv4", 128, 512, False, 16, 8, H200
    yield "prefill", "dsv4_fnuz+dsv4", 128, 512, True, 128, 4096, H200


def shapes_of_entry_pages():
    """The same of windows whose entries are named by their pages."""
    for layout, heads, queries in product(("bf16_512", "dsv4"), HEADS, (32, 256, 600, 4096)):
        yield "prefill", layout, 128, 1024, True, heads, queries, H200
    yield "prefill", "bf16", 128, 1024, True, 8, 4096, H200
    yield "prefill", "dsv41+dsv41_fp4", 128, 1024, True, 8, 4096, H200
    yield "prefill", "bf16_512", 128, 1024, True, 8, 4096, A100
    for heads, queries in ((8, 6), (8, 18), (16, 2), (16, 90), (32, 24), (64, 20), (128, 32)):
        yield "prefill", "dsv4", 128, 8192, True, heads, queries, H200


def ids(layouts):
    """Of "dsv4", or of the two caches of "dsv4+dsv41_fp4"."""
    first, _, extra = layouts.partition("+")
    return {"layout": LAYOUTS.index(first), "extra_layout": LAYOUTS.index(extra) if extra else -1}


def plans(shapes=shapes, **which):
    yield "op", "layout", "keys", "extra_keys", "window", "heads", "queries", "compute_major", "sms", "plan"
    for op, layout, keys, extra, window, heads, queries, (major, sms) in shapes():
        plan = core.plan(
            op, **ids(layout), queries=queries, heads=heads, keys=keys, extra_keys=extra,
            is_window=window, compute_major=major, num_sms=sms, **which,
        )  # fmt: skip
        numbers = map(str, (keys, extra, int(window), heads, queries, major, sms))
        yield op, layout, *numbers, plan


def shapes_in_any_batch():
    """Those of decode that plans of batch_invariant differ in, and two that they do not."""
    caches = [("dsv32", 2048, 0), ("dsv4", 128, 512), ("dsv4", 128, 1024), ("bf16", 2048, 0)]
    for cache, heads, queries in product(caches, HEADS, (1, 8, 16, 32, 64, 128, 256)):
        yield "decode", *cache, False, heads, queries, H200
    yield "decode", "dsv41+dsv41_fp4", 128, 512, False, 16, 8, H200


def plans_in_any_batch():
    return plans(shapes_in_any_batch, batch_invariant=True)


def plans_of_entry_pages():
    return plans(shapes_of_entry_pages, has_entry_pages=True)


def variants():
    yield "kernel", "schedule", "heads", "producers", "layouts"
    for kernel, schedule, heads, producers, layouts in core.VARIANTS:
        yield kernel, schedule, str(heads), str(producers), " ".join(layouts)


TABLES = {
    "plans.csv": plans, "plans_of_entry_pages.csv": plans_of_entry_pages,
    "plans_in_any_batch.csv": plans_in_any_batch, "variants.csv": variants,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_policy_and_variants_are_frozen(name):
    with (HERE / name).open(newline="") as file:
        assert list(TABLES[name]()) == [tuple(row) for row in csv.reader(file)]


def planned_kernels():
    """(kernel, schedule, heads, producers or None, layouts) of the plans of many problems on Hopper."""
    layouts = {layout for variant in core.VARIANTS for layout in variant[4]}
    queries = (1, 2, 4, 8, 16, 20, 32, 44, 64, 96, 128, 160, 256, 512, 1024, 4096)
    found = set()
    for layout, heads, count, invariant in product(layouts, HEADS, queries, (False, True)):
        problem = {**ids(layout), "heads": heads, "queries": count, "batch_invariant": invariant}
        for op, keys, extra in product(("decode", "prefill"), (128, 640, 2048), (0, 512)):
            if "+" in layout and not extra:
                continue
            plan = core.plan(op, **problem, keys=keys, extra_keys=extra)
            found.add((layout, plan))
        if "+" not in layout:
            entries = {"keys": 128, "extra_keys": 8192, "is_window": True, "has_entry_pages": True}
            for requests in (1, 32):
                found.add((layout, core.plan("prefill", **problem, **entries, requests=requests)))
    kernels = set()
    for layout, plan in found:
        kernel, schedule, heads = re.match(r"(\w+) (\w+), (\d+) heads", plan).groups()
        producers = re.search(r"(\d+) producers", plan)
        kernels.add((kernel, schedule, int(heads), producers and int(producers[1]), layout))
    return kernels


def test_a_kernel_that_no_plan_names_is_not_compiled():
    planned = planned_kernels()
    for kernel, schedule, heads, producers, layouts in core.VARIANTS:
        if kernel == "portable":  # of other GPUs
            continue
        for layout in layouts:
            wanted = (kernel, schedule, heads, producers if kernel == "few_heads" else None, layout)
            assert wanted in planned


@pytest.mark.parametrize(
    "queries, requests, tile",
    [
        (192, 32, 6), (4096, 1, 8), (128, 32, 4), (96, 32, 3), (288, 32, 5), (100, 3, 8), (32, 32, 0),
        (33, 32, 0),
    ],
)  # fmt: skip
def test_neighbours_over_all_entries_share_tiles(queries, requests, tile):
    """As many to a tile as leave none with queries of two requests, where these may have the same number."""
    plan = core.plan(
        "prefill", layout=LAYOUTS.index("dsv4"), queries=queries, heads=8, keys=128, extra_keys=8192,
        is_window=True, has_entry_pages=True, requests=requests,
    )  # fmt: skip
    assert f", {tile} queries a tile" in plan if tile else "a tile" not in plan
    assert (", 132 CTAs for all" in plan) == (queries // tile <= 66 if tile else False)


@given(st.integers(1, 400), st.integers(1, 128), st.integers(1, 32))
def test_the_largest_workspace_of_use_is_enough_for_shared_tiles(queries, heads, requests):
    problem = {
        "layout": LAYOUTS.index("dsv4"), "queries": queries, "heads": heads, "keys": 128, "extra_keys": 8192,
        "is_window": True, "has_entry_pages": True, "requests": requests,
    }  # fmt: skip
    _, most = core.workspace(
        layout=problem["layout"], queries=queries, heads=heads, keys=128, extra_keys=8192
    )
    assert core.plan("prefill", **problem, workspace=most) == core.plan("prefill", **problem)
    assert "for all" not in core.plan("prefill", **problem, workspace=0)


SHARING = [  # fmt: skip: op, layout, keys, extra keys, heads, queries of a group, groups -> tile, its plan
    ("decode", "dsv4", 128, 512, 8, 6, 128, (6, "many_heads split, 48 heads, 1 CTA a query")),
    ("decode", "dsv32", 2048, 0, 8, 6, 128, (6, "many_heads split, 64 heads, 1 CTA a query")),
    ("decode", "dsv4", 128, 512, 8, 8, 128, (8, "many_heads split, 64 heads, 1 CTA a query")),
    ("decode", "dsv32", 2048, 0, 8, 4, 128, (4, "many_heads split, 32 heads, 1 CTA a query")),
    ("prefill", "dsv4", 128, 512, 8, 8, 1024, (8, "many_heads split, 64 heads, 1 CTA a query")),
    ("prefill", "dsv4", 128, 512, 8, 20, 400, (7, "many_heads split, 64 heads, 1 CTA a query")),
    ("decode", "dsv4", 128, 512, 8, 4, 128, None),  # what four share, the making of lists costs
    ("decode", "dsv32", 2048, 0, 8, 6, 48, (3, "many_heads split, 32 heads, 1 CTA a query")),
    ("decode", "dsv32", 2048, 0, 8, 6, 64, None),  # alone several CTAs share a query
    ("decode", "dsv32", 2048, 0, 8, 6, 24, None),
    ("decode", "dsv4", 128, 512, 8, 6, 1, None),  # one request: nobody waits for an SM
    ("decode", "dsv4", 128, 512, 8, 1, 768, None),
    ("decode", "dsv4", 128, 512, 32, 2, 128, None),  # what two share, the making of lists costs
    ("decode", "dsv4", 128, 512, 64, 6, 128, None),
    ("decode", "dsv4", 128, 512, 12, 4, 128, None),
    ("decode", "bf16", 2048, 0, 8, 8, 1024, None),
    ("decode", "dsv4", 0, 8192, 8, 8, 1024, None),  # more entries than are hashed
]


@pytest.mark.parametrize("op, layout, keys, extra_keys, heads, group, groups, want", SHARING)
def test_neighbours_that_share_keys(op, layout, keys, extra_keys, heads, group, groups, want):
    got = core.sharing(
        op, layout=LAYOUTS.index(layout), queries=group * groups, heads=heads, keys=keys,
        extra_keys=extra_keys, query_groups=group,
    )  # fmt: skip
    assert (None if got is None else got[:2]) == want
    if got:
        assert 0 < got[3] <= 256


def test_requests_with_other_numbers_of_drafts_share_keys_while_most_have_several():
    problem = {
        "layout": LAYOUTS.index("dsv4"), "heads": 8, "keys": 128, "extra_keys": 512, "query_groups": 6,
        "has_lists": True,
    }  # fmt: skip
    equal = core.sharing("decode", **problem, queries=768)
    assert equal is not None and core.sharing("decode", **problem, queries=768, requests=128) == equal
    assert core.sharing("decode", **problem, queries=688, requests=128) is not None  # one in 8 has one
    for queries, requests in ((448, 128), (768, 700)):  # a tile has 3.5 of its 6, or fewer, in the mean
        assert core.sharing("decode", **problem, queries=queries, requests=requests) is None


def test_the_chunk_cache_names_what_has_tiles_of_neighbours():
    for layout, heads in product(FIRST, range(1, 129)):
        has = core.sharing(
            "prefill", layout=layout, queries=8192, heads=heads, keys=128, extra_keys=512,
            query_groups=max(64 // heads, 1),
        )  # fmt: skip
        assert (has is not None) == asked.fills_tiles(LAYOUTS[layout], heads, max(64 // heads, 1))


problems = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(FIRST), "queries": st.integers(1, 1 << 28),
        "heads": st.integers(1, 128), "keys": st.integers(0, 1 << 27), "extra_keys": st.integers(0, 4096),
        "num_sms": st.integers(1, 200),
    }
)  # fmt: skip


@given(problems, st.sampled_from(["decode", "prefill"]), st.booleans())
def test_a_plan_names_a_variant_that_reads_the_cache(problem, op, is_window):
    plan, _, first = core.plan(op, is_window=is_window and op == "prefill", **problem).partition(", for ")
    assert not first or 0 < int(first.split()[0]) < problem["queries"]
    name, *rest = plan.split(", ")
    numbers = {what: int(number) for number, what in (part.split(" ", 1) for part in rest)}
    splits = numbers.get("CTA a query", numbers.get("CTAs a query", 1))
    ranges = {
        "portable split": range(1, 65), "many_heads split": (1,), "many_heads segments": (1,),
        "many_heads parts": range(2, 9), "many_heads runs": range(2, 9),
    }  # fmt: skip
    assert splits in ranges.get(name, (1, 2, 4, 6, 8, 16))
    forced = core.forced_plan(
        *name.split(), numbers["heads"], splits, numbers.get("producers", 0), layout=problem["layout"],
        heads=problem["heads"],
    )  # fmt: skip
    assert forced == plan


@given(problems)
def test_no_problem_takes_more_than_three_launches(problem):
    for _ in range(3):
        first = core.plan("decode", **problem).partition(", for ")[2]
        if not first:
            return
        problem["queries"] -= int(first.split()[0])
    raise AssertionError(problem)


@given(problems, problems, st.booleans(), st.booleans())
def test_batch_invariant_plans_know_keys_and_heads_alone(a, b, is_window, has_entry_pages):
    """Heads up to the next of 8, 16, 32 and 64, or more. Who shares segments changes no bits: how many CTAs,
    and in many_heads of how many heads each. Of layouts that have them the number of keys does not count."""
    b |= {name: a[name] for name in ("layout", "keys", "extra_keys")}
    if LAYOUTS[a["layout"]] in ("dsv32", "dsv4", "dsv41") and a["keys"] < 1 << 25:
        b |= {"keys": b["keys"] % (1 << 25), "extra_keys": 8192 - b["extra_keys"]}
    b["heads"] = {8: 5, 16: 11, 32: 29}.get(next((n for n in (8, 16, 32) if a["heads"] <= n), 64), 77)
    a["queries"], b["queries"] = (min(x["queries"], (1 << 20) - 1) for x in (a, b))
    of_window = {
        "is_window": is_window,
        "has_entry_pages": is_window and b["extra_keys"] > 0 and has_entry_pages,
    }
    a = core.plan("decode", batch_invariant=True, **a)
    b = core.plan("prefill", batch_invariant=True, **b, **of_window)
    if re.search(" segments?(,|$)", a):
        a, b = (x.replace("many_heads runs", "many_heads segments") for x in (a, b))
        a, b = (re.sub(r", \d+ CTAs? a query|(?<=many_heads segments), \d+ heads", "", x) for x in (a, b))
    assert a == b


@given(problems, st.sampled_from(["decode", "prefill"]), st.sampled_from([8, 10, 12]))
def test_other_gpus_take_the_portable_kernel(problem, op, major):
    assert core.plan(op, compute_major=major, **problem).startswith("portable split, ")


@given(problems, st.sampled_from([8, 10, 12]))
def test_the_portable_kernel_in_any_batch_knows_neither_queries_nor_heads_nor_sms(problem, major):
    same = problem | {"queries": 3, "heads": 5, "num_sms": 70}
    options = {"compute_major": major, "batch_invariant": True}
    assert core.plan("decode", **problem, **options) == core.plan("prefill", **same, **options)


@given(problems, st.booleans(), st.sampled_from([8, 9, 12]))
def test_the_largest_workspace_of_use_is_enough_for_every_plan(problem, batch_invariant, major):
    wanted, most = core.workspace(**problem, batch_invariant=batch_invariant, compute_major=major)
    assert wanted <= most
    if major == 9 and LAYOUTS[problem["layout"]] == "dsv32" and problem["keys"] < 1 << 25:
        plan = core.plan("decode", **problem, batch_invariant=batch_invariant)
        if ", for " not in plan:  # those of the launch before may want one
            assert (wanted > 0) == plan.startswith(("many_heads parts", "many_heads runs"))


@given(problems)
def test_callers_without_a_workspace_have_no_parts(problem):
    for op in ("prefill", "decode"):
        assert "parts" not in core.plan(op, **problem, workspace=0)
        assert "runs" not in core.plan(op, **problem, workspace=0, batch_invariant=True)


@pytest.mark.parametrize("parts, splits", [(40, 32), (32, 32), (31.9, 31), (5, 5), (1, 1), (0, 1)])
def test_a_query_is_split_as_far_as_the_workspace_has_room(parts, splits):
    problem = {"layout": 0, "queries": 3, "heads": 16, "keys": 2048, "compute_major": 8}
    plan = core.plan("decode", **problem, workspace=int(parts * 3 * 16 * 515))
    assert plan == f"portable split, 16 heads, {splits} {'CTA' if splits == 1 else 'CTAs'} a query"


@pytest.mark.parametrize(
    "wanted, layout, heads",
    [
        (("few_heads", "split", 64, 1), "dsv32", 64),
        (("few_heads", "split", 32, 1), "dsv32", 64),
        (("few_heads", "split", 8, 17), "dsv32", 8),
        (("few_heads", "walk", 8, 2), "dsv32", 8),
        (("few_heads", "walk", 16, 1, 4), "dsv32", 16),
        (("few_heads", "segments", 8, 5), "dsv32", 8),
        (("few_heads", "segments", 8, 16), "dsv32", 8),
        (("many_heads", "segments", 32, 16), "dsv32", 32),
        (("many_heads", "segments", 64, 16), "dsv32", 64),
        (("many_heads", "runs", 64, 9), "dsv32", 64),
        (("many_heads", "runs", 32, 2), "dsv41+dsv41_fp4", 32),
        (("few_heads", "segments", 16, 1), "bf16", 16),
        (("few_heads", "segments", 8, 1), "dsv32_nope", 8),
        (("few_heads", "split", 8, 1, 4), "dsv41+dsv41_fp4", 8),
        (("many_heads", "split", 32, 1, 4), "dsv41+dsv41_fp4", 32),
        (("many_heads", "split", 48, 1), "dsv4", 8),
        (("many_heads", "walk", 64, 1), "fp8_e4m3", 64),
        (("few_heads", "segments", 8, 1), "dsv41+dsv41_fp4", 8),
        (("many_heads", "split", 64, 32), "dsv32", 64),
        (("many_heads", "split", 64, 1), "bf16", 64),
        (("many_heads", "split", 64, 1), "dsv32_fnuz", 64),
        (("bf16_tiles", "walk", 64, 1), "dsv4", 64),
        (("bf16_tiles", "walk", 64, 1), "dsv32", 128),
        (("few_heads", "split", 32, 1), "dsv41", 64),
        (("bf16_tiles", "walk", 64, 1), "dsv41", 128),
        (("nothing", "split", 16, 1), "dsv32", 16),
        (("bf16_tiles", "walk", 64, 1), "dsv4+dsv41_fp4", 64),
        (("few_heads", "split", 16, 1), "dsv4_fnuz+dsv4", 16),
        (("many_heads", "split", 32, 1, 8), "dsv4_fnuz+dsv4", 64),
    ],
)
def test_what_no_kernel_runs_is_refused(wanted, layout, heads):
    reads = layout.replace("+", r" \+ ")
    with pytest.raises(RuntimeError, match=f"must be one of .* reads {reads} with {heads} heads"):
        core.forced_plan(*wanted, **ids(layout), heads=heads)


def test_a_kernel_is_refused_on_a_gpu_that_it_is_not_compiled_for():
    options = {"layout": LAYOUTS.index("dsv32"), "heads": 16}
    assert core.forced_plan("few_heads", "split", 16, **options).startswith("few_heads split, 16 heads")
    with pytest.raises(RuntimeError, match="on this GPU"):
        core.forced_plan("few_heads", "split", 16, **options, compute_major=10)


if __name__ == "__main__":
    for name, table in TABLES.items():
        with (HERE / name).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table())
    sys.exit()
