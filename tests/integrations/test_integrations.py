"""Entry points that engines load, and the probes and calls that both plug-ins are made of."""

import re
import subprocess
import sys

import engine_standins
import pytest
import torch
from sparse_cases import V4_SCOPES, make_case, packed_layouts

import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS, probes
from mla_fp8.integrations import attend, flash_mla_calls, log, sglang, vllm
from mla_fp8.testing import assert_within_flash_mla_tolerance

NAN = float("nan")


@pytest.mark.parametrize(
    "engine, register",
    [
        ("vllm", mla_fp8_plugins.vllm),
        ("vllm", vllm.register_flash_mla_calls),
        ("sglang", sglang.register),
    ],
)
def test_without_the_engine_an_entry_point_says_so_and_raises_nothing(engine, register, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, engine, None)
    register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search("is not installed|No module named .vllm", record.getMessage())


def test_importing_the_integrations_imports_no_engine():
    code = (
        "import sys, mla_fp8.integrations.vllm, mla_fp8.integrations.sglang; "
        "print([m for m in ('vllm', 'sglang') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    "theirs, known, reason",
    [
        (lambda q, k: 0, (), None),
        (lambda q, k, scale: 0, (), None),
        (lambda *args, **options: 0, (), None),
        (lambda q, k, out: 0, (), "takes out, which ours does not"),
        (lambda q, k, out: 0, ("out",), None),
        (lambda q: 0, (), "does not take k, which ours needs"),
    ],
)
def test_signatures_are_compared_in_both_directions(theirs, known, reason):
    assert probes.why_not_replace(theirs, lambda q, k, scale=None: 0, known) == reason
    assert probes.why_not_replace(theirs, lambda original, q, k, scale=None: 0, known) == reason


@packed_layouts
@pytest.mark.parametrize("kv_format", [None, "V32", "V4"])
def test_a_sparse_decode_is_ours_under_every_name_of_its_format(layout, kv_format, device):
    case = make_case(layout, device, extra=V4_SCOPES if layout.name == "dsv4" else None)
    arguments = engine_standins.decode_call(case) | {"kv_format": kv_format}
    out, lse = flash_mla_calls.around_decode(engine_standins.sgl_flash_mla_with_kvcache, **arguments)
    exact, _, exact_lse = case.expected()
    assert out.shape == (6, 1, 16, 512) and lse.shape == (6, 16, 1)
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)


def test_what_is_given_is_written_in_place_and_nothing_else(device):
    """Engines pass a part of a larger buffer."""
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    buffer = torch.full((8, 16, 512), NAN, device=device).bfloat16()
    arguments = engine_standins.decode_call(case) | {"out": buffer[1:7].unsqueeze(1)}
    out, _ = flash_mla_calls.around_decode(decode_with_out, **arguments)
    assert out.data_ptr() == buffer[1].data_ptr()
    plain, _ = flash_mla_calls.around_decode(decode_with_out, **engine_standins.decode_call(case))
    assert torch.equal(buffer[1:7], plain[:, 0])
    assert buffer[0].isnan().all() and buffer[7].isnan().all()

    rows = make_case(KV_LAYOUTS["bf16_512"], device, page_size=1)
    s = rows.scopes[0]
    buffer.fill_(NAN)
    given = (rows.q, s.rows[:, None], s.indices[:, None], rows.sm_scale)
    options = {"attn_sink": rows.attn_sink, "topk_length": s.length}
    out, max_logits, lse = flash_mla_calls.around_prefill(
        prefill_with_out, *given, **options, out=buffer[1:7]
    )
    exact = rows.expected()
    assert out.data_ptr() == buffer[1].data_ptr()
    assert_within_flash_mla_tolerance(buffer[1:7], lse, exact[0], exact[2])
    torch.testing.assert_close(max_logits.double(), exact[1], rtol=1e-4, atol=1e-4)
    assert buffer[0].isnan().all() and buffer[7].isnan().all()


def decode_with_out(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None,
    enable_batch_invariant=False,
):  # fmt: skip
    raise AssertionError("FlashMLA was called")


