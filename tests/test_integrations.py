"""What engines load when this package is installed; stand-ins with their signatures are in their place."""

import inspect
import logging
import math
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import engine_standins
import peer_standins
import pytest
import torch
from sparse_cases import V4_SCOPES, make_case, packed_layouts

from mla_fp8 import KV_LAYOUTS
from mla_fp8.integrations import flash_mla_calls, sglang, vllm
from mla_fp8.testing import assert_within_flash_mla_tolerance

INF = float("inf")


@pytest.fixture(autouse=True)
def nothing_was_made_yet(caplog):
    vars(vllm).pop("SparseBackend", None)
    with caplog.at_level(logging.INFO, logger="mla_fp8"):
        yield
    vars(vllm).pop("SparseBackend", None)


def test_every_entry_point_names_a_function_that_takes_nothing():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.findall(r'entry-points."([\w.]+)"', text) == ["vllm.general_plugins", "sglang.srt.plugins"]
    named = re.findall(r'= "(mla_fp8\.integrations\.\w+):(\w+)"', text)
    assert len(named) == 3
    for module, function in named:
        assert not inspect.signature(getattr(import_module(module), function)).parameters


@pytest.mark.parametrize("register", ["vllm.register", "vllm.register_flash_mla_calls", "sglang.register"])
def test_without_the_engine_an_entry_point_says_so_and_raises_nothing(register, caplog, monkeypatch):
    engine, _, name = register.partition(".")
    monkeypatch.setitem(sys.modules, engine, None)
    getattr({"vllm": vllm, "sglang": sglang}[engine], name)()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "cannot be imported" in record.getMessage()


def test_importing_the_integrations_imports_no_engine():
    code = (
        "import sys, mla_fp8.integrations.vllm, mla_fp8.integrations.sglang; "
        "print([m for m in ('vllm', 'sglang') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def resolved(monkeypatch):
    """The backend as vLLM finds it: by the path that was registered."""
    engine = engine_standins.vllm(monkeypatch)
    vllm.register()
    vllm.register()  # vLLM calls it in every process, perhaps twice
    ((member, path),) = engine.registered.items()
    assert member.name == "CUSTOM"
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_vllm_gets_a_backend_under_the_name_that_is_free(monkeypatch, caplog):
    """vLLM #30869: CUSTOM is the slot for others; #51013's names stay what they were."""
    backend = resolved(monkeypatch)
    assert issubclass(backend, engine_standins.FlashMLASparseBackend) and backend.is_sparse()
    assert backend.get_name() == "CUSTOM" and backend is vllm.SparseBackend
    assert not caplog.records


def test_fp8_is_not_among_the_dtypes_of_the_backend(monkeypatch):
    """vLLM #35891: fp8 becomes fp8_ds_mla for built-in names only; ours would get a plain cache."""
    assert resolved(monkeypatch).supported_kv_cache_dtypes == ("auto", "bfloat16", "fp8_ds_mla")


@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
def test_vllms_fp8_layers_run_on_our_kernels_without_padding(num_q_heads, monkeypatch, device):
    """vLLM #48047."""
    impl = resolved(monkeypatch).get_impl_cls()(num_q_heads, None)
    assert impl.fp8_decode_padded_heads == num_q_heads
    layout = KV_LAYOUTS["dsv32"]
    case = make_case(layout, device, num_q_heads=num_q_heads, sink=False)
    case = replace(case, scopes=[replace(s, length=None) for s in case.scopes])
    s = case.scopes[0]
    s.indices[2, 5:] = -1
    finite = s.rows.isfinite().all(1)
    inside = (s.indices >= 0) & (s.indices < len(s.rows))
    s.indices[inside & ~finite[s.indices.where(inside, 0).long()]] = -1
    impl.softmax_scale = case.sm_scale
    cache = layout.flash_mla_view(s.kv_cache, 64).squeeze(2)  # [num_blocks, block_size, row bytes]
    out, lse = impl._fp8_flash_mla_kernel(case.q[:, None], cache, s.indices[:, None], object())
    exact, exact_lse = engine_standins.expected(case)
    assert out.shape == (6, 1, num_q_heads, 512) and lse.shape == (6, num_q_heads, 1)
    lse = lse[:, :, 0]
    assert_within_flash_mla_tolerance(out[:, 0], lse.where(lse != INF, -INF), exact, exact_lse)


def test_vllms_bf16_layers_run_on_our_kernels_on_the_heads_that_are_real(monkeypatch, device):
    impl = resolved(monkeypatch).get_impl_cls()(16, None)
    case = make_case(KV_LAYOUTS["bf16"], device, num_q_heads=16, sink=False, page_size=1)
    s, impl.softmax_scale = case.scopes[0], case.sm_scale
    q = torch.full((6, 64, 576), float("nan"), device=device).bfloat16()  # vLLM's buffer: the rest is garbage
    q[:, :16] = case.q
    out, lse = impl._bf16_flash_mla_kernel(q, s.rows.view(-1, 1, 576), s.indices, s.length, 16)
    exact, exact_lse = engine_standins.expected(case)
    assert_within_flash_mla_tolerance(out, lse.where(lse != INF, -INF), exact, exact_lse)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda m: delattr(m.FlashMLASparseImpl, "_bf16_flash_mla_kernel"),
            "has no FlashMLASparseImpl._bf16",
        ),
        (
            lambda m: setattr(m.FlashMLASparseImpl, "_fp8_flash_mla_kernel", lambda self, q, cache: None),
            "_fp8_flash_mla_kernel without kv_c_and_k_pe_cache, topk_indices, kernel_metadata",
        ),
    ],
)
def test_a_vllm_whose_interface_changed_is_named_with_what_changed(spoil, message, monkeypatch, caplog):
    """vLLM renamed these twice in 2026."""
    engine = engine_standins.vllm(monkeypatch)
    module = engine.modules["vllm.v1.attention.backends.mla.flashmla_sparse"]
    module.FlashMLASparseImpl = type("FlashMLASparseImpl", (), dict(vars(engine_standins.FlashMLASparseImpl)))
    spoil(module)
    vllm.register()
    (record,) = caplog.records
    assert "vLLM 0.99 has" in record.getMessage() and message in record.getMessage()
    assert "the adapter was written for" in record.getMessage() and not engine.registered


