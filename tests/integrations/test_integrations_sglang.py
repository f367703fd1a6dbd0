"""SGLang's plug-in over stand-ins with its signatures. ci/engines/probe.py runs it in SGLang's modules."""

import logging
import sys
from importlib import import_module
from types import SimpleNamespace

import engine_standins
import pytest
import torch
from sparse_cases import V4_SCOPES, make_case

import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS
from mla_fp8.integrations import attend, flash_mla_calls, log, sglang, sglang_v41_rows
from mla_fp8.testing import assert_within_flash_mla_tolerance

DSV32, DSV41, FP4 = (KV_LAYOUTS[name] for name in ("dsv32", "dsv41", "dsv41_fp4"))
V41_NAMES = "mla_fp8,mla_fp8_v41_rows"
V41_PAIRS = pytest.mark.parametrize("extra", [None, DSV41, FP4], ids=["alone", "dsv41", "dsv41_fp4"])


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        yield


@pytest.mark.parametrize("plugins", ["", "other", "mla_fp8x"])
def test_sglang_is_left_alone_unless_it_names_us(plugins, monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, plugins)
    mla_fp8_plugins.sglang()
    assert not registered and "SGLANG_PLUGINS=mla_fp8" in caplog.records[-1].getMessage()


@pytest.fixture
def hooks(monkeypatch):
    """What SGLang would call: each hook around SGLang's own function."""
    registered = engine_standins.sglang(monkeypatch, "other, mla_fp8")
    sglang.register()
    assert set(sglang.HOOKS) < set(registered) and len(registered) == len(sglang.HOOKS) + 3

    def around(target, hook):
        parts = 2 if target not in sglang.HOOKS else 1  # a method's, or a function's
        module, *names = target.rsplit(".", parts)
        original = import_module(module)
        for name in names:
            original = getattr(original, name)
        return lambda *args, **options: hook(original, *args, **options)

    assert {kind for _, kind in registered.values()} == {engine_standins.HookType.AROUND}
    return {target.rpartition(".")[2]: around(target, hook) for target, (hook, _) in registered.items()}


def test_one_line_says_what_was_taken_over_and_what_not(hooks, caplog):
    (record,) = caplog.get_records("setup")
    assert (
        "formats V32, V32_NO_ROPE and V4" in record.getMessage()
        and "V3.2 as they are, of V4 as they are" in record.getMessage()
    )
    assert "SGLang's own: " in record.getMessage()


def test_sglangs_sparse_decode_is_ours_and_the_rest_its_own(hooks, device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    call, arguments = hooks["flash_mla_with_kvcache"], engine_standins.decode_call(case)
    out, lse = call(**arguments)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)
    assert call(**arguments | {"kv_format": "V41_NEW"}) == ("SGLang's own", "V41_NEW")


def test_rows_without_rope_are_known_by_their_name_alone(hooks, device):
    """V4.1's rows have as many bytes."""
    case = make_case(KV_LAYOUTS["dsv32_nope"], device)
    call = engine_standins.decode_call(case)
    out, lse = hooks["flash_mla_with_kvcache"](**call, kv_format="V32_NO_ROPE")
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)
    assert hooks["flash_mla_with_kvcache"](**call, kv_format=None)[0] == "SGLang's own"
    beside = call | {"extra_k_cache": call["k_cache"][..., :288], "extra_indices_in_kvcache": call["indices"]}
    assert hooks["flash_mla_with_kvcache"](**beside, kv_format="V32_NO_ROPE")[0] == "SGLang's own"


def test_sglangs_sparse_prefill_is_ours_without_the_statistics_that_it_drops(hooks, device):
    case = make_case(KV_LAYOUTS["bf16_512"], device, page_size=1)
    s = case.scopes[0]
    call = hooks["flash_mla_sparse_fwd"]
    arguments = {
        "q": case.q, "kv": s.rows[:, None], "indices": s.indices[:, None], "sm_scale": case.sm_scale,
        "attn_sink": case.attn_sink, "topk_length": s.length,
    }  # fmt: skip
    out, max_logits, lse = call(**arguments, use_legacy=True)
    exact, _, exact_lse = case.expected()
    assert max_logits is lse is None
    assert_within_flash_mla_tolerance(out, exact_lse.float(), exact, exact_lse)
    assert call(**arguments, use_legacy=False) == "SGLang's own"


