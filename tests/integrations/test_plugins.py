"""What engines load in every process: entry points that import nothing of ours until somebody asks."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import engine_standins
import pytest

import mla_fp8_plugins


def test_every_entry_point_names_a_function_that_takes_nothing():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'entry-points."([\w.]+)"', text) == ["vllm.general_plugins", "sglang.srt.plugins"]
    named = re.findall(r'= "(mla_fp8_plugins):(\w+)"', text)
    assert len(named) == 10
    for module, function in named:
        assert not inspect.signature(getattr(import_module(module), function)).parameters


ENGINES = """
import sys, types
def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)
overridden = {}
custom = types.SimpleNamespace(is_overridden=lambda: bool(overridden), get_path=lambda: overridden[0])
backends = types.SimpleNamespace(CUSTOM=custom)
for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "sglang", "sglang.srt"):
    module(name, __path__=[])
module("vllm.v1.attention.backends.registry", AttentionBackendEnum=backends,
       register_backend=lambda backend, path: overridden.update({0: path}))
module("vllm.envs", VLLM_PLUGINS=None)
plugins = types.SimpleNamespace(get=lambda: NAMED)
module("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_PLUGINS=plugins))
"""


@pytest.mark.parametrize("named, imported", [("", "[]"), ("mla_fp8_v41_rows", "['torch', 'mla_fp8']")])
def test_entry_points_that_nobody_asked_for_import_neither_torch_nor_us(named, imported):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    code = ENGINES.replace("NAMED", repr(named)) + "import mla_fp8_plugins\n"
    code += "".join(f"mla_fp8_plugins.{name}()\n" for name in re.findall(r'= "mla_fp8_plugins:(\w+)"', text))
    code += "print(overridden[0], [m for m in ('torch', 'mla_fp8') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"mla_fp8.integrations.vllm.SparseBackend {imported}\n"


def test_a_custom_backend_of_another_package_stays(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch)
    custom = engine_standins.AttentionBackendEnum.CUSTOM
    engine.registered[custom] = "theirs.Backend"
    mla_fp8_plugins.vllm()
    assert engine.registered == {custom: "theirs.Backend"}
    (record,) = caplog.records
    assert "not offered to vLLM as a backend: CUSTOM is theirs.Backend already" in record.getMessage()


def test_a_registry_that_changed_is_said(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch)
    del engine.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    mla_fp8_plugins.vllm()
    (record,) = caplog.records
    assert "registry is not as expected" in record.getMessage() and not engine.registered
