"""prepare_queries gives the bits of the specification, and writes nothing else."""

import pytest
import torch
from assertions import assert_same
from error_cases import check_refused
from norm_rope_cases import MAX_POS, assert_same_bf16, positions_of, rope_tables, values

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, layer_reference

pytestmark = pytest.mark.op("prepare_queries")

MODELS = {
    "V3.2": {"index_neox": True, "index_rope_first": True, "hadamard": True},
    "V3.2 in vLLM": {"index_neox": True, "index_rope_first": True},
    "GLM-5 in SGLang": {
        "index_neox": False, "index_rope_first": True, "scale_format": "f32", "reciprocal": True,
    },
    "f32": {"index_neox": False, "index_rope_first": True, "scale_format": "f32", "amax_floor": 0.5},
    "V4": {"index_neox": False, "index_rope_first": False, "hadamard": True},
    "V4.1": {"index_neox": False, "index_rope_first": False, "layout": "index_fp4"},
    "V4.1, halves": {"index_neox": True, "index_rope_first": False, "layout": "index_fp4", "hadamard": True},
}  # fmt: skip
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def index_case(tokens, heads, device, weights=torch.float32, half=32, form="halves"):
    """(index_q, index_weights, positions, cos, sin), each a slice of something wider."""
    q = values(tokens, heads + 1, 128, device=device)[:, :heads]
    q[0, 0], q[-1, -1, ::3] = 0.0, -0.0
    w = torch.randn(tokens, heads + 5, device=device).to(weights)[:, 5:]
    return q, w, positions_of(tokens, device), *rope_tables(device, half, form=form)


def check_index(q, w, positions, cos, sin, options, **buffers):
    scales = {"weight_scale": 128**-0.5, "head_scale": q.shape[1] ** -0.5}
    got = mla_fp8.prepare_queries(None, q, w, cos, sin, positions, **options, **scales, **buffers)
    reference = {k: v for k, v in options.items() if k not in ("index_neox", "index_rope_first")}
    reference["layout"] = INDEX_LAYOUTS[options.get("layout", "index_fp8")]
    want = layer_reference.prepare_index_q(
        *(x.cpu() for x in (q, w, cos, sin, positions)), neox=options["index_neox"],
        rope_first=options["index_rope_first"], **reference, **scales,
    )  # fmt: skip
    assert got.q_pe is None and (got.index_scale is None) == (want[2] is None)
    for x, y in zip(got[1:], want, strict=True):
        if y is not None:
            assert x.dtype == y.dtype and x.shape == y.shape
            assert torch.equal(x.cpu().view(torch.uint8), y.view(torch.uint8))
    return got


@every_model
@pytest.mark.parametrize("heads", [1, 4, 13, 32, 64])
def test_the_indexers_queries_are_those_of_the_specification(options, heads, device):
    check_index(*index_case(37, heads, device), options)


@every_model
@pytest.mark.parametrize("tokens", [1, 2, 700])
def test_any_number_of_tokens(options, tokens, device):
    check_index(*index_case(tokens, 8, device, torch.bfloat16), options)


@pytest.mark.parametrize("heads", [64, 32])
def test_many_tokens_go_two_heads_to_a_lane(heads, device):
    n = 1500 if device == "cuda" else 300
    case = index_case(n, heads, device)
    check_index(*case, MODELS["V3.2"])
    check_index(*case, MODELS["V4.1"])


@every_model
def test_nan_and_infinities_of_the_indexers_queries(options, device):
    q, w, positions, cos, sin = index_case(12, 4, device)
    positions.clamp_(0, MAX_POS - 1)
    q = q.clone()
    q[0, 0, 100], q[1, 1, 70], q[2, 2], q[3, 3, 5] = float("nan"), float("inf"), -float("inf"), float("nan")
    if options.get("hadamard"):  # sums of infinities are NaN; where they are is the order's affair
        q = q.nan_to_num(3.0, 1.0, -1.0)
    check_index(q, w, positions, cos, sin, options)


@pytest.mark.parametrize("form", ["halves", "alternating", "apart"])
@pytest.mark.parametrize("half", [0, 4, 32, 60, 64])
@pytest.mark.parametrize("first", [True, False])
def test_any_number_of_rotated_dims_of_the_indexer(half, first, form, device):
    options = {"index_neox": False, "index_rope_first": first}
    check_index(*index_case(20, 5, device, half=half, form=form), options)