def test_sglangs_gathers_are_ours_for_the_layouts_that_we_have(hooks):
    v4, v32 = hooks["dequantize_k_cache_paged_dsv4"], hooks["dequantize_k_cache_paged_dsa"]
    slots = torch.arange(3)
    cache = KV_LAYOUTS["dsv4"].empty(1, 64, "cpu").zero_()
    assert v4(cache, slots, 64).shape == v4(cache, slots, page_size=64, layout="v4").shape == (3, 1, 512)
    assert v4(cache, slots, 64, None, "v41") == v4(cache, slots, 64, layout="v41") == "SGLang's own"
    rows = torch.zeros(8, 1, DSV32.bytes_per_token, dtype=torch.uint8)
    assert v32(rows.view(torch.float8_e4m3fn), slots).shape == (3, 1, 576)
    assert v32(rows[..., :528], slots) == "SGLang's own"


@pytest.mark.parametrize("kv_format", ["V32", "V32_NO_ROPE"])
@pytest.mark.parametrize("lengths", [True, False], ids=["its lengths", "lengths of other rows"])
def test_v32_decode_reads_its_pages_with_the_heads_that_are_there(
    lengths, kv_format, hooks, monkeypatch, device
):
    layout = {"V32": DSV32, "V32_NO_ROPE": KV_LAYOUTS["dsv32_nope"]}[kv_format]
    case = make_case(layout, device, sink=False)
    s, seen = case.scopes[0], []
    if not lengths:
        outside = torch.arange(s.indices.shape[1], device=device) >= s.length[:, None]
        s.indices[outside] = -1
    over_pages = attend.over_pages
    monkeypatch.setattr(attend, "over_pages", lambda *a, **o: seen.append((a, o)) or over_pages(*a, **o))
    given = s.length if lengths else s.length[:4]
    backend = SimpleNamespace(
        dsa_kv_cache_store_fp8=True, kv_cache_dim=layout.bytes_per_token, flashmla_kv_format=kv_format,
        physical_page_size=64,
    )  # fmt: skip
    layer = SimpleNamespace(tp_q_head_num=16, head_dim=layout.head_dim_qk)
    pages = s.kv_cache.view(torch.float8_e4m3fn)
    arguments = (
        case.q.flatten(1), pages, 512, case.sm_scale, layer, SimpleNamespace(dsa_cache_seqlens_int32=given),
        s.indices,
    )  # fmt: skip
    out = hooks["_forward_flashmla_kv"](backend, *arguments)
    exact, _, exact_lse = case.expected()
    ((args, options),) = seen
    assert args[0].shape[1] == 16 and (options["topk_length"] is given) == lengths
    assert out.shape == (6, 1, 16, 512)
    assert_within_flash_mla_tolerance(out[:, 0], exact_lse.float(), exact, exact_lse)
    others = {"dsa_kv_cache_store_fp8": False}, {"flashmla_kv_format": "V4"}, {"kv_cache_dim": 576}
    for change in others:
        other = SimpleNamespace(**vars(backend) | change)
        assert hooks["_forward_flashmla_kv"](other, *arguments) == "SGLang's own"


@pytest.mark.parametrize("packed, rows", [(True, 6), (True, 7), (False, 6)])
def test_v32_prefill_over_rows_has_the_heads_that_are_there(packed, rows, hooks, device, monkeypatch, caplog):
    """And says that pages are faster, where they are and rows were gathered from them."""
    log.say_once.cache_clear()
    monkeypatch.setattr(sglang, "_PROMPT_ROWS", rows)
    case = make_case(KV_LAYOUTS["bf16"], device, page_size=1)
    s = case.scopes[0]
    options = {"sm_scale": case.sm_scale, "topk_length": s.length, "attn_sink": case.attn_sink}
    backend = SimpleNamespace(dsa_kv_cache_store_fp8=packed)
    for _ in range(2):
        out = hooks["_forward_flashmla_sparse"](backend, case.q, s.rows[:, None], 512, s.indices, **options)
    assert caplog.text.count("--dsa-prefill-backend flashmla_kv") == (packed and rows == 6)
    exact, _, exact_lse = case.expected()
    assert out.shape == (6, 16, 512)
    assert_within_flash_mla_tolerance(out, exact_lse.float(), exact, exact_lse)


