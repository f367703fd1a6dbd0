"""The plug-in in an SGLang's own modules, without a GPU: probe.py runs it once for each version."""

import without_gpu

without_gpu.pretend_sglang()

import ast
import inspect
import os
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_query_groups,mla_fp8_v41_rows"

import engine_standins
import pytest
import sglang
import signatures
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sparse_cases import V4_SCOPES, make_case, packed_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import sglang_layer
from mla_fp8.integrations import (
    drafts,
    flash_mla_calls,
    layer_ops,
    sglang_indexer,
    sglang_same_bits,
    sglang_v41_rows,
)
from mla_fp8.integrations import sglang as plugin
from mla_fp8.testing import assert_within_flash_mla_tolerance

CALLS = import_module(plugin._CALLS)
TARGETS = [target for methods in plugin.METHODS.values() for target in methods]


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    plugin.register_query_groups()
    sglang_v41_rows.register()
    HookRegistry.apply_hooks()


def test_nothing_that_we_build_on_is_missing():
    assert plugin.why_not() is None
    assert [plugin.why_not_methods(model) for model in plugin.METHODS] == [None, None]
    assert sglang_v41_rows.why_not() is None
    hooks = {*plugin.HOOKS, *TARGETS, plugin.DRAFTS, sglang_v41_rows.CHOICE, *sglang_same_bits.HOOKS}
    hooks |= {target for indexer in sglang_indexer.HOOKS.values() for target in indexer}
    assert sglang_same_bits.why_not() is None and HookRegistry._patched == hooks


@pytest.mark.parametrize("file, name", signatures.cases(signatures.SGLANG))
def test_ops_around_attention_take_sglangs_calls(file, name):
    signatures.assert_takes(getattr(sglang_layer, name), "sglang", file)


def test_the_ops_around_attention_can_be_taken_over():
    for module, functions in layer_ops.SGLANG.items():
        assert [layer_ops.why_not(module, name, ours) for name, (ours, _) in functions.items()] == [None] * 3


@packed_layouts
@pytest.mark.parametrize("kv_format", [None, "V32", "V4"])
def test_sparse_decode_is_ours_with_every_argument_that_sglang_passes(layout, kv_format):
    torch.manual_seed(0)
    case = make_case(layout, "cpu", extra=V4_SCOPES if layout.name == "dsv4" else None)
    call = CALLS.flash_mla_with_kvcache
    out, lse = call(**engine_standins.decode_call(case), kv_format=kv_format, use_legacy=True)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)


def test_formats_that_are_not_ours_reach_flash_mla():
    arguments = engine_standins.decode_call(make_case(KV_LAYOUTS["dsv4"], "cpu"))
    arguments["tile_scheduler_metadata"] = torch.zeros(1)
    with pytest.raises((AssertionError, TypeError)):
        CALLS.flash_mla_with_kvcache(**arguments, kv_format="V41")


def test_sparse_prefill_is_ours():
    torch.manual_seed(0)
    case = make_case(KV_LAYOUTS["bf16_512"], "cpu", page_size=1)
    s = case.scopes[0]
    out, *dropped = CALLS.flash_mla_sparse_fwd(
        q=case.q, kv=s.rows[:, None], indices=s.indices[:, None], sm_scale=case.sm_scale, d_v=512,
        attn_sink=case.attn_sink, topk_length=s.length,
    )  # fmt: skip
    exact, _, exact_lse = case.expected()
    assert dropped == [None, None]
    assert_within_flash_mla_tolerance(out, exact_lse.float(), exact, exact_lse)


def test_nobody_in_sglang_uses_the_statistics_that_are_not_computed():
    """Every caller of flash_mla_sparse_fwd takes the first result alone."""
    attention = Path(inspect.getfile(sglang)).parent / "srt/layers/attention"
    found = []
    for path in attention.rglob("*.py"):
        text = path.read_text()
        if "flash_mla_sparse_fwd" in text and "xpu" not in path.name:
            found += [
                [getattr(name, "id", "?") for name in node.targets[0].elts]
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Assign) and called(node.value) == "flash_mla_sparse_fwd"
            ]
    assert found and all(names[1:] == ["_", "_"] for names in found)


def called(node: ast.AST) -> str | None:
    return getattr(node.func, "id", None) if isinstance(node, ast.Call) else None


@pytest.mark.parametrize("target", TARGETS)
def test_the_methods_that_pad_query_heads_are_ours(target):
    module, layer, name = target.rsplit(".", 2)
    method = getattr(getattr(import_module(module), layer), name)
    assert inspect.unwrap(method).__qualname__ == f"{layer}.{name}" and inspect.unwrap(method) is not method


def test_v4s_query_heads_are_as_they_are():
    layer = import_module(plugin._V4_LAYER).MqaAttentionBase
    given = SimpleNamespace(n_local_heads=16, is_dsv41=False, attn_tp_size=4, n_heads=64)
    assert layer._kernel_num_heads(given, 5) == 16
    given.is_dsv41 = True
    assert layer._kernel_num_heads(given, 5) == 64