def check_pe(q_pe, positions, cos, sin, *, neox, **buffers):
    want = layer_reference.rotated_dims(*(x.cpu() for x in (q_pe, cos, sin, positions)), neox=neox)
    got = mla_fp8.prepare_queries(q_pe, None, None, cos, sin, positions, neox=neox, **buffers)
    assert_same_bf16(got.q_pe.cpu(), want)
    assert got[1:] == (None, None, None)
    return got.q_pe


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_q_pe_is_rotated(heads, neox, dtype, device):
    q = values(29, heads, 192, device=device, wide=0)
    case = (positions_of(29, device, dtype), *rope_tables(device))
    assert check_pe(q[..., 128:], *case, neox=neox).is_contiguous()


@pytest.mark.parametrize("form", ["halves", "alternating", "apart"])
@pytest.mark.parametrize("half", [8, 16, 24, 32, 56, 128])
@pytest.mark.parametrize("neox", [False, True])
def test_any_number_of_dims_of_q_pe(half, neox, form, device):
    q = values(9, 5, 2 * half, device=device)
    check_pe(q, positions_of(9, device), *rope_tables(device, half, form=form), neox=neox)


@pytest.mark.parametrize("neox", [False, True])
def test_q_pe_goes_straight_behind_what_a_gemm_wrote(neox, device):
    """The last 64 of 576 columns; the first 512 keep their bytes."""
    q, whole = values(33, 16, 192, device=device, wide=0), values(33, 16, 576, device=device, wide=0)
    before = whole.clone()
    case = (positions_of(33, device), *rope_tables(device))
    got = check_pe(q[..., 128:], *case, neox=neox, out_q_pe=whole[..., 512:])
    assert got.data_ptr() == whole[..., 512:].data_ptr()
    assert torch.equal(whole[..., :512], before[..., :512])


@pytest.mark.parametrize("neox", [False, True])
def test_q_pe_in_place(neox, device):
    wide = values(33, 16, 192, device=device, wide=0)
    before, case = wide.clone(), (positions_of(33, device), *rope_tables(device))
    want = layer_reference.rotated_dims(
        *(x.cpu() for x in (before[..., 128:], *case[1:], case[0])), neox=neox
    )
    mla_fp8.prepare_queries(
        wide[..., 128:], None, None, *case[1:], case[0], neox=neox, out_q_pe=wide[..., 128:]
    )
    assert_same_bf16(wide[..., 128:].cpu(), want)
    assert torch.equal(wide[..., :128], before[..., :128])


@every_model
@pytest.mark.parametrize("tokens, heads, index_heads", [(1, 16, 64), (8, 128, 64), (50, 7, 5), (600, 8, 32)])
def test_both_in_one_launch_with_tables_of_their_own(options, tokens, heads, index_heads, device):
    index_q, w, positions, index_cos, index_sin = index_case(tokens, index_heads, device)
    q_pe, (cos, sin) = values(tokens, heads, 64, device=device), rope_tables(device)
    both = mla_fp8.prepare_queries(q_pe, index_q, w, cos, sin, positions, index_cos, index_sin, **options)
    alone = mla_fp8.prepare_queries(q_pe, None, None, cos, sin, positions)
    index = mla_fp8.prepare_queries(None, index_q, w, index_cos, index_sin, positions, **options)
    assert_same_bf16(both.q_pe, alone.q_pe)
    for x, y in zip(both[1:], index[1:], strict=True):
        assert_same(x, y) if y is not None else None
    for name in ("q_pe", "index_q", "index_weights"):
        assert not getattr(both, name).float().isinf().any()