@pytest.mark.parametrize(
    "heads, v41, sm120, given",
    [(16, False, False, 16), (16, True, False, 64), (16, False, True, 64), (200, False, False, 64)],
)
def test_v4s_query_heads_are_as_they_are_where_its_calls_are_ours(
    heads, v41, sm120, given, hooks, monkeypatch
):
    module = sys.modules["sglang.srt.models.deepseek_v4"]
    monkeypatch.setattr(module, "get_platform", lambda: SimpleNamespace(is_sm120=sm120))
    layer = SimpleNamespace(n_local_heads=heads, is_dsv41=v41)
    assert hooks["_kernel_num_heads"](layer, 5) == given


def test_an_sglang_whose_interface_changed_is_named_with_what_changed(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, "mla_fp8")
    module = sys.modules["sglang.kernels.ops.attention.dsv4.dequant_k_cache"]
    module.dequantize_k_cache_paged_dsv4 = lambda quant_k_cache, page_table: None
    sglang.register()
    (record,) = caplog.records
    assert "not used in SGLang 0.5.23" in record.getMessage() and not registered
    assert "without page_table_1_flattened, page_size, out, layout" in record.getMessage()


def test_a_call_with_a_parameter_that_we_do_not_know_is_a_refusal(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, "mla_fp8")
    module = sys.modules["sglang.kernels.ops.attention.flash_mla_interface"]
    module.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, attn_sink, topk_length, use_legacy, new: (
        None
    )
    sglang.register()
    (record,) = caplog.records
    assert "flash_mla_sparse_fwd takes new, which ours does not" in record.getMessage() and not registered


def test_v32s_heads_stay_padded_if_its_layer_changed_and_that_is_said(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, "mla_fp8")
    layer = sys.modules["sglang.srt.layers.attention.dsa_backend"]
    layer.DeepseekSparseAttnBackend = type("DeepseekSparseAttnBackend", (), {})
    sglang.register()
    (record,) = caplog.records
    assert set(registered) == {*sglang.HOOKS, *sglang.METHODS["V4"]}
    assert "of V3.2 padded: " in record.getMessage() and "has no Deepseek" in record.getMessage()
    assert "of V4 as they are" in record.getMessage()


# V4.1's own rows


def choose(registered):
    hook, kind = registered[sglang_v41_rows.CHOICE]
    assert kind is engine_standins.HookType.AROUND
    return hook(engine_standins.select_dsv4_kv_layout)


@pytest.mark.parametrize("named", ["", "mla_fp8", "mla_fp8_v41_rows"])
def test_v41s_rows_are_sglangs_choice_unless_both_switches_are_named(named, monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, named)
    mla_fp8_plugins.sglang_v41_rows()
    assert not registered and ("has to name mla_fp8, too" in caplog.text) == (named == "mla_fp8_v41_rows")


def test_v41s_rows_are_chosen_and_then_read(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, V41_NAMES)
    sglang_v41_rows.register()
    assert set(registered) == {sglang_v41_rows.CHOICE} and "V4.1's own rows" in caplog.text
    assert not flash_mla_calls.reads_v41_rows()
    assert choose(registered) == ("v41", "auto") and flash_mla_calls.reads_v41_rows()


