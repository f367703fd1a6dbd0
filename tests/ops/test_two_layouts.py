"""Attention to two caches of different layouts in one softmax: FP4 entries, or both encodings of e4m3."""

from dataclasses import replace

import pytest
import torch
from assertions import assert_attention, assert_same
from row_cases import changed, compacted, row_case
from sparse_cases import INT_MAX, SIZE, V4_SCOPES, make_case, mixed_pairs
from window_cases import make_window_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

NAME = "dsv41_fp4"
FP4 = KV_LAYOUTS[NAME]
FNUZ, FN = KV_LAYOUTS["dsv4_fnuz"], KV_LAYOUTS["dsv4"]
OPS = torch.ops.mla_fp8


def pair_case(layout, extra_layout, device, **shape):
    return make_case(layout, device, extra=V4_SCOPES | {"layout": extra_layout}, **shape)


def test_the_pairs_are_frozen():
    pairs = {x.name: x.extra_of for x in KV_LAYOUTS.values() if x.extra_of}
    assert pairs == {"dsv4": ("dsv4_fnuz",), NAME: ("dsv4", "dsv41")}


@mixed_pairs
@pytest.mark.parametrize("num_q_heads", [1, 8, 17, 64, 128])
@pytest.mark.parametrize("sink", [False, True])
def test_agrees_with_float64_over_poisoned_caches(layout, extra_layout, num_q_heads, sink, device):
    case = pair_case(layout, extra_layout, device, num_q_heads=num_q_heads, sink=sink)
    assert_attention(case, case.decode())
    assert_attention(case, case.prefill())
    assert_attention(case, case.prefill_into_nan())


@mixed_pairs
@pytest.mark.parametrize("page_sizes", [(64, 64), (64, 2), (1, 256), (61, 1)])
def test_each_cache_has_its_own_page_size(layout, extra_layout, page_sizes, device):
    extra = {"layout": extra_layout, "topk": 300, "page_size": page_sizes[1], "num_slots": 900}
    case = make_case(layout, device, page_size=page_sizes[0], num_q_heads=8, extra=extra)
    assert_attention(case, case.decode())


@mixed_pairs
@pytest.mark.parametrize("first, second", [(0, 200), (200, 0), (1, 1), (63, 65), (64, 64), (128, 512)])
def test_blocks_may_hold_rows_of_both(layout, extra_layout, first, second, device):
    extra = {"layout": extra_layout, "topk": second}
    case = make_case(layout, device, topk=first, num_q_heads=8, num_tokens=3, extra=extra)
    assert_attention(case, case.decode())


@mixed_pairs
def test_rows_of_every_kind(layout, extra_layout, device):
    """Holes are left out: a row has the bits of one without."""
    shape = {"num_tokens": 33, "num_q_heads": 16, "extra_topk": 70}
    case = row_case(layout, device, **shape, extra_layout=extra_layout)
    out = case.decode(backend="native")
    assert_attention(case, out)
    assert_same(changed(case, compacted).decode(backend="native"), out)


@mixed_pairs
@pytest.mark.parametrize("window_size", [5, 128])
def test_a_window_next_to_entries(layout, extra_layout, window_size, device):
    window = make_window_case(
        layout, device, query_lens=[9, 1, 0, 20], seq_lens=[40, 90, 30, 20], window_size=window_size,
        extra=V4_SCOPES | {"layout": extra_layout},
    )  # fmt: skip
    assert_attention(window.case, window.run())


@mixed_pairs
def test_it_equals_two_calls_that_are_merged(layout, extra_layout, device):
    """The rows of the second cache once more as rows of bf16, which hold them exactly."""
    case = pair_case(layout, extra_layout, device, num_q_heads=8, sink=False)
    extra = case.scopes[1]
    options = {"layout": extra_layout, "page_size": extra.page_size}
    slots = torch.arange(len(extra.rows), device=device)
    rows = mla_fp8.dequantize_kv(extra.kv_cache, slots, **options)
    parts = replace(case, scopes=case.scopes[:1]).decode(backend="native")
    other = mla_fp8.sparse_prefill(
        case.q, rows, extra.indices, sm_scale=case.sm_scale, topk_length=extra.length
    )
    merged, lse = mla_fp8.merge_attention_states(*parts, other[0], other[2])
    out, joint = case.decode(backend="native")
    torch.testing.assert_close(joint, lse, rtol=0, atol=2e-3)
    torch.testing.assert_close(out.float(), merged.float(), rtol=2e-2, atol=2e-3)


@mixed_pairs
def test_the_same_bits_in_any_batch(layout, extra_layout, device):
    case = pair_case(layout, extra_layout, device, num_tokens=40)
    whole = case.decode(batch_invariant=True)
    order = torch.randperm(40, device=device)[:7]
    assert_same(case.tokens(order).decode(batch_invariant=True), tuple(t[order] for t in whole))


def who_selects(scope, slot):
    selects = scope.indices == slot
    return (selects & (torch.arange(selects.shape[1], device=selects.device) < scope.length[:, None])).any(1)