@every_model
def test_buffers_of_the_caller_are_written_and_nothing_else(options, device):
    q, w, *rest = index_case(21, 6, device)
    layout = INDEX_LAYOUTS[options.get("layout", "index_fp8")]
    codes = torch.full((23, 6, layout.value_bytes), 0x35, dtype=torch.uint8, device=device)
    weights = torch.full((23, 6), 7.0, device=device)
    scales = torch.full((23, 6, 4), 0x35, dtype=torch.uint8, device=device)
    fp8 = layout.name == "index_fp8"
    out = {
        "out_index_q": codes.view(torch.float8_e4m3fn)[1:22] if fp8 else codes[1:22],
        "out_index_weights": weights[1:22],
    } | ({} if fp8 else {"out_index_scale": scales[1:22]})
    got = check_index(q, w, *rest, options, **out)
    assert got.index_q.data_ptr() == codes[1:].data_ptr()
    for row in (0, 22):
        assert (codes[row] == 0x35).all() and (weights[row] == 7).all() and (scales[row] == 0x35).all()
    assert not fp8 or (scales == 0x35).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_no_position_reads_outside_the_tables(dtype, device):
    """Their rows before and behind are NaN."""
    positions = positions_of(300, device, dtype)
    tables = []
    for x in rope_tables(device):
        whole = torch.full((MAX_POS + 2, 32), float("nan"), device=device)
        whole[1:-1] = x
        tables.append(whole[1:-1])
    q, (index_q, w, *_) = values(300, 3, 64, device=device), index_case(300, 4, device)
    options = {"index_neox": True, "index_rope_first": True}
    got = mla_fp8.prepare_queries(q, index_q, w, *tables, positions, **options)
    assert not any(x.float().isnan().any() for x in got if x is not None)
    unknown = ((positions < 0) | (positions >= MAX_POS)).cpu()
    assert unknown.sum() > 4 and (got.q_pe.cpu()[unknown] == 0).all()
    assert (got.index_q.cpu().float()[unknown] == 0).all()


def test_the_engines_products_have_the_engines_bits(device):
    """vLLM: w * scale * D^-0.5 * H^-0.5, of a scale 2^n. SGLang: w * H^-0.5 * scale * D^-0.5."""
    q, w, positions, cos, sin = index_case(200, 32, device)
    model = {"index_neox": False, "index_rope_first": True}
    d, h = 128**-0.5, 32**-0.5
    plain = mla_fp8.prepare_queries(None, q, torch.ones_like(w), cos, sin, positions, **model).index_weights
    vllms = mla_fp8.prepare_queries(
        None, q, w, cos, sin, positions, **model, weight_scale=d, head_scale=h
    ).index_weights
    assert torch.equal(vllms, w * plain * d * h)
    sglangs = mla_fp8.prepare_queries(
        None, q, w, cos, sin, positions, **model, weight_scale=h, head_scale=d
    ).index_weights
    assert torch.equal(sglangs, w * h * plain * d)


def test_queries_are_as_keys(device):
    """A query and a key with the same elements have the same codes: one rotation, one quantiser."""
    x = torch.randn(40, 128, device=device).bfloat16()
    for name, hadamard in (("index_fp8", True), ("index_fp4", False)):
        layout = INDEX_LAYOUTS[name]
        cache = layout.empty(1, 40, device).zero_()
        options = {"layout": layout, "hadamard": hadamard}
        mla_fp8.quantize_index_k(x, torch.arange(40, device=device), cache, page_size=40, **options)
        tables = torch.zeros(2, 3, 0, device=device)
        got = mla_fp8.prepare_queries(
            None, x[:, None], torch.ones(40, 1, device=device), *tables,
            torch.zeros(40, device=device, dtype=torch.int64), **options, index_neox=False,
            index_rope_first=True,
        )  # fmt: skip
        values, scales = layout.views(cache, 40)
        assert torch.equal(got.index_q[:, 0].view(torch.uint8), values[0].view(torch.uint8))
        scale = got.index_weights if name == "index_fp8" else got.index_scale[:, 0]
        assert torch.equal(scale, scales[0])


def test_nothing_to_do(device):
    positions, tables = torch.zeros(0, dtype=torch.int64, device=device), rope_tables(device)
    got = mla_fp8.prepare_queries(None, None, None, *tables, positions)
    assert got == (None, None, None, None)
    q = torch.empty(0, 16, 64, dtype=torch.bfloat16, device=device)
    assert mla_fp8.prepare_queries(q, None, None, *tables, positions).q_pe.shape == (0, 16, 64)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    none = torch.empty(1, 0, 64, dtype=torch.bfloat16, device=device)
    assert mla_fp8.prepare_queries(none, None, None, *tables, one).q_pe.shape == (1, 0, 64)


def with_arguments(**changes):
    bf16 = torch.bfloat16
    given = {
        "positions": torch.zeros(3, dtype=torch.int64), "cos": torch.zeros(9, 32), "sin": torch.zeros(9, 32),
        "q_pe": torch.zeros(3, 2, 64, dtype=bf16), "index_q": torch.zeros(3, 4, 128, dtype=bf16),
        "index_weights": torch.zeros(3, 4), "index_neox": True, "index_rope_first": True,
    }  # fmt: skip
    return given | changes


