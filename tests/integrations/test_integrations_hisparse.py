"""HiSparse's kernels in engines: taken over if the engine's list names us and all of them are as expected.

ci/engines/probe.py runs them in the engines' own modules.
"""

import inspect
from importlib import import_module
from types import SimpleNamespace

import engine_standins
import peer_standins
import pytest
import torch

import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS
from mla_fp8.integrations import hisparse

V32 = KV_LAYOUTS["dsv32"]
NAMED = {"vllm": [hisparse.NAME], "sglang": f"mla_fp8, {hisparse.NAME}"}
REGISTER = {"vllm": hisparse.register_vllm, "sglang": hisparse.register_sglang}


class Op(SimpleNamespace):
    """As torch has a compiled op: its schema names its parameters, and a cache may hold it."""

    __hash__ = object.__hash__

    def __init__(self, ours, calls) -> None:
        names = [SimpleNamespace(name=name) for name in inspect.signature(ours).parameters]
        super().__init__(calls=calls, __name__=ours.__name__)
        self.default = SimpleNamespace(_schema=SimpleNamespace(arguments=names))

    def __call__(self, *args, **options):
        self.calls.append(self.__name__)


def installed(monkeypatch, engine, plugins):
    """(where the engine looks its kernels up, calls that these get, hooks that were registered)."""
    registered, calls = getattr(engine_standins, engine)(monkeypatch, plugins), []
    if engine == "vllm":
        peer_standins.install(monkeypatch, "vllm._custom_ops")
        peer_standins.install(monkeypatch, hisparse._RUNTIME).HiSparseRuntime = object
        ops = SimpleNamespace(**{name: Op(ours, calls) for name, (ours, _) in hisparse.VLLM.items()})
        monkeypatch.setattr(torch.ops, "_C_cache_ops", ops)
        return ops, calls, registered

    def standin(ours):
        def original(*args, **options):
            calls.append(ours.__name__)

        original.__signature__, original.__name__ = inspect.signature(ours), ours.__name__
        return original

    functions = [standin(ours) for ours, _ in hisparse.SGLANG.values()]
    return peer_standins.install(monkeypatch, hisparse._KERNELS, *functions), calls, registered


@pytest.mark.parametrize("engine", NAMED)
def test_nothing_is_taken_over_unless_the_list_names_us(engine, monkeypatch):
    kernels, _, registered = installed(monkeypatch, engine, None if engine == "vllm" else "mla_fp8")
    before = dict(vars(kernels))
    getattr(mla_fp8_plugins, f"{engine}_hisparse")()
    assert vars(kernels) == before and (engine == "vllm" or not registered)


@pytest.mark.parametrize("spoil", ["no kernel", "another parameter", "AMD"])
@pytest.mark.parametrize("engine", NAMED)
def test_an_engine_that_is_not_as_expected_keeps_all_of_its_kernels(engine, spoil, monkeypatch, caplog):
    caplog.set_level("INFO")
    kernels, calls, registered = installed(monkeypatch, engine, NAMED[engine])
    name = "hisparse_gather_compact" if engine == "vllm" else "copy_cache_planned_mla"
    if spoil == "no kernel":
        delattr(kernels, name)
        said = f"it has no op {name}" if engine == "vllm" else f"{hisparse._KERNELS} has no {name}"
    elif spoil == "another parameter":
        setattr(kernels, name, Op(lambda something: None, calls) if engine == "vllm" else lambda something: 0)
        said = f"{name} takes something"
    else:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        said = "these ops have no kernels for AMD GPUs"
    before = dict(vars(kernels))
    REGISTER[engine]()
    assert vars(kernels) == before and (engine == "vllm" or not registered)
    assert f"HiSparse stays {'vLLM' if engine == 'vllm' else 'SGLang'}'s: {said}" in caplog.text


def test_vllms_calls_are_ours_but_those_of_other_rows(monkeypatch, caplog, device):
    caplog.set_level("INFO")
    kernels, calls, _ = installed(monkeypatch, "vllm", NAMED["vllm"])
    for _ in range(2):
        hisparse.register_vllm()
    assert import_module("mla_fp8.integrations.hisparse").why_not_vllm() is None  # of what was taken over
    host = torch.randint(0, 255, (9, V32.bytes_per_token), dtype=torch.uint8)
    host = host.pin_memory() if device == "cuda" else host
    hot = torch.zeros(2, 4, V32.bytes_per_token, dtype=torch.uint8, device=device)
    rows = torch.tensor([[3, 5]], dtype=torch.int32, device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    kernels.hisparse_gather_compact(host, hot, rows, rows, counts)
    assert torch.equal(hot.view(8, -1)[[3, 5]].cpu(), host[[3, 5]]) and not calls
    kernels.hisparse_gather_compact(host[:, :80], hot[..., :80], rows, rows, counts)
    assert calls == ["hisparse_gather_compact"]
    assert "hisparse_gather_compact stays the engine's for rows of 80 bytes" in caplog.text


def test_sglangs_calls_are_ours_but_those_of_other_rows(monkeypatch, caplog, device):
    caplog.set_level("INFO")
    _, calls, registered = installed(monkeypatch, "sglang", NAMED["sglang"])
    hisparse.register_sglang()
    assert registered.keys() == hisparse.HOOKS.keys()
    target = f"{hisparse._KERNELS}.copy_cache_planned_mla"
    hook, original = registered[target][0], import_module(hisparse._KERNELS).copy_cache_planned_mla
    host = torch.randint(0, 255, (9, 1, V32.bytes_per_token), dtype=torch.uint8)
    host = host.pin_memory() if device == "cuda" else host
    hot = torch.zeros(8, 1, V32.bytes_per_token, dtype=torch.uint8, device=device)
    given = {
        "miss_src": torch.tensor([[3, 5]], device=device), "host_cache": host, "device_buffer": hot,
        "miss_dst": torch.tensor([[3, 5]], dtype=torch.int32, device=device),
        "miss_count": torch.tensor([2], dtype=torch.int32, device=device),
        "num_real_reqs": torch.tensor([1], dtype=torch.int32, device=device),
    }  # fmt: skip
    hook(original, **given, item_size_bytes=V32.bytes_per_token)
    assert torch.equal(hot[[3, 5]].cpu(), host[[3, 5]]) and not calls
    hook(original, **given, item_size_bytes=99)
    hook(original, **given, item_size_bytes=98, is_dsv4_layout=True)
    assert calls == ["copy_cache_planned_mla"] * 2
    for reason in ("rows of 99 bytes", f"entries of 98 bytes in pages of {V32.bytes_per_token}"):
        assert f"copy_cache_planned_mla stays the engine's for {reason}" in caplog.text
