import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from assertions import assert_attention
from code_cases import assert_reads_every_code, e4m3_layouts
from sparse_cases import V4_SCOPES, Case, all_layouts, make_case, packed_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.testing import assert_within_flash_mla_tolerance

OPS = torch.ops.mla_fp8


def check(case: Case) -> None:
    assert_attention(case, case.decode())


@all_layouts
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_agrees_with_float64_over_poisoned_caches(layout, page_size, sink, device):
    check(make_case(layout, device, page_size=page_size, sink=sink))


@all_layouts
@pytest.mark.parametrize("num_q_heads", [1, 3, 8, 24, 64, 128])
def test_any_head_count(layout, num_q_heads, device):
    check(make_case(layout, device, num_q_heads=num_q_heads, num_tokens=3))


@packed_layouts
@pytest.mark.parametrize("topk", [1, 5, 63, 64, 65, 192, 640, 1152, 2048])
def test_any_topk(layout, topk, device):
    check(make_case(layout, device, topk=topk, num_tokens=3, num_q_heads=8, num_slots=3000))


@all_layouts
@pytest.mark.parametrize("page_size", [64, 256])
def test_two_caches_are_one_softmax(layout, page_size, device):
    check(make_case(layout, device, page_size=page_size, num_slots=600, extra=V4_SCOPES))


