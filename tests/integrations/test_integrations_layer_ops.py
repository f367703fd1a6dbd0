"""The ops around attention in engines: taken over if the engine's list names us, call by call."""

import inspect
from importlib import import_module

import engine_standins
import peer_standins
import pytest
import torch

import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import sglang_layer, vllm
from mla_fp8.integrations import layer_ops

ENGINES = {
    "vllm": (layer_ops.VLLM, layer_ops.register_vllm, [layer_ops.NAME], None),
    "sglang": (layer_ops.SGLANG, layer_ops.register_sglang, f"mla_fp8, {layer_ops.NAME}", "mla_fp8"),
}

# Whose INFO the engine shows; of vLLM as its stand-in names it.
LOGGERS = {"vllm": "mla_fp8.of_vllm.mla_fp8", "sglang": "sglang.mla_fp8"}


def standin(ours, calls):
    def original(*args, **options):
        calls.append(ours.__name__)
        return "theirs"

    original.__signature__, original.__name__ = inspect.signature(ours), ours.__name__
    return original


def installed(monkeypatch, engine, plugins):
    """Calls that the engine's own functions get."""
    getattr(engine_standins, engine)(monkeypatch, plugins)
    calls = []
    for module, functions in ENGINES[engine][0].items():
        peer_standins.install(monkeypatch, module, *(standin(ours, calls) for ours, _ in functions.values()))
    return calls


def function(engine, name):
    (module,) = (m for m, functions in ENGINES[engine][0].items() if name in functions)
    return getattr(import_module(module), name)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_taken_over_unless_the_list_names_us(engine, monkeypatch):
    modules, _, _, others = ENGINES[engine]
    installed(monkeypatch, engine, others)
    before = {name: function(engine, name) for functions in modules.values() for name in functions}
    getattr(mla_fp8_plugins, f"{engine}_layer_ops")()
    assert all(function(engine, name) is x for name, x in before.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_with_other_parameters_stays_the_engines(engine, monkeypatch, caplog):
    modules, register, named, _ = ENGINES[engine]
    installed(monkeypatch, engine, named)
    module, functions = next(iter(modules.items()))
    name = next(iter(functions))

    def other(nothing_that_we_know):
        return None

    monkeypatch.setattr(import_module(module), name, other)
    caplog.set_level("INFO")
    register()
    assert function(engine, name) is other
    assert f"{name} stays the engine's: takes nothing_that_we_know" in caplog.text
    assert {record.name for record in caplog.records} == {LOGGERS[engine]}


def test_vllms_calls_are_ours_but_those_for_blackwell_and_other_ranks(monkeypatch, device):
    calls = installed(monkeypatch, "vllm", [layer_ops.NAME])
    for _ in range(2):
        layer_ops.register_vllm()
    o, table = torch.randn(3, 8, 512, device=device).bfloat16(), torch.rand(9, 64, device=device)
    at = torch.arange(3, device=device)
    got = function("vllm", "fused_inv_rope_fp8_quant")(o, at, table, n_groups=1, heads_per_group=8)
    want = vllm.fused_inv_rope_fp8_quant(o, at, table, 1, 8)
    assert all(torch.equal(*(x.float() for x in pair)) for pair in zip(got, want, strict=True)) and not calls
    assert (
        function("vllm", "fused_inv_rope_fp8_quant")(o, at, table, 1, 8, tma_aligned_scales=True) == "theirs"
    )

    x, latent = torch.randn(3, 512, device=device), torch.empty(3, 512, dtype=torch.bfloat16, device=device)
    arguments = (x, at, None, at, None, None, torch.ones(512, device=device), 1e-6, 1, latent)
    assert function("vllm", "fused_save_compress_norm")(*arguments) is None and len(calls) == 1
    assert function("vllm", "fused_save_compress_norm")(*arguments, x, at) == "theirs"

    for name, whose in (("dsv4", None), ("dsv41", "theirs")):
        cache = torch.zeros(1, 64, KV_LAYOUTS[name].bytes_per_token, dtype=torch.uint8, device=device)
        assert function("vllm", "rope_quant_insert")(latent, at, table, cache, at, 1) == whose
        assert bool(cache.any()) is (whose is None)
    assert calls == ["fused_inv_rope_fp8_quant", "fused_save_compress_norm", "rope_quant_insert"]


def test_sglangs_calls_are_ours_but_those_for_other_rows(monkeypatch, device):
    calls = installed(monkeypatch, "sglang", f"mla_fp8, {layer_ops.NAME}")
    layer_ops.register_sglang()
    freqs = torch.polar(torch.ones(9, 32, device=device), torch.rand(9, 32, device=device))
    q, at = torch.randn(3, 8, 512, device=device).bfloat16(), torch.arange(3, device=device)
    out, want = torch.empty_like(q), torch.empty_like(q)
    function("sglang", "fused_q_norm_rope")(q, out, 1e-6, freqs, at)
    sglang_layer.fused_q_norm_rope(q, want, 1e-6, freqs, at)
    assert torch.equal(out, want) and not calls
    assert function("sglang", "fused_q_norm_rope")(q[..., :128], out[..., :128], 1e-6, freqs, at) == "theirs"
    insert, kv = (
        function("sglang", "fused_k_norm_rope_flashmla"),
        torch.randn(3, 512, device=device).bfloat16(),
    )
    cache = KV_LAYOUTS["dsv4"].empty(1, 64, device).zero_()
    arguments = (kv, torch.ones(512, device=device), 1e-6, freqs, at, at, cache, 64)
    assert insert(*arguments) is None and cache.any()
    assert insert(*arguments, layout="v41_new") == "theirs"
    turned = q.clone()
    function("sglang", "fused_rope_inplace")(turned, None, freqs, at, inverse=True)
    assert not torch.equal(turned, q)
    assert calls == ["fused_q_norm_rope", "fused_k_norm_rope_flashmla"]