def prefill_with_out(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    raise AssertionError("FlashMLA was called")


@pytest.mark.parametrize(
    "change", [{"indices": None}, {"is_fp8_kvcache": False}, {"causal": True}, {"kv_format": "V41"}], ids=str
)
def test_calls_that_we_do_not_have_go_to_the_original_and_that_is_said_once(change, caplog):
    log.say_once.cache_clear()
    arguments = engine_standins.decode_call(make_case(KV_LAYOUTS["dsv4"], "cpu")) | change

    def original(**given):
        return given

    with caplog.at_level("INFO"):
        for _ in range(2):
            assert flash_mla_calls.around_decode(original, **arguments) == arguments
    (record,) = caplog.records
    assert "stays FlashMLA's" in record.getMessage()
    narrow = arguments | {"k_cache": arguments["k_cache"][..., :528]}
    assert flash_mla_calls.around_decode(original, **narrow) == narrow


def test_entries_of_another_format_than_the_window_go_to_the_original(caplog):
    """SGLANG_DSV4_COMPRESSED_KV_LAYOUT=fp4: FP4 rows beside V4's."""
    log.say_once.cache_clear()
    rows, entries = (KV_LAYOUTS[name].bytes_per_token for name in ("dsv4", "dsv41_fp4"))
    arguments = engine_standins.decode_call(make_case(KV_LAYOUTS["dsv4"], "cpu", extra=V4_SCOPES))
    arguments["extra_k_cache"] = arguments["extra_k_cache"][..., :entries]

    def original(**given):
        return given

    with caplog.at_level("INFO"):
        assert flash_mla_calls.around_decode(original, **arguments) == arguments
    assert f"stays FlashMLA's for entries of {entries} bytes beside rows of {rows}" in caplog.text


def test_tokens_of_a_request_that_share_its_length_are_rows_of_their_own(device):
    """Speculation: three tokens for each of two requests."""
    case = make_case(KV_LAYOUTS["dsv32"], device, sink=False)
    case.scopes[0].length[:] = torch.tensor([50, 50, 50, 80, 80, 80], dtype=torch.int32)
    given = engine_standins.decode_call(case)
    given |= {
        "q": case.q.view(2, 3, 16, 576), "indices": case.scopes[0].indices.view(2, 3, -1),
        "topk_length": case.scopes[0].length[::3].contiguous(),
    }  # fmt: skip
    usable = case.scopes[0].rows.isfinite().all(1)  # the lengths are not those that the slots were filled for
    safe = given["indices"].clamp(0, len(usable) - 1).long()
    given["indices"] = given["indices"].where(usable[safe], -1)
    case.scopes[0].indices = given["indices"].view(6, -1)
    out, lse = flash_mla_calls.around_decode(decode_with_out, **given)
    exact, _, exact_lse = case.expected()
    assert out.shape == (2, 3, 16, 512) and lse.shape == (2, 16, 3)
    assert_within_flash_mla_tolerance(out.view(6, 16, 512), lse.mT.reshape(6, 16), exact, exact_lse)


@pytest.mark.parametrize("num_tokens", [6, 256])
@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
def test_every_batch_is_read_straight_from_the_pages_by_one_op(num_tokens, into, monkeypatch):
    """Which allocates the workspace that its plan asks for, and nothing else if the engine has an output."""
    torch.manual_seed(0)
    case = make_case(KV_LAYOUTS["dsv32"], "cpu", num_tokens=num_tokens, num_q_heads=16, topk=16)
    called, ops = [], torch.ops.mla_fp8

    class Ops:
        def __getattr__(self, name):
            def spied(*args, **options):
                called.append((name, options.get("allocate_workspace")))
                return getattr(ops, name)(*args, **options)

            return spied

    monkeypatch.setattr(torch.ops, "mla_fp8", Ops())
    options = {k: x for k, x in case.options().items() if x is not None}
    given = case.q.new_full((num_tokens, 16, 512), float("nan")) if into else None
    out, lse = attend.over_pages(*case.arguments(), **options, out=given)
    exact, _, exact_lse = case.expected()
    assert called == [("sparse_decode_out", True) if into else ("sparse_decode", None)]
    assert (out is given) == into
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)