def test_verified_drafts_are_a_group(monkeypatch):
    """V4's attention says how many rows a request has; metadata and batch have what it is told by."""
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    assert {"cache_seqlens_int32", "dsa_cache_seqlens_int32"} <= {
        x.name for x in fields(dsa_backend.DSAMetadata)
    }
    assert "batch_size" in {x.name for x in fields(ForwardBatch)}
    module, name, method = plugin.DRAFTS.rsplit(".", 2)
    cls = getattr(import_module(module), name)
    for backend in (cls, dsa_backend.DeepseekSparseAttnBackend):
        assert "self.speculative_num_draft_tokens" in inspect.getsource(backend.__init__)
    assert "self.token_to_kv_pool =" in inspect.getsource(dsa_backend.DeepseekSparseAttnBackend.__init__)
    pools = DSATokenToKVPool.__mro__[:-1]  # which of its layers have no indexer
    for name in ("start_layer", "skip_topk_layers"):
        assert any(f"self.{name} =" in inspect.getsource(pool) for pool in pools)
    seen = []
    monkeypatch.setattr(cls, "_forward_attention", lambda self, q, *_: seen.append(drafts.of_call(len(q), 1)))
    attention = cls.__new__(cls)
    vars(attention).update(
        speculative_num_draft_tokens=4, token_to_kv_pool=SimpleNamespace(request_window=None)
    )
    for requests in (3, 12):
        getattr(attention, method)(
            torch.zeros(12, 8, 512), None, None, None, SimpleNamespace(batch_size=requests)
        )
    assert [group.queries for group in seen] == [4, 1]


def test_gathers_are_ours():
    v4 = import_module(plugin._V4).dequantize_k_cache_paged_dsv4
    layout = import_module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4
    cache, out = (
        KV_LAYOUTS["dsv4"].empty(1, 64, "cpu").zero_(),
        torch.full((3, 1, 512), float("nan")).bfloat16(),
    )
    assert v4(cache, torch.arange(3), page_size=64, out=out, layout=layout) is out and not out.isnan().any()
    v32 = import_module(plugin._V32).dequantize_k_cache_paged_dsa
    rows = torch.zeros(8, 1, KV_LAYOUTS["dsv32"].bytes_per_token, dtype=torch.uint8)
    assert v32(rows.view(torch.float8_e4m3fn), torch.arange(3)).shape == (3, 1, 576)


# V4.1's own rows


@pytest.fixture
def v41_rows(monkeypatch):
    """SGLang's modules on a Hopper GPU."""
    pool = import_module(sglang_v41_rows._POOL)
    monkeypatch.setattr(flash_mla_calls._v41_rows, "on", False)
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla")
    monkeypatch.setattr(pool, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    monkeypatch.setattr(pool, "get_platform", lambda: SimpleNamespace(is_sm90=True))
    return import_module(sglang_v41_rows._ROWS).KVLayout


def test_everybody_who_chooses_rows_is_told_of_v41s(v41_rows):
    """The pool's configurators have the function by name."""
    assert not flash_mla_calls.reads_v41_rows()
    pool, configurator = (
        import_module(f"sglang.srt.{name}")
        for name in ("mem_cache.deepseek_v4_memory_pool", "mem_cache.kv_cache_configurator")
    )
    for module in (pool, configurator):
        assert module.select_dsv4_kv_layout() == (v41_rows.V41, "auto")
    assert flash_mla_calls.reads_v41_rows()
    for ratio, entries in ((1, v41_rows.V41_FP4), (2, v41_rows.V41_FP4), (4, v41_rows.V41)):
        assert pool.resolve_compressed_kv_layout(v41_rows.V41, ratio, "auto") is entries


@pytest.mark.parametrize("name", ["v41", "v41_fp4"])
def test_v41s_rows_are_the_bytes_that_sglang_specifies(name, v41_rows):
    """SGLang's reference of its writers, pages as its pools have them, and its own dequantiser."""
    reference = import_module("sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference")
    ours, theirs, page_size = KV_LAYOUTS[sglang_v41_rows.LAYOUTS[name]], v41_rows(name), 64
    torch.manual_seed(0)
    rows = torch.randn(4, page_size, 512) * torch.randn(4, page_size, 1).exp2() ** 4
    rows[0, :3], rows[1, 0, ::2], rows[1, 1] = 0, -0.0, 1e-5
    rows = rows.bfloat16()
    want = getattr(reference, f"quantize_k_cache_{name}")(rows.float(), theirs.page_bytes(page_size))
    cache = ours.empty(4, page_size, "cpu").zero_()
    slots = torch.arange(4 * page_size)
    mla_fp8.quantize_kv(rows.flatten(0, 1), slots, cache, layout=ours, page_size=page_size)
    assert torch.equal(cache, want)
    flash_mla_calls.read_v41_rows(True)
    gather = import_module(plugin._V4).dequantize_k_cache_paged_dsv4
    out = torch.full((len(slots), 1, 512), float("nan")).bfloat16()
    assert gather(want, slots, page_size=page_size, out=out, layout=theirs) is out
    exact = getattr(reference, f"dequantize_k_cache_{name}")(want, page_size)
    assert torch.equal(out.view(4, page_size, 512), exact)


@pytest.mark.parametrize("entries", [None, "dsv41", "dsv41_fp4"])
def test_decode_over_v41s_rows_is_ours(entries, v41_rows):
    """As SGLang's backend calls: no kv_format, the rows told by their size."""
    flash_mla_calls.read_v41_rows(True)
    extra = None if entries is None else V4_SCOPES | {"layout": KV_LAYOUTS[entries]}
    case = make_case(KV_LAYOUTS["dsv41"], "cpu", extra=extra)
    out, lse = CALLS.flash_mla_with_kvcache(**engine_standins.decode_call(case), use_legacy=True)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)


def test_v41s_query_heads_are_as_they_are_over_its_own_rows(v41_rows):
    layer = import_module(plugin._V4_LAYER).MqaAttentionBase
    given = SimpleNamespace(n_local_heads=16, is_dsv41=True, attn_tp_size=4, n_heads=64)
    assert layer._kernel_num_heads(given, 5) == 64
    flash_mla_calls.read_v41_rows(True)
    assert layer._kernel_num_heads(given, 5) == 16


def test_v41s_calls_name_no_format(v41_rows):
    """Else rows of 528 bytes would be told by it."""
    backend = import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    assert "kv_format" not in inspect.getsource(backend)
