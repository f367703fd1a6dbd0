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

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_query_groups"

import engine_standins
import pytest
import sglang
import signatures
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sparse_cases import V4_SCOPES, make_case, packed_layouts

from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import sglang_layer
from mla_fp8.integrations import drafts, layer_ops
from mla_fp8.integrations import sglang as plugin
from mla_fp8.testing import assert_within_flash_mla_tolerance

CALLS = import_module(plugin._CALLS)
TARGETS = [target for methods in plugin.METHODS.values() for target in methods]


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    plugin.register_query_groups()
    HookRegistry.apply_hooks()


def test_nothing_that_we_build_on_is_missing():
    assert plugin.why_not() is None
    assert [plugin.why_not_methods(model) for model in plugin.METHODS] == [None, None]
    assert HookRegistry._patched == {*plugin.HOOKS, *TARGETS, plugin.DRAFTS}


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
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    assert {"cache_seqlens_int32", "dsa_cache_seqlens_int32"} <= {
        x.name for x in fields(dsa_backend.DSAMetadata)
    }
    assert "batch_size" in {x.name for x in fields(ForwardBatch)}
    module, name, method = plugin.DRAFTS.rsplit(".", 2)
    cls = getattr(import_module(module), name)
    for backend in (cls, dsa_backend.DeepseekSparseAttnBackend):
        assert "self.speculative_num_draft_tokens" in inspect.getsource(backend.__init__)
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
