"""index_logits against float64 over the stored numbers; where no entry is, -inf; what is wrong is refused."""

from dataclasses import replace

import emulation
import pytest
import torch
from error_cases import check_refused, misaligned
from index_cases import Problem, fp4_queries, ints, random_problem

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("index_logits")
# Of the sum of absolute products: what a GPU's FP8 sums of 32 products may lose.
TOLERANCE = 2.0**-9


def bound(problem: Problem) -> torch.Tensor:
    """TOLERANCE times scale * sum |w| sum |q k|, for each row and entry."""
    q, w = problem.q, problem.weights.abs()
    scale = problem.options.get("q_scale")
    if q.dtype is torch.uint8:
        q, factor = reference.expand_e2m1(q, scale.contiguous().view(torch.uint8).view(*q.shape[:2], 4))
        w, scale = w * factor, None
    keys = reference.index_keys(problem.index_cache, problem.layout, problem.page_size)
    absolute = (keys[0].float().abs(), keys[1])
    sums = reference.index_logits(
        q.float().abs(), w, absolute, problem.slots(), width=problem.width, q_scale=scale
    )
    return TOLERANCE * sums.clamp_min(0)


def assert_logits(problem: Problem) -> None:
    got, want = problem.logits().double(), problem.want_logits()
    assert torch.equal(got.isnan(), want.isnan())
    error = (got - want).abs().nan_to_num(nan=0.0)  # -inf less -inf
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    assert (error <= bound(problem).nan_to_num(nan=0.0)).all()


@pytest.mark.parametrize("heads", [1, 5, 8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_logits_are_as_near_to_float64_as_fp8_sums_allow(heads, layout, device):
    assert_logits(random_problem(device, [333, 64, 1, 0], heads=heads, layout=layout))


@pytest.mark.parametrize("as_int", [False, True])
def test_fp4_queries(as_int, device):
    problem = random_problem(device, [200, 100], heads=32, layout="index_fp4", next_n=2)
    problem.q, scale = fp4_queries(torch.randn(4, 32, 128, device=device))
    problem.options["q_scale"] = scale.view(torch.int32)[..., 0] if as_int else scale
    assert_logits(problem)


E2M1 = (torch.int8, torch.float4_e2m1fn_x2)  # DeepGEMM's dtype of them, and torch's
UE8M0 = (torch.int8, torch.float8_e8m0fnu)


def test_fp4_of_any_dtype_is_the_same_bytes(device):
    problem = random_problem(device, [70, 130], heads=8, layout="index_fp4", page_size=16)
    problem.q, scale = fp4_queries(torch.randn(2, 8, 128, device=device))
    problem.options |= {"q_scale": scale}
    want = problem.topk(33), problem.logits(140)
    for dtype in E2M1:
        typed = replace(problem, q=problem.q.view(dtype), index_cache=problem.index_cache.view(dtype))
        assert all(map(torch.equal, (*typed.topk(33), typed.logits(140)), (*want[0], want[1])))
    for dtype in UE8M0:
        typed = replace(problem, options=problem.options | {"q_scale": scale.view(dtype)})
        assert torch.equal(typed.logits(140), want[1])


def test_fp4_keys_of_any_dtype_are_the_same_bytes(device):
    q, scale = fp4_queries(torch.randn(3, 8, 128, device=device))
    k, k_scale = (x[:, 0].contiguous() for x in fp4_queries(torch.randn(50, 1, 128, device=device)))
    weights, start = torch.randn(3, 8, device=device), ints([0, 7, 9], device)
    end = ints([50, 33, 9], device)

    def logits(k, k_scale):
        return mla_fp8.index_logits_ragged(q, weights, k, k_scale, start, end, q_scale=scale)

    want = logits(k, k_scale)
    assert all(torch.equal(logits(k.view(dtype), k_scale), want) for dtype in E2M1)
    assert all(torch.equal(logits(k, k_scale.view(dtype)), want) for dtype in UE8M0)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_fp4_keys_give_the_bits_of_the_fp8_keys_that_they_expand_to(page_size, device):
    problem = random_problem(device, [700, 130], heads=64, layout="index_fp4", page_size=page_size)
    stored, exponents = problem.layout.views(problem.index_cache, page_size)
    exponents.random_(100, 130)
    layout = mla_fp8.INDEX_LAYOUTS["index_fp8"]
    cache = layout.empty(len(problem.index_cache), page_size, device)
    values, scales = layout.views(cache, page_size)
    expanded, factors = reference.expand_e2m1(stored, exponents)
    values[:], scales[..., 0] = expanded, factors
    want = Problem(
        problem.q, problem.weights, cache, problem.page_table, problem.seq_lens, layout, page_size, {}
    ).logits()
    assert torch.equal(problem.logits(), want)


def test_q_scale_is_multiplied_into_the_weights(device):
    problem = random_problem(device, [300], heads=64, next_n=3)
    scale = 2.0 ** torch.randint(-3, 4, (3, 64), device=device).float()
    problem.options["q_scale"] = scale
    folded = Problem(
        problem.q, problem.weights * scale, problem.index_cache, problem.page_table, problem.seq_lens,
        problem.layout, problem.page_size, {"next_n": 3},
    )  # fmt: skip
    assert torch.equal(problem.logits(), folded.logits())


def test_bf16_weights_are_their_floats(device):
    problem = random_problem(device, [300], heads=64)
    problem.weights = problem.weights.bfloat16()
    want = problem.logits()
    problem.weights = problem.weights.float()
    assert torch.equal(problem.logits(), want)


def test_fewer_heads_are_heads_of_weight_zero(device):
    problem = random_problem(device, [300], heads=64)
    problem.weights[:, 24:] = 0.0
    want = problem.logits()
    problem.q, problem.weights = problem.q[:, :24], problem.weights[:, :24]
    assert torch.equal(problem.logits(), want)


@pytest.mark.parametrize("what", ["key", "scale", "infinite scale", "weight", "query"])
def test_nan_makes_nan_and_stays_in_its_place(what, device):
    problem = random_problem(device, [100, 100], heads=32)
    values, scales = problem.layout.views(problem.index_cache, problem.page_size)
    before = problem.logits()
    page = int(problem.page_table[0, 0])
    if what == "key":
        values.view(torch.uint8)[page, 5, 77] = 0x7F
    elif what == "weight":
        problem.weights[0, 3] = torch.nan
    elif what == "query":
        problem.q.view(torch.uint8)[0, 3, 9] = 0xFF
    else:
        scales[page, 5] = torch.nan if what == "scale" else torch.inf
    got = problem.logits()
    if what != "infinite scale":
        wrong = got[0].isnan()
        assert wrong[5] and wrong.sum() == (1 if what in ("key", "scale") else 100)
        assert (got[0][wrong].view(torch.int32) == 0x7FC00000).all()
    else:
        assert got[0, 5].abs() == torch.inf
    assert torch.equal(got[1], before[1])


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 200, 1000])
def test_any_width(width, device):
    problem = random_problem(device, [300, 100], heads=16)
    whole, part = problem.logits(2000), problem.logits(width)
    assert part.shape == (2, width) and torch.equal(part, whole[:, :width])
    assert (whole[0, 300:] == -torch.inf).all() and (whole[1, 100:] == -torch.inf).all()