@pytest.mark.parametrize("plugins", [None, [], ["mla_fp8"]], ids=str)
def test_flash_mlas_calls_stay_where_they_are_unless_we_are_named(plugins, monkeypatch):
    engine = engine_standins.vllm(monkeypatch, plugins)
    vllm.register_flash_mla_calls()
    calls = engine.modules["vllm.v1.attention.ops.flashmla"]
    assert calls.flash_mla_with_kvcache.__code__ is peer_standins.flash_mla_with_kvcache.__code__


def decode_call(case) -> dict:
    main, *extra = case.scopes
    arguments = {
        "q": case.q[:, None],
        "k_cache": case.layout.flash_mla_view(main.kv_cache, main.page_size),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": object(),
        "softmax_scale": case.sm_scale,
        "is_fp8_kvcache": True,
        "indices": main.indices[:, None],
        "attn_sink": case.attn_sink,
        "topk_length": main.length,
    }
    for s in extra:
        arguments |= {
            "extra_k_cache": case.layout.flash_mla_view(s.kv_cache, s.page_size),
            "extra_indices_in_kvcache": s.indices[:, None],
            "extra_topk_length": s.length,
        }
    return arguments


@packed_layouts
def test_named_by_vllm_we_serve_its_sparse_calls_where_they_are_imported(layout, monkeypatch, device):
    """DeepSeek V4's layers know vLLM's own backends only: their calls are what can be replaced."""
    engine = engine_standins.vllm(monkeypatch, ["mla_fp8_flash_mla"])
    calls = engine.modules["vllm.v1.attention.ops.flashmla"]
    importer = peer_standins.install(monkeypatch, "vllm.models.importer", calls.flash_mla_with_kvcache)
    for _ in range(2):
        vllm.register_flash_mla_calls()
    assert importer.flash_mla_with_kvcache is calls.flash_mla_with_kvcache
    case = make_case(layout, device, extra=V4_SCOPES if layout.name == "dsv4" else None)
    out, lse = importer.flash_mla_with_kvcache(**decode_call(case))  # 16 heads: FlashMLA has no such kernel
    exact, exact_lse = engine_standins.expected(case)
    lse = lse[:, :, 0]
    assert_within_flash_mla_tolerance(out[:, 0], lse.where(lse != INF, -INF), exact, exact_lse)


