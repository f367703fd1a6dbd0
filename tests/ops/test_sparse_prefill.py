from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_attention, assert_same
from sparse_cases import V4_SCOPES, Case, all_layouts, make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS

OPS = torch.ops.mla_fp8
row_layouts = pytest.mark.parametrize("name", ["bf16", "bf16_512"])


def workspace_case(name: str, device: str, **shape) -> tuple[Case, torch.Tensor]:
    """A case whose cache is plain rows, and these rows."""
    case = make_case(KV_LAYOUTS[name], device, page_size=1, **shape)
    return case, case.scopes[0].rows


def prefill(case: Case, rows: torch.Tensor, **changes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scope = case.scopes[0]
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    return mla_fp8.sparse_prefill(case.q, rows, scope.indices, **(options | changes))


@row_layouts
@pytest.mark.parametrize("num_q_heads", [1, 8, 40, 64, 128])
def test_workspace_form_agrees_with_float64(name, num_q_heads, device):
    case, rows = workspace_case(name, device, num_q_heads=num_q_heads)
    assert_attention(case, prefill(case, rows))


@row_layouts
@pytest.mark.parametrize("width", [1, 128, 192, 640, 1152])
def test_any_width(name, width, device):
    case, rows = workspace_case(name, device, topk=width, num_q_heads=8, num_slots=2000, num_tokens=5)
    assert_attention(case, prefill(case, rows))


@all_layouts
def test_pages_form_agrees_with_float64(layout, device):
    case = make_case(layout, device, page_size=64, extra=V4_SCOPES)
    assert_attention(case, case.prefill())


@all_layouts
def test_pages_form_is_sparse_decode_with_max_logits(layout, device):
    case = make_case(layout, device, extra=V4_SCOPES)
    out, _, lse = case.prefill()
    want, want_lse = case.decode(batch_invariant=True)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@row_layouts
def test_workspace_and_pages_forms_agree(name, device):
    case, rows = workspace_case(name, device)
    for got, want in zip(prefill(case, rows), case.prefill(), strict=True):
        assert torch.equal(got, want)


@row_layouts
def test_strided_rows(name, device):
    case, rows = workspace_case(name, device)
    wide = torch.full((len(rows), rows.shape[1] + 24), float("nan"), device=device).bfloat16()
    wide[:, 8:-16] = rows
    for got, want in zip(prefill(case, wide[:, 8:-16]), prefill(case, rows), strict=True):
        assert torch.equal(got, want)


@row_layouts
def test_tokens_without_keys(name, device):
    case, rows = workspace_case(name, device)
    out, max_logits, lse = prefill(case, rows)
    assert (out[1] == 0).all() and lse[1].isneginf().all() and max_logits[1].isneginf().all()
    out, max_logits, lse = prefill(case, rows[:0])
    assert (out == 0).all() and lse.isneginf().all() and max_logits.isneginf().all()
    assert prefill(case.tokens(slice(0, 0)), rows)[0].shape == (0, 16, 512)


@row_layouts
def test_a_token_does_not_see_the_others(name, device):
    case, rows = workspace_case(name, device, num_tokens=8)
    whole = prefill(case, rows)
    for which in (slice(0, 1), slice(3, 8)):
        for got, want in zip(prefill(case.tokens(which), rows), whole, strict=True):
            assert torch.equal(got, want[which])


def test_out_forms_write_every_element(device):
    case, rows = workspace_case("bf16", device)
    scope = case.scopes[0]
    outs = case.nan_outputs()
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    OPS.sparse_prefill_out(case.q, rows, scope.indices, **options, **outs, workspace=case.workspace())
    for got, want in zip(outs.values(), prefill(case, rows), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(case.prefill_into_nan(), case.prefill(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
def test_out_forms_without_max_logits(num_q_heads, device):
    case, rows = workspace_case("bf16", device, num_q_heads=num_q_heads)
    scope = case.scopes[0]
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    outs = case.nan_outputs() | {"max_logits": None}
    OPS.sparse_prefill_out(case.q, rows, scope.indices, **options, **outs, workspace=case.workspace())
    assert_same([outs["out"], outs["lse"]], prefill(case, rows)[::2])
    case = make_case(KV_LAYOUTS["dsv4"], device, num_q_heads=num_q_heads, extra=V4_SCOPES)
    outs = case.nan_outputs() | {"max_logits": None}
    OPS.sparse_prefill_paged_out(*case.arguments(), **case.op_options(), **outs, workspace=case.workspace())
    assert_same([outs["out"], outs["lse"]], case.prefill()[::2])


def test_rows_past_two_to_the_31_elements(device):
    case, rows = workspace_case("bf16_512", device, num_slots=3, topk=6, num_tokens=2)
    stride = 2**30 + 8
    far = torch.empty(2 * stride + 512, dtype=torch.bfloat16, device=device).as_strided((3, 512), (stride, 1))
    far.copy_(rows)
    for got, want in zip(prefill(case, far), prefill(case, rows), strict=True):
        assert torch.equal(got, want)


def test_opcheck(device):
    case, rows = workspace_case("bf16", device, num_tokens=3)
    scope = case.scopes[0]
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    outs = dict(zip(("out", "max_logits", "lse"), prefill(case, rows), strict=True))
    arguments = (case.q, rows, scope.indices)
    torch.library.opcheck(OPS.sparse_prefill.default, arguments, options)
    torch.library.opcheck(OPS.sparse_prefill_out.default, arguments, options | outs)
    torch.library.opcheck(OPS.sparse_prefill_out.default, arguments, options | outs | {"max_logits": None})
    torch.library.opcheck(OPS.sparse_prefill_paged.default, case.arguments(), case.op_options())
    torch.library.opcheck(OPS.sparse_prefill_paged_out.default, case.arguments(), case.op_options() | outs)


def test_compiles_to_one_graph(device):
    case, rows = workspace_case("bf16_512", device)

    length = case.scopes[0].length

    def layer(q, kv, indices, kv_cache):
        out, max_logits, lse = mla_fp8.sparse_prefill(q * 1, kv, indices, sm_scale=0.1, topk_length=length)
        paged = mla_fp8.sparse_prefill_paged(q, kv_cache, indices, **case.options())
        return out + 1, max_logits, lse, paged[0]

    arguments = (case.q, rows, case.scopes[0].indices, case.scopes[0].kv_cache)
    for got, want in zip(torch.compile(layer, fullgraph=True)(*arguments), layer(*arguments), strict=True):
        assert torch.equal(got, want)


ERRORS = [
    ("q", lambda t: t.half(), "q must have dtype torch.bfloat16, got torch.float16"),
    ("q", lambda t: t[..., :320], "q must have a last dimension of 512 or 576, got 320"),
    ("kv", lambda t: t.float(), "kv must have dtype torch.bfloat16, got torch.float32"),
    ("kv", lambda t: t[:, :512], r"kv must have shape \[\*, 576\], got \[\d+, 512\]"),
    ("kv", lambda t: t.mT.contiguous().mT, "kv must have stride 1 in its last dimension"),
    ("kv", lambda t: torch.nn.functional.pad(t, (0, 1))[:, :-1], "kv must be 16-byte aligned in every row"),
    ("indices", lambda t: t.long(), "indices must have dtype torch.int32, got torch.int64"),
    ("indices", lambda t: t[1:], r"indices must have shape \[6, \*\], got \[5, 100\]"),
    ("sm_scale", lambda _: -1e39, r"sm_scale must be finite as a float32, got -1e\+39"),
    ("sm_scale", lambda _: float("inf"), "sm_scale must be finite, got inf"),
    ("attn_sink", lambda t: t.half(), "attn_sink must have dtype torch.float32, got torch.float16"),
    ("topk_length", lambda t: t[:, None], r"topk_length must have shape \[6\], got \[6, 1\]"),
    ("out", lambda t: t[:, :8], r"out must have shape \[6, 16, 512\], got \[6, 8, 512\]"),
    ("max_logits", lambda t: t.double(), "max_logits must have dtype torch.float32, got torch.float64"),
    ("lse", lambda t: t[None], r"lse must have shape \[6, 16\], got \[1, 6, 16\]"),
]


@pytest.mark.parametrize("name, change, message", ERRORS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ERRORS)])
def test_wrong_arguments_are_named_and_nothing_is_written(name, change, message, device):
    case, rows = workspace_case("bf16", device)
    scope = case.scopes[0]
    arguments = {
        "q": case.q,
        "kv": rows,
        "indices": scope.indices,
        "sm_scale": case.sm_scale,
        "attn_sink": case.attn_sink,
        "topk_length": scope.length,
    } | case.nan_outputs()
    written = [arguments[n] for n in ("out", "max_logits", "lse")]
    arguments[name] = change(arguments[name])
    tensors = [arguments.pop(n) for n in ("q", "kv", "indices")]
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_prefill_out(*tensors, **arguments)
    assert all(t.isnan().all() for t in written)


def test_head_padding_is_exact(device):
    """On CUDA for the head counts that one variant of the kernel takes; elsewhere for all."""
    case, rows = workspace_case("bf16_512", device, num_q_heads=5)
    want = prefill(case, rows)
    extra = 3 if emulation.is_cuda(device) else 59
    q = torch.cat([case.q, case.q.new_zeros(len(case.q), extra, 512)], 1)
    sink = torch.cat([case.attn_sink, torch.full((extra,), -float("inf"), device=device)])
    wide = prefill(replace(case, q=q, attn_sink=sink), rows)
    for got, expected in zip(wide, want, strict=True):
        assert torch.equal(got[:, :5], expected)