def test_a_buffer_of_the_caller(device):
    problem = random_problem(device, [300, 100], heads=16)
    wide = torch.full((2, 400), 7.0, device=device)
    got = mla_fp8.index_logits(*problem.tensors, **problem.keywords, width=320, out=wide[:, :320])
    assert torch.equal(got, problem.logits(320)) and (wide[:, 320:] == 7.0).all()


@pytest.mark.slow
@pytest.mark.only(lambda device: not emulation.executes())
def test_pages_beyond_2_to_the_31_bytes(device):
    """The last of 2.2 GB of pages."""
    layout = mla_fp8.INDEX_LAYOUTS["index_fp8"]
    num_pages = (1 << 31) // layout.page_bytes(64) + 100
    cache = torch.empty(num_pages, layout.page_bytes(64), dtype=torch.uint8, device=device)
    small = random_problem(device, [128], heads=16, extra_pages=0)
    cache[-2:] = small.index_cache
    table = torch.where(small.page_table >= 0, small.page_table + num_pages - 2, -1)
    far = Problem(small.q, small.weights, cache, table, small.seq_lens, small.layout, 64)
    far.page_table[:, 2:] = -1
    small.page_table[:, 2:] = -1
    assert torch.equal(far.logits(), small.logits())


def arguments(**changes):
    problem = random_problem("cpu", [100, 50], heads=16)
    names = ("q", "weights", "index_cache", "page_table", "seq_lens")
    given = dict(zip(names, problem.tensors, strict=True)) | problem.keywords | {"topk": 32}
    return {key: change(given.get(key)) if callable(change) else change
            for key, change in (given | changes).items()}  # fmt: skip


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.zeros(2, 16, 128)}, "q must have dtype torch.float8_e4m3fn or torch.uint8"),
        ({"q": lambda x: x[..., :64]}, "q must have shape [*, *, 128], got [2, 16, 64]"),
        ({"q": lambda x: x.repeat(1, 5, 1)}, "q must have 1 to 64 heads, got 80"),
        ({"q": lambda x: x[:, ::2]}, "q must have its heads one after another, got a stride of 256 bytes"),
        ({"q": lambda x: misaligned(x.view(torch.uint8)).view(torch.float8_e4m3fn)},
         "q must be 16-byte aligned"),
        ({"q": torch.zeros(2, 16, 64, dtype=torch.uint8)},
         "q must be e4m3 (torch.float8_e4m3fn) over keys in e4m3 (index_fp8), got e2m1"),
        ({"q": torch.zeros(2, 16, 64, dtype=torch.uint8), "layout": mla_fp8.INDEX_LAYOUTS["index_fp4"]},
         "q_scale must be given for q in e2m1, got None"),
        ({"weights": lambda x: x[:, :8]}, "weights must have shape [2, 16], got [2, 8]"),
        ({"weights": lambda x: x.half()},
         "weights must have dtype torch.float32 or torch.bfloat16, got torch.float16"),
        ({"q_scale": torch.zeros(2, 16, 4)}, "q_scale must have shape [2, 16], got [2, 16, 4]"),
        ({"index_cache": lambda x: x[:3, :-4]},
         "index_cache must have shape [*, 8448], got [3, 8444] (a page is 64 rows of layout index_fp8)"),
        ({"page_table": lambda x: x.long()}, "page_table must have dtype torch.int32, got torch.int64"),
        ({"page_table": lambda x: x.repeat(1, 1 << 17)}, "page_table must have at most 262144 columns"),
        ({"seq_lens": None}, "seq_lens must be given without row_lens, got None"),
        ({"seq_lens": lambda x: x[:1]}, "seq_lens must have shape [2], got [1]"),
        ({"next_n": 2}, "q must have 2 x 2 rows (requests of page_table x next_n), got 2"),
        ({"next_n": 0}, "next_n must be at least 1, got 0"),
        ({"compress_ratio": 0}, "compress_ratio must be at least 1, got 0"),
        ({"row_lens": ints([1, 2], "cpu"), "compress_ratio": 2},
         "compress_ratio must be 1 with row_lens, which counts entries, got 2"),
        ({"query_start_loc": ints([0, 1, 2], "cpu"), "next_n": 2},
         "next_n must be 1 with query_start_loc, got 2"),
        ({"query_start_loc": ints([0, 2], "cpu")}, "query_start_loc must have shape [3], got [2]"),
        ({"topk": 0}, "topk must be in [1, 4096], got 0"),
        ({"topk": 4097}, "topk must be in [1, 4096], got 4097"),
        ({"pin_last": -1}, "pin_last must be at least 0, got -1"),
        ({"slot_page_size": 64},
         "slot_page_table and slot_page_size must be given together, got no table, a page size"),
        ({"row_lens": [1, 2]}, "row_lens must be a tensor, got [1, 2]"),
        ({"out_positions": ints([[0] * 31] * 2, "cpu"), "out_lens": ints([0, 0], "cpu")},
         "out_positions must have shape [2, 32], got [2, 31]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(changes, message):
    check_refused(mla_fp8.index_topk, arguments(**changes), f"mla_fp8.index_topk: {message}")


def test_half_of_the_buffers_is_an_error():
    with pytest.raises(
        ValueError, match=r"any buffer of the caller's, got no out_positions and no out_lens$"
    ):
        mla_fp8.index_topk(**arguments(out_slots=ints([[0] * 32] * 2, "cpu")))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"k": torch.zeros(9, 128)},
            "k must have dtype torch.float8_e4m3fn or torch.uint8 or torch.int8 or torch.float4_e2m1fn_x2",
        ),
        ({"k_scale": torch.zeros(8)}, "k_scale must have shape [9], got [8]"),
        (
            {"k": torch.zeros(9, 64, dtype=torch.uint8)},
            "k_scale must have dtype torch.uint8 or torch.int32 or torch.int8 or torch.float8_e8m0fnu",
        ),
        (
            {"k_start": torch.zeros(2, dtype=torch.int64)},
            "k_start must have dtype torch.int32, got torch.int64",
        ),
        ({"k_end": ints([1], "cpu")}, "k_end must have shape [2], got [1]"),
        (
            {"k_slots": torch.zeros(9)},
            "k_slots must have dtype torch.int32 or torch.int64, got torch.float32",
        ),
    ],
)
def test_what_is_wrong_with_gathered_keys_is_refused(changes, message):
    given = {
        "q": torch.zeros(2, 16, 128).to(torch.float8_e4m3fn), "weights": torch.zeros(2, 16),
        "k": torch.zeros(9, 128).to(torch.float8_e4m3fn), "k_scale": torch.zeros(9),
        "k_start": ints([0, 0], "cpu"), "k_end": ints([9, 9], "cpu"), "topk": 4,
    }  # fmt: skip
    check_refused(mla_fp8.index_topk_ragged, given | changes, f"mla_fp8.index_topk_ragged: {message}")