@pytest.mark.parametrize("rows, backend, hopper", [
    ("v4", "flashmla", True), ("auto", "trtllm", True), ("v41", "flashmla_mega", True),
    ("v41", "flashmla", False),
])  # fmt: skip
def test_another_choice_stays_sglangs(rows, backend, hopper, monkeypatch):
    registered = engine_standins.sglang(monkeypatch, V41_NAMES)
    sglang_v41_rows.register()
    pool = sys.modules["sglang.srt.mem_cache.deepseek_v4_memory_pool"]
    pool.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(dsv4_attn_backend=backend))
    pool.get_platform = lambda: SimpleNamespace(is_sm90=hopper)
    sys.modules["sglang.srt.environ"].envs.SGLANG_DSV4_KV_LAYOUT.given = rows
    assert choose(registered) == "SGLang's own" and not flash_mla_calls.reads_v41_rows()


def test_rows_with_their_scales_behind_each_are_refused(monkeypatch):
    registered = engine_standins.sglang(monkeypatch, V41_NAMES)
    sglang_v41_rows.register()
    sys.modules["sglang.srt.environ"].envs.SGLANG_DSV4_KV_LAYOUT.given = "V41_NEW"
    with pytest.raises(ValueError, match=r"v41_new has each row's scales behind the row.*: take v41"):
        choose(registered)


@pytest.mark.parametrize("choice, page_bytes, reason", [
    (None, None, "has no select_dsv4_kv_layout"),
    (lambda model: 0, None, "select_dsv4_kv_layout takes model, which ours does not"),
    (engine_standins.select_dsv4_kv_layout, lambda self, n: 530 * n, "its rows of v41 have another size"),
])  # fmt: skip
def test_a_version_that_differs_is_named(choice, page_bytes, reason, monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, V41_NAMES)
    pool = sys.modules["sglang.srt.mem_cache.deepseek_v4_memory_pool"]
    pool.select_dsv4_kv_layout = choice
    if page_bytes is not None:
        monkeypatch.setattr(engine_standins.KVLayout, "page_bytes", page_bytes)
    sglang_v41_rows.register()
    assert not registered and reason in caplog.text


@V41_PAIRS
@pytest.mark.parametrize("kv_format", [None, "V41"])
def test_decode_over_v41s_rows_is_ours(kv_format, extra, hooks, device):
    second = None if extra is None else V4_SCOPES | {"layout": extra}
    case = make_case(DSV41, device, extra=second)
    call = hooks["flash_mla_with_kvcache"]
    arguments = engine_standins.decode_call(case) | {"kv_format": kv_format}
    assert call(**arguments) == ("SGLang's own", kv_format)  # the switch is off
    flash_mla_calls.read_v41_rows(True)
    out, lse = call(**arguments)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)
    assert call(**arguments | {"kv_format": "V41_NEW"}) == ("SGLang's own", "V41_NEW")


def test_entries_that_stand_beside_no_such_rows_stay_sglangs(hooks, device):
    flash_mla_calls.read_v41_rows(True)
    v4, v41 = (make_case(KV_LAYOUTS[x], device, extra=V4_SCOPES) for x in ("dsv4", "dsv41"))
    fp4 = make_case(DSV41, device, extra=V4_SCOPES | {"layout": FP4})
    a, b, c = (engine_standins.decode_call(x) for x in (v4, v41, fp4))
    call = hooks["flash_mla_with_kvcache"]
    assert call(**a | {"extra_k_cache": c["extra_k_cache"]})[0] == "SGLang's own"
    assert call(**b | {"extra_k_cache": a["extra_k_cache"]})[0] == "SGLang's own"


def test_gathers_of_v41s_rows_and_its_query_heads_are_ours(hooks):
    flash_mla_calls.read_v41_rows(True)
    gather, slots = hooks["dequantize_k_cache_paged_dsv4"], torch.arange(3)
    layouts = engine_standins.KVLayout
    for name, layout in ((layouts.V41, DSV41), (layouts.V41_FP4, FP4)):
        cache = layout.empty(1, 64, "cpu").zero_()
        assert gather(cache, slots, page_size=64, layout=name).shape == (3, 1, 512)
    assert gather(cache, slots, 64, None, layouts.V41_NEW) == "SGLang's own"
    layer = SimpleNamespace(n_local_heads=16, is_dsv41=True)
    assert hooks["_kernel_num_heads"](layer, 5) == 16