def test_two_caches_equal_one_cache_that_holds_both(device):
    layout = KV_LAYOUTS["dsv4"]
    case = make_case(layout, device, num_tokens=1, topk=64, extra={"topk": 32})
    first, second = case.scopes
    both = replace(
        first,
        kv_cache=torch.cat([first.kv_cache, second.kv_cache]),
        indices=torch.cat(
            [
                first.indices.where((first.indices >= 0) & (first.indices < len(first.rows)), -1),
                second.indices.where((second.indices >= 0) & (second.indices < len(second.rows)), -1)
                .add(len(first.rows))
                .where((second.indices >= 0) & (second.indices < len(second.rows)), -1),
            ],
            1,
        ),
        length=None,
    )
    out, lse = replace(case, scopes=[replace(first, length=None), replace(second, length=None)]).decode()
    want_out, want_lse = replace(case, scopes=[both]).decode()
    torch.testing.assert_close(out, want_out, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@all_layouts
def test_a_token_without_keys_gives_zero_and_minus_infinity(layout, device):
    case = make_case(layout, device, extra=V4_SCOPES)
    out, lse = case.decode()
    assert (out[1] == 0).all() and lse[1].isneginf().all()
    assert (lse[[0, 2, 5]].isfinite()).all()


def test_no_keys_at_all(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, num_tokens=2)
    empty = replace(case.scopes[0], indices=case.scopes[0].indices[:, :0], length=None)
    out, lse = replace(case, scopes=[empty]).decode()
    assert (out == 0).all() and lse.isneginf().all()
    nothing = replace(case.scopes[0], kv_cache=case.scopes[0].kv_cache[:0])
    out, lse = replace(case, scopes=[nothing]).decode()
    assert (out == 0).all() and lse.isneginf().all()


def test_zero_tokens(device):
    out, lse = make_case(KV_LAYOUTS["dsv32"], device).tokens(slice(0, 0)).decode()
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@packed_layouts
def test_results_are_repeatable_and_independent_of_the_batch(layout, device):
    case = make_case(layout, device, num_tokens=9, topk=300, extra=V4_SCOPES)
    out, lse = case.decode(batch_invariant=True)
    again = case.decode(batch_invariant=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    for which in (slice(0, 1), slice(2, 5), slice(5, 9)):
        part = case.tokens(which).decode(batch_invariant=True)
        assert torch.equal(part[0], out[which]) and torch.equal(part[1], lse[which])


@pytest.mark.parametrize("num_q_heads", [13, 17, 127])
def test_every_head_is_written_when_threads_do_not_divide_them(num_q_heads):
    """So many keys that the heads of the only token are shared out."""
    case = make_case(
        KV_LAYOUTS["dsv4"], "cpu", num_tokens=1, num_q_heads=num_q_heads, topk=1300, num_slots=1500
    )
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(case.prefill_into_nan())
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(torch.equal(got, want) for got, want in zip(result, results[0], strict=True))
        assert not any(x.isnan().any() for x in result)


def test_results_do_not_depend_on_the_number_of_threads():
    case = make_case(KV_LAYOUTS["dsv4"], "cpu", num_tokens=1, num_q_heads=24, topk=2000, num_slots=3000)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(case.decode())
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


MEMORY_PROBE = """
import resource, torch, mla_fp8
layout = mla_fp8.KV_LAYOUTS["dsv4"]
kv_cache = layout.empty(64, 64, "cpu").zero_()
q = torch.randn(1, 128, layout.head_dim_qk).bfloat16()
indices = torch.randint(4096, (1, 1 << 18), dtype=torch.int32)
def attend(topk):
    mla_fp8.sparse_decode(q, kv_cache, indices[:, :topk], layout=layout, page_size=64, sm_scale=0.1)
attend(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend(1 << 18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_extra_memory_does_not_grow_with_topk():
    """One float per head and key would be 128 MiB here."""
    result = subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 16 << 10  # KiB


@packed_layouts
def test_other_rows_do_not_matter(layout, device):
    case = make_case(layout, device)
    out, lse = case.decode()
    case.q[1:] = float("nan")
    case.scopes[0].indices[1:] = 0
    after = case.decode()
    assert torch.equal(after[0][0], out[0]) and torch.equal(after[1][0], lse[0])


@pytest.mark.parametrize("num_q_heads, padded", [(1, 8), (13, 16), (17, 32), (40, 64), (65, 128)])
def test_padded_heads_change_nothing_in_the_real_ones(num_q_heads, padded, device):
    """Up to the next of 8, 16, 32, 64 heads, and above 64."""
    case = make_case(KV_LAYOUTS["dsv32"], device, num_q_heads=num_q_heads)
    out, lse = case.decode(batch_invariant=True)
    q = case.q.new_zeros(len(case.q), padded, case.q.shape[2])
    q[:, :num_q_heads] = case.q
    sink = torch.full((padded,), -float("inf"), device=device)
    sink[:num_q_heads] = case.attn_sink
    wide = replace(case, q=q, attn_sink=sink).decode(batch_invariant=True)
    assert torch.equal(wide[0][:, :num_q_heads], out) and torch.equal(wide[1][:, :num_q_heads], lse)


def test_sink_limits(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, num_q_heads=4, sink=False)
    out, lse = case.decode()
    sink = torch.tensor([-float("inf"), float("inf"), 1e30, -1e30], device=device)
    with_sink = case.decode(attn_sink=sink)
    assert torch.equal(with_sink[1], lse)  # the sink is not part of lse
    assert torch.equal(with_sink[0][:, [0, 3]], out[:, [0, 3]])
    assert (with_sink[0][:, [1, 2]] == 0).all()


@pytest.mark.parametrize("sm_scale", [0.0, 1e-6, 1.0, 50.0, -1.0])
def test_any_logit_size(sm_scale, device):
    case = replace(make_case(KV_LAYOUTS["dsv32"], device), sm_scale=sm_scale)
    out, lse = case.decode()
    exact, _, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@packed_layouts
def test_nan_in_a_selected_slot_reaches_only_the_rows_that_select_it(layout, device):
    case = make_case(layout, device, num_tokens=3)
    indices = torch.arange(3 * 100, device=device, dtype=torch.int32).view(3, 100)
    scope = replace(case.scopes[0], indices=indices, length=None)
    mla_fp8.quantize_kv(
        torch.randn(300, layout.head_dim_qk, device=device).bfloat16(), indices.flatten(), scope.kv_cache,
        layout=layout, page_size=64,
    )  # fmt: skip
    poison = torch.full((1, layout.head_dim_qk), float("nan"), device=device).bfloat16()
    slot = torch.tensor([150], device=device)
    mla_fp8.quantize_kv(poison, slot, scope.kv_cache, layout=layout, page_size=64)
    out, _ = replace(case, scopes=[scope]).decode()
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@e4m3_layouts
def test_every_code_is_exact_and_a_nan_is_its_token_s(layout, device):
    def attend(q, cache, options):
        slots = torch.arange(len(q), dtype=torch.int32, device=device)[:, None]
        return mla_fp8.sparse_decode(q, cache, slots, **options)

    assert_reads_every_code(layout, device, attend)


def test_strided_inputs_and_cache_views(device):
    layout = KV_LAYOUTS["dsv4"]
    case = make_case(layout, device, extra=V4_SCOPES)
    want = case.decode()
    q = case.q.new_full((6, 20, layout.head_dim_qk + 64), float("nan"))
    q[:, 2:18, : layout.head_dim_qk] = case.q
    scopes = []
    for s in case.scopes:
        padded = torch.full((len(s.kv_cache), s.kv_cache.shape[1] + 576), 0xFF, device=device).byte()
        padded[:, : s.kv_cache.shape[1]] = s.kv_cache
        wide = s.indices.new_full((6, s.indices.shape[1] + 3), 0)
        wide[:, : s.indices.shape[1]] = s.indices
        scopes.append(replace(s, kv_cache=padded[:, :-576], indices=wide[:, : s.indices.shape[1]]))
    strided = replace(case, q=q[:, 2:18, : layout.head_dim_qk], scopes=scopes)
    views = [
        strided,
        replace(strided, scopes=[replace(s, kv_cache=s.kv_cache.view(torch.int8)) for s in scopes]),
        replace(
            strided,
            scopes=[replace(s, kv_cache=layout.flash_mla_view(s.kv_cache, s.page_size)) for s in scopes],
        ),
    ]
    for view in views:
        got = view.decode()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_out_form_writes_every_element_and_nothing_else(device):
    case = make_case(KV_LAYOUTS["dsv4"], device)
    want = case.decode()
    wide = torch.full((6, 16, 600), float("nan"), device=device).bfloat16()
    lse = torch.full((6, 16), float("nan"), device=device)
    outs = {"out": wide[:, :, 40:552], "lse": lse, "workspace": case.workspace()}
    OPS.sparse_decode_out(*case.arguments(), **case.op_options(), **outs)
    assert torch.equal(wide[:, :, 40:552], want[0]) and torch.equal(lse, want[1])
    assert wide[:, :, :40].isnan().all() and wide[:, :, 552:].isnan().all()


def test_page_offsets_past_two_gigabytes(device):
    layout = KV_LAYOUTS["dsv32"]
    case = make_case(layout, device, page_size=2, num_slots=6, topk=12, num_tokens=2)
    scope = case.scopes[0]
    stride = 2**30 + 16
    far = torch.empty(2 * stride + scope.kv_cache.shape[1], dtype=torch.uint8, device=device)
    view = far.as_strided(scope.kv_cache.shape, (stride, 1))
    view.copy_(scope.kv_cache)
    want, got = case.decode(), replace(case, scopes=[replace(scope, kv_cache=view)]).decode()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_reference_backend_agrees(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    (out, lse), (want, want_lse) = case.decode(), case.decode(backend="reference")
    torch.testing.assert_close(out, want, rtol=2**-6, atol=4e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@packed_layouts
def test_opcheck(layout, device):
    case = make_case(layout, device, num_tokens=3, extra=V4_SCOPES)
    torch.library.opcheck(OPS.sparse_decode.default, case.arguments(), case.op_options())
    out, lse = case.decode()
    out_options = case.op_options() | {"out": out, "lse": lse}
    torch.library.opcheck(OPS.sparse_decode_out.default, case.arguments(), out_options)


@pytest.mark.slow
def test_compiles_to_one_graph(device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)

    def layer(q, kv_cache, indices):
        return [t * 2 for t in mla_fp8.sparse_decode(q * 1, kv_cache, indices, **case.options())]

    got, want = torch.compile(layer, fullgraph=True)(*case.arguments()), layer(*case.arguments())
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def wrong(name, change, message):
    return pytest.param(name, change, message, id=f"{name}-{message[:24]}")


NAMES = ("q", "kv_cache", "indices")
ERRORS = [
    wrong("q", lambda t: t.float(), "q must have dtype torch.bfloat16, got torch.float32"),
    wrong("q", lambda t: t[0], r"q must have shape \[\*, \*, 512\], got \[16, 512\]"),
    wrong("q", lambda t: t[..., :500], r"q must have shape \[\*, \*, 512\], got \[6, 16, 500\]"),
    wrong("q", lambda t: t.repeat(1, 9, 1), "q must have 1 to 128 heads, got 144"),
    wrong("q", lambda t: t[:, :0], "q must have 1 to 128 heads, got 0"),
    wrong("q", lambda t: t.mT.contiguous().mT, "q must have stride 1 in its last dimension"),
    wrong("q", lambda t: t.new_zeros(6, 16, 513)[..., 1:], "q must be 16-byte aligned"),
    wrong("kv_cache", lambda t: t.float(), "kv_cache must have dtype torch.uint8 or torch.int8 or"),
    wrong(
        "kv_cache",
        lambda t: t[:, :-1],
        rf"kv_cache must have shape \[\*, {KV_LAYOUTS['dsv4'].page_bytes(64)}\], got",
    ),
    wrong("kv_cache", lambda t: t.view(-1)[1:-575].as_strided((2, t.shape[1]), (t.shape[1], 1)), "aligned"),
    wrong("kv_cache", lambda t: t[0], "kv_cache must have shape"),
    wrong("indices", lambda t: t.long(), "indices must have dtype torch.int32, got torch.int64"),
    wrong("indices", lambda t: t[:5], r"indices must have shape \[6, \*\], got \[5, 100\]"),
    wrong("indices", lambda t: t[None], "indices must have shape"),
    wrong("indices", lambda t: t.mT.contiguous().mT, "indices must have stride 1 in its last"),
    wrong("layout", lambda _: 99, r"layout must be in \[0, 13\), got 99"),
    wrong("page_size", lambda _: 0, "page_size must be in"),
    wrong("page_size", lambda _: 32, "kv_cache must have shape"),
    wrong("sm_scale", lambda _: float("nan"), "sm_scale must be finite, got nan"),
    wrong("sm_scale", lambda _: 1e300, r"sm_scale must be finite as a float32, got 1e\+300"),
    wrong("topk_length", lambda t: t[:5], r"topk_length must have shape \[6\], got \[5\]"),
    wrong("topk_length", lambda t: t.long(), "topk_length must have dtype torch.int32, got torch.int64"),
    wrong("topk_length", lambda t: t.repeat(2)[::2], "topk_length must be contiguous"),
    wrong("attn_sink", lambda t: t[:4], r"attn_sink must have shape \[16\], got \[4\]"),
    wrong("attn_sink", lambda t: t.double(), "attn_sink must have dtype torch.float32, got torch.float64"),
    wrong("extra_kv_cache", lambda _: None, "must be given together"),
    wrong("extra_kv_cache", lambda t: t[:, 1:], "extra_kv_cache must have shape"),
    wrong("extra_indices", lambda t: t.short(), "extra_indices must have dtype torch.int32, got torch.int16"),
    wrong("extra_indices", lambda t: t[:2], "extra_indices must have shape"),
    wrong("extra_topk_length", lambda t: t[:2], "extra_topk_length must have shape"),
    wrong("extra_page_size", lambda _: None, "must be given together"),
    wrong("extra_page_size", lambda _: -3, "page_size must be in"),
    wrong("scale", lambda _: torch.ones(1), "scale must be None for layout dsv4, got a tensor"),
    wrong("out", lambda t: t.half(), "out must have dtype torch.bfloat16, got torch.float16"),
    wrong("out", lambda t: t[..., :511], r"out must have shape \[6, 16, 512\], got"),
    wrong(
        "out",
        lambda t: t[:1].expand(6, 16, 512),
        "out must not overlap itself",
    ),
    wrong("lse", lambda t: t.mT.contiguous(), r"lse must have shape \[6, 16\], got \[16, 6\]"),
    wrong("lse", lambda t: t.mT.contiguous().mT, "lse must be contiguous"),
    wrong("workspace", lambda t: t.half(), "workspace must have dtype torch.float32, got torch.float16"),
    wrong("workspace", lambda t: t[::2], "workspace must be contiguous"),
]


@pytest.mark.parametrize("name, change, message", ERRORS)
def test_wrong_arguments_are_named_and_nothing_is_written(name, change, message, device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    out = torch.full((6, 16, 512), float("nan"), device=device).bfloat16()
    lse = torch.full((6, 16), float("nan"), device=device)
    arguments = dict(zip(NAMES, case.arguments(), strict=True)) | case.op_options() | {"out": out, "lse": lse}
    arguments["workspace"] = torch.empty(1000, device=device)
    wrong_value = change(arguments[name])
    if isinstance(wrong_value, torch.Tensor) and name == "scale":
        wrong_value = wrong_value.to(device)
    arguments[name] = wrong_value
    tensors = [arguments.pop(n) for n in NAMES]
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_decode_out(*tensors, **arguments)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("scale", [None, [1.0, 2.0], [0.0], [-1.0], [float("inf")], [float("nan")]])
def test_the_layer_scale_is_required_and_checked(scale):
    case = make_case(KV_LAYOUTS["fp8_e4m3"], "cpu")
    tensor = None if scale is None else torch.tensor(scale)
    with pytest.raises(RuntimeError, match=r"scale must (be given|have 1 element|be finite and positive)"):
        case.decode(scale=tensor)


def test_a_layer_scale_that_is_no_power_of_two(device):
    layout = KV_LAYOUTS["fp8_e4m3"]
    case = make_case(layout, device)
    scale = torch.tensor([0.37 * 2.0**-8], device=device)
    for s in case.scopes:
        s.rows = s.rows.double() * (scale.double() / case.scale.double())  # the same codes, another scale
    check_case = replace(case, scale=scale)
    out, lse = check_case.decode()
    exact, _, exact_lse = check_case.expected()
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)


def test_unknown_layouts_and_backends_are_refused():
    case = make_case(KV_LAYOUTS["dsv4"], "cpu")
    with pytest.raises(ValueError, match="layout must be one of dsv32, dsv4"):
        case.decode(layout="dsv5")
    with pytest.raises(ValueError, match=r"backend must be auto or one of native, .*, got 'nativ'"):
        case.decode(backend="nativ")
