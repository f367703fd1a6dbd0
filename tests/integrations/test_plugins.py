"""What engines load in every process: entry points that import nothing of ours until somebody asks."""

import enum
import inspect
import pickle
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
    assert len(named) == 14
    for module, function in named:
        assert not inspect.signature(getattr(import_module(module), function)).parameters


ENGINES = """
import sys, types
def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)
overridden = {}
custom = types.SimpleNamespace(
    value=None, is_overridden=lambda: bool(overridden), get_path=lambda: overridden["CUSTOM"])
backends = types.SimpleNamespace(CUSTOM=custom, __members__={"CUSTOM": custom})
for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "sglang", "sglang.srt"):
    module(name, __path__=[])
module("vllm.v1.attention.backends.registry", AttentionBackendEnum=backends,
       register_backend=lambda backend, path: overridden.update(CUSTOM=path))
module("vllm.envs", VLLM_PLUGINS=None)
plugins = types.SimpleNamespace(get=lambda: NAMED)
module("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_PLUGINS=plugins))
"""


@pytest.mark.parametrize("named, imported", [("", "[]"), ("mla_fp8_v41_rows", "['torch', 'mla_fp8']")])
def test_entry_points_that_nobody_asked_for_import_neither_torch_nor_us(named, imported):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    code = ENGINES.replace("NAMED", repr(named)) + "import mla_fp8_plugins\n"
    code += "".join(f"mla_fp8_plugins.{name}()\n" for name in re.findall(r'= "mla_fp8_plugins:(\w+)"', text))
    code += "print(overridden['CUSTOM'], [m for m in ('torch', 'mla_fp8') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"mla_fp8.integrations.vllm.SparseBackend {imported}\n"


def test_a_custom_backend_of_another_package_stays(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch)
    custom = engine_standins.AttentionBackendEnum.CUSTOM
    engine.registered[custom] = "theirs.Backend"
    mla_fp8_plugins.vllm()
    assert engine.registered == {custom: "theirs.Backend"}
    (record,) = caplog.records
    assert "before 0.31 has no MLA_FP8; CUSTOM is theirs.Backend already" in record.getMessage()


@pytest.fixture
def names(monkeypatch):
    """The registry of a vLLM from 0.31 on, which takes a plug-in's own names: {member: path}."""
    engine = engine_standins.vllm(monkeypatch)

    class Backends(enum.Enum):
        CUSTOM = None

        @classmethod
        def register(cls, name, value):
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            cls._member_map_[name] = member
            return member

        def is_overridden(self):
            return self in engine.registered

        def get_path(self):
            return engine.registered.get(self, self.value)

    def register_backend(backend, path):
        member = Backends.register(backend, path) if isinstance(backend, str) else backend
        engine.registered[member] = path

    registry = engine.modules["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum, registry.register_backend = Backends, register_backend
    return registry, engine.registered


def test_the_backend_has_a_name_of_its_own_and_custom_where_that_is_free(names, caplog):
    registry, registered = names
    for _ in range(2):
        mla_fp8_plugins.vllm()
    assert {member.name: path for member, path in registered.items()} == dict.fromkeys(
        ("MLA_FP8", "CUSTOM"), mla_fp8_plugins.BACKEND
    )
    registered[registry.AttentionBackendEnum.CUSTOM] = "theirs.Backend"
    mla_fp8_plugins.vllm()
    assert registered[registry.AttentionBackendEnum.CUSTOM] == "theirs.Backend" and not caplog.records


def test_a_process_that_is_spawned_unpickles_the_name_before_it_loads_plug_ins(names):
    registry, registered = names
    mla_fp8_plugins.vllm()
    backends = registry.AttentionBackendEnum
    pickled = pickle.dumps(backends["MLA_FP8"])
    del backends._member_map_["MLA_FP8"]  # as it is there
    registered.clear()
    assert pickle.loads(pickled) is backends["MLA_FP8"] and len(registered) == 2


def test_names_that_others_have_stay_theirs_and_that_is_said(names, caplog):
    registry, registered = names
    for name in ("MLA_FP8", registry.AttentionBackendEnum.CUSTOM):
        registry.register_backend(name, "theirs.Backend")
    mla_fp8_plugins.vllm()
    assert set(registered.values()) == {"theirs.Backend"}
    (record,) = caplog.records
    assert "MLA_FP8 is theirs.Backend already; CUSTOM is theirs.Backend" in record.getMessage()


def test_a_registry_that_changed_is_said(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch)
    del engine.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    mla_fp8_plugins.vllm()
    (record,) = caplog.records
    assert "registry is not as expected" in record.getMessage() and not engine.registered