@mixed_pairs
def test_a_nan_scale_is_the_affair_of_who_selects_it(layout, extra_layout, device):
    case = pair_case(layout, extra_layout, device, num_q_heads=8, sink=False)
    before = case.decode()
    slot = int(case.scopes[1].indices[0][case.scopes[1].indices[0] >= 0][0])
    _, scales, _ = extra_layout.views(case.scopes[1].kv_cache, case.scopes[1].page_size)
    scales.view(torch.uint8)[slot // 2, slot % 2, 3] = 0xFF if extra_layout.scale_format == "ue8m0" else 0x7F
    selects = who_selects(case.scopes[1], slot)
    out, lse = case.decode()
    assert selects.any() and not selects.all()
    assert lse[selects].isnan().all()
    assert_same((out[~selects], lse[~selects]), tuple(t[~selects] for t in before))


@mixed_pairs
def test_the_reference_agrees(layout, extra_layout, device):
    case = pair_case(layout, extra_layout, device)
    for run in (case.decode, case.prefill):
        assert_attention(case, run(backend="reference"))


def test_the_default_is_the_layout_of_the_first(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    assert_same(case.decode(extra_layout="dsv4"), case.decode())
    named = case.op_options() | {"extra_layout": case.layout.id}
    assert_same(OPS.sparse_decode(*case.arguments(), **named), case.decode())


def test_an_engines_name_means_the_second_caches_layout(device):
    case = pair_case(KV_LAYOUTS["dsv41"], FP4, device)
    want = case.decode()
    assert_same(case.decode(extra_layout="auto"), want)


def test_an_engines_name_means_the_encoding_of_each_caches_dtype(device):
    case = pair_case(FNUZ, FN, device)
    want = case.decode()
    first, second = case.scopes
    named = replace(
        case,
        scopes=[
            replace(first, kv_cache=first.kv_cache.view(torch.float8_e4m3fnuz)),
            replace(second, kv_cache=second.kv_cache.view(torch.float8_e4m3fn)),
        ],
    )
    assert_same(named.decode(layout="fp8_ds_mla", extra_layout="fp8_ds_mla"), want)


ERRORS = [
    ("extra_layout", "dsv4", "extra_layout must be dsv41 or dsv41_fp4 with layout dsv41, got dsv4"),
    ("extra_layout", "dsv32_nope", "must be dsv41 or dsv41_fp4 with layout dsv41, got dsv32_nope"),
    ("extra_layout", 99, r"extra_layout must be in \[0, 13\), got 99"),
    ("extra_layout", -1, r"extra_layout must be in \[0, 13\), got -1"),
    ("extra_kv_cache", lambda t: t[:, :-1], "extra_kv_cache must have shape .* rows of layout dsv41_fp4"),
    ("extra_kv_cache", lambda t: None, "must be given together"),
    ("layout", "dsv41_fp4", "layout must not be dsv41_fp4, which is for the second cache of a call only"),
    ("layout", "dsv32_nope", "extra_layout must be dsv32_nope with layout dsv32_nope, got dsv41_fp4"),
]


@pytest.mark.parametrize("name, value, message", ERRORS)
def test_wrong_layouts_are_named_and_nothing_is_written(name, value, message, device):
    case = pair_case(KV_LAYOUTS["dsv41"], FP4, device)
    options = case.op_options() | {"kv_cache": case.scopes[0].kv_cache}
    if isinstance(value, str):
        value = KV_LAYOUTS[value].id
    options[name] = value(options[name]) if callable(value) else value
    outs = case.nan_outputs()
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_prefill_paged_out(
            case.q, options.pop("kv_cache"), case.scopes[0].indices, **options, **outs
        )
    assert all(t.isnan().all() for t in outs.values())


def test_a_layout_without_a_cache_is_refused(device):
    case = make_case(KV_LAYOUTS["dsv41"], device)
    for backend in ("native", "reference"):
        with pytest.raises(
            RuntimeError, match="extra_layout must be None without extra_kv_cache, got dsv41_fp4"
        ):
            case.decode(extra_layout=NAME, backend=backend)
    with pytest.raises(RuntimeError, match="extra_layout must be None without extra_kv_cache, got 12"):
        OPS.sparse_decode(*case.arguments(), **(case.op_options() | {"extra_layout": FP4.id}))


def test_a_pair_that_no_backend_reads_is_refused_with_every_reason(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    for backend in ("auto", "native", "reference"):
        with pytest.raises(ValueError, match=r"dsv4 \+ dsv41_fp4, dsv41 \+ dsv41_fp4, not dsv4 \+ dsv41"):
            case.decode(extra_layout="dsv41", backend=backend)


@pytest.mark.parametrize("value", [0, INT_MAX])
def test_what_lies_behind_the_length_is_not_read(value, device):
    case = pair_case(KV_LAYOUTS["dsv41"], FP4, device)
    before = case.decode()
    behind = torch.arange(case.scopes[1].indices.shape[1], device=device) >= case.scopes[1].length[:, None]
    case.scopes[1].indices[behind] = value
    assert_same(case.decode(), before)


def test_a_cache_with_the_bytes_of_the_rules_gives_the_attention_of_its_values(device):
    """Bytes that no writer of ours made: any code under any finite scale."""
    case = pair_case(KV_LAYOUTS["dsv41"], FP4, device, num_q_heads=8)
    extra = case.scopes[1]
    random = torch.randint(0, 256, extra.kv_cache.shape, dtype=torch.uint8, device=device)
    extra.kv_cache.copy_(random)
    FP4.views(extra.kv_cache, extra.page_size)[1].view(torch.uint8).bitwise_and_(0x1F)
    values = reference.dequantize_cache(extra.kv_cache, layout=FP4, page_size=extra.page_size)
    case = replace(case, scopes=[case.scopes[0], replace(extra, rows=values.bfloat16())])
    assert_attention(case, case.decode())


@pytest.mark.parametrize("num_q_heads", [5, 64])
def test_a_byte_means_what_its_cache_holds(num_q_heads, device):
    """All codes in both caches but the NaN of each: that of e4m3fnuz is the -0 of e4m3fn, whose two are the
    largest values of e4m3fnuz."""
    case = pair_case(FNUZ, FN, device, num_q_heads=num_q_heads)
    scopes = []
    for scope, nan in zip(case.scopes, (0x80, 0x7F), strict=True):
        codes, scales, rope = scope.layout.views(scope.kv_cache, scope.page_size)
        shape = codes.shape
        random = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        random[random & (0xFF if nan == 0x80 else 0x7F) == nan] = 1  # a subnormal
        exponents = torch.randint(-12, -8, scales.shape, device=device)
        rope.copy_(torch.randn(rope.shape, device=device) * SIZE)
        codes.view(torch.uint8).copy_(random)
        scales.view(torch.uint8).copy_(exponents + 127)
        values = random.view(scope.layout.fp8_dtype).double().unflatten(-1, (scales.shape[-1], -1))
        values = (values * 2.0 ** exponents[..., None]).flatten(-2)
        rows = torch.cat([values, rope.double()], -1).flatten(0, 1)
        assert torch.equal(rows.bfloat16().double(), rows)
        scopes.append(replace(scope, rows=rows.bfloat16()))
    case = replace(case, scopes=scopes)
    assert_attention(case, case.decode())
    assert_attention(case, case.prefill())


@pytest.mark.parametrize("which, byte, is_nan", [
    (0, 0x80, True), (0, 0x7F, False), (0, 0xFF, False), (1, 0x80, False), (1, 0x7F, True), (1, 0xFF, True),
])  # fmt: skip
def test_only_its_own_nan_makes_a_row_nan(which, byte, is_nan, device):
    case = pair_case(FNUZ, FN, device, num_q_heads=8, sink=False)
    scope = case.scopes[which]
    slot = int(scope.indices[0][(scope.indices[0] >= 0) & (scope.indices[0] < len(scope.rows))][0])
    codes, *_ = scope.layout.views(scope.kv_cache, scope.page_size)
    codes.view(torch.uint8)[slot // scope.page_size, slot % scope.page_size, 100] = byte
    selects = who_selects(scope, slot)
    _, lse = case.decode()
    assert selects.any() and not selects.all()
    assert torch.equal(lse.isnan().all(1), selects & is_nan)
    assert not lse[~selects].isnan().any()


@pytest.mark.parametrize("first, allowed, other", [
    ("dsv4", "dsv4 or dsv41_fp4", "dsv4_fnuz"), ("dsv4_fnuz", "dsv4_fnuz or dsv4", "dsv41_fp4"),
])  # fmt: skip
def test_the_encodings_have_one_order_and_fp4_follows_one_of_them(first, allowed, other, device):
    case = make_case(KV_LAYOUTS[first], device, extra=V4_SCOPES)
    message = f"extra_layout must be {allowed} with layout {first}, got {other}"
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_decode(*case.arguments(), **(case.op_options() | {"extra_layout": KV_LAYOUTS[other].id}))


def test_it_is_for_the_second_cache_of_a_call_only(device):
    layout = mla_fp8.KV_LAYOUTS[NAME]
    kv_cache, q = (
        layout.empty(2, 64, device),
        torch.zeros(1, 8, 512, dtype=torch.bfloat16, device=device),
    )
    indices = torch.zeros(1, 4, dtype=torch.int32, device=device)
    for backend in ("auto", "native", "reference"):
        with pytest.raises(ValueError, match=f"not {NAME}"):
            mla_fp8.sparse_decode(
                q, kv_cache, indices, layout=NAME, page_size=64, sm_scale=0.1, backend=backend
            )
    message = f"layout must not be {NAME}, which is for the second cache of a call only"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mla_fp8.sparse_decode(q, kv_cache, indices, layout=layout.id, page_size=64, sm_scale=0.1)
    numbers = {"dtype": torch.int32, "device": device}
    pages = (torch.tensor(x, **numbers) for x in ([0, 1], [0], [1]))
    with pytest.raises(RuntimeError, match=message):
        mla_fp8.paged_attention_ragged_latent(q, kv_cache, *pages, layout=NAME, page_size=64, sm_scale=0.1)