BF16 = torch.zeros(3, 4, 576, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"positions": torch.zeros(3)},
         "positions must have dtype torch.int64 or torch.int32, got torch.float32"),
        ({"positions": torch.zeros(3, 1).long()}, "positions must have shape [*], got [3, 1]"),
        ({"cos": torch.zeros(9, 32).bfloat16()}, "cos must have dtype torch.float32, got torch.bfloat16"),
        ({"sin": torch.zeros(9, 31)}, "sin must have shape [9, 32], got [9, 31]"),
        ({"q_pe": BF16[..., :32]}, "q_pe must have shape [3, *, 64], got [3, 4, 32]"),
        ({"q_pe": torch.zeros(3, 4, 64)}, "q_pe must have dtype torch.bfloat16, got torch.float32"),
        ({"q_pe": BF16[..., 1:65]}, "q_pe must be 16-byte aligned"),
        ({"cos": torch.zeros(9, 4), "sin": torch.zeros(9, 4), "index_neox": False},
         "cos must have a multiple of 8 columns for q_pe, at least as many, got 4"),
        ({"index_q": BF16[..., :64]}, "index_q must have shape [3, *, 128], got [3, 4, 64]"),
        ({"index_q": torch.zeros(3, 65, 128, dtype=torch.bfloat16)},
         "index_q must have 1 to 64 heads, got 65"),
        ({"index_weights": torch.zeros(3, 5)}, "index_weights must have shape [3, 4], got [3, 5]"),
        ({"index_weights": None}, "index_weights must be given with index_q, and not without it"),
        ({"index_q": None}, "index_weights must be given with index_q, and not without it"),
        ({"index_cos": torch.zeros(9, 32)}, "index_sin must be given with index_cos"),
        ({"index_cos": torch.zeros(9, 16), "index_sin": torch.zeros(9, 16)},
         "index_cos must have 32 columns or none for index_q by halves, got 16"),
        ({"index_cos": torch.zeros(9, 68), "index_sin": torch.zeros(9, 68), "index_neox": False},
         "index_cos must have at most 64 columns for index_q, got 68"),
        ({"scale_format": "e8"}, "scale_format must be ue8m0 or f32, got e8"),
        ({"amax_floor": -1.0}, "amax_floor must be in ["),
        ({"weight_scale": float("inf")}, "weight_scale must be finite"),
        ({"head_scale": 1e40}, "head_scale must be finite"),
        ({"out_q_pe": BF16[..., :64]}, "out_q_pe must have shape [3, 2, 64], got [3, 4, 64]"),
        ({"out_q_pe": torch.zeros(3, 1, 64, dtype=torch.bfloat16).expand(3, 2, 64)}, "out_q_pe must"),
        ({"out_index_q": torch.zeros(3, 4, 128, dtype=torch.uint8)},
         "out_index_q must have dtype torch.float8_e4m3fn, got torch.uint8"),
        ({"out_index_weights": torch.zeros(3, 8)[:, ::2]}, "out_index_weights must be contiguous"),
        ({"layout": "index_fp4", "out_index_scale": torch.zeros(3, 4, 1, dtype=torch.uint8)},
         "out_index_scale must have shape [3, 4, 4], got [3, 4, 1]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(changes, message):
    check_refused(mla_fp8.prepare_queries, with_arguments(**changes), f"mla_fp8.prepare_queries: {message}")


def test_q_pe_with_other_strides_than_the_output_at_its_address_is_refused():
    x = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    changes = {"q_pe": x[:, :2], "out_q_pe": x.flatten(0, 1)[:6].view(3, 2, 64)}
    message = "out_q_pe must be q_pe itself or lie apart from it, got its address with other strides"
    check_refused(mla_fp8.prepare_queries, with_arguments(**changes), f"mla_fp8.prepare_queries: {message}")


@pytest.mark.parametrize("missing", ["index_neox", "index_rope_first"])
def test_how_the_indexer_rotates_has_no_default(missing):
    with pytest.raises(ValueError, match="expected index_neox and index_rope_first with index_q"):
        mla_fp8.prepare_queries(**with_arguments(**{missing: None}))