@pytest.mark.parametrize(
    "change", [{"indices": None}, {"is_fp8_kvcache": False}, {"causal": True}, {"kv_format": "V41"}], ids=str
)
def test_calls_that_we_do_not_have_go_to_the_original(change):
    arguments = decode_call(make_case(KV_LAYOUTS["dsv4"], "cpu")) | change
    assert flash_mla_calls.decode(lambda **given: given, **arguments) == arguments
    narrow = arguments | {"k_cache": arguments["k_cache"][..., :528]}
    assert flash_mla_calls.decode(lambda **given: given, **narrow) == narrow


@pytest.mark.parametrize("plugins", ["", "other", "mla_fp8x"])
def test_sglang_is_left_alone_unless_it_names_us(plugins, monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, plugins)
    sglang.register()
    assert not registered and "SGLANG_PLUGINS=mla_fp8" in caplog.records[-1].getMessage()


@pytest.fixture
def hooks(monkeypatch):
    """What SGLang would call: each hook around SGLang's own function."""
    registered = engine_standins.sglang(monkeypatch, "other, mla_fp8")
    sglang.register()
    assert set(registered) == set(sglang.HOOKS) == set(sglang._PARAMETERS)

    def around(target, hook):
        module, _, name = target.rpartition(".")
        original = getattr(import_module(module), name)
        return lambda *args, **options: hook(original, *args, **options)

    assert {kind for _, kind in registered.values()} == {engine_standins.HookType.AROUND}
    return {target.rpartition(".")[2]: around(target, hook) for target, (hook, _) in registered.items()}


def test_sglangs_sparse_decode_is_ours_and_the_rest_its_own(hooks, device):
    case = make_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    call = hooks["flash_mla_with_kvcache"]
    out, lse = call(**decode_call(case))
    exact, exact_lse = engine_standins.expected(case)
    lse = lse[:, :, 0]
    assert_within_flash_mla_tolerance(out[:, 0], lse.where(lse != INF, -INF), exact, exact_lse)
    assert call(**decode_call(case) | {"kv_format": "V41_NEW"}) == ("SGLang's own", "V41_NEW")


def test_sglangs_sparse_prefill_is_ours_with_its_statistics_in_base_2(hooks, device):
    case = make_case(KV_LAYOUTS["bf16_512"], device, page_size=1)
    s = case.scopes[0]
    call = hooks["flash_mla_sparse_fwd"]
    arguments = {
        "q": case.q, "kv": s.rows[:, None], "indices": s.indices[:, None], "sm_scale": case.sm_scale,
        "attn_sink": case.attn_sink, "topk_length": s.length,
    }  # fmt: skip
    out, max_logits, lse = call(**arguments, use_legacy=True)
    exact, exact_max, exact_lse = case.expected()
    natural = lse.where(lse != INF, -INF) * math.log(2)
    assert_within_flash_mla_tolerance(out, natural, exact, exact_lse)
    torch.testing.assert_close(max_logits.double() * math.log(2), exact_max, rtol=1e-4, atol=1e-4)
    assert call(**arguments, use_legacy=False) == "SGLang's own"


def test_sglangs_gathers_are_ours_for_the_layouts_that_we_have(hooks):
    v4, v32 = hooks["dequantize_k_cache_paged_dsv4"], hooks["dequantize_k_cache_paged_dsa"]
    slots = torch.arange(3)
    cache = KV_LAYOUTS["dsv4"].empty(1, 64, "cpu").zero_()
    assert v4(cache, slots, 64).shape == v4(cache, slots, page_size=64, layout="v4").shape == (3, 1, 512)
    assert v4(cache, slots, 64, None, "v41") == v4(cache, slots, 64, layout="v41") == "SGLang's own"
    rows = torch.zeros(8, 1, KV_LAYOUTS["dsv32"].bytes_per_token, dtype=torch.uint8)
    assert v32(rows.view(torch.float8_e4m3fn), slots).shape == (3, 1, 576)
    assert v32(rows[..., :528], slots) == "SGLang's own"


def test_an_sglang_whose_interface_changed_is_named_with_what_changed(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, "mla_fp8")
    module = sys.modules["sglang.kernels.ops.attention.dsv4.dequant_k_cache"]
    module.dequantize_k_cache_paged_dsv4 = lambda quant_k_cache, page_table: None
    sglang.register()
    (record,) = caplog.records
    assert (
        "SGLang 0.5.23 has" in record.getMessage() and "without page_size, out, layout" in record.getMessage()
    )
    assert not registered
