"""Lets an engine's Python modules be imported where there is no GPU: compiled modules are empty, and torch
reports a Hopper GPU. Nothing can run on it. To be imported before the engine.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import torch

MEMORY = 139 << 30
# Compiled ops that are asked at import, with their answers.
_ANSWERS = {
    "cutlass_scaled_mm_supports_block_fp8": True, "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_group_gemm_supported": False, "cutlass_scaled_mm_supports_fp4": False,
}  # fmt: skip
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
    is_integrated=False, max_threads_per_multi_processor=2048, L2_cache_size=60 << 20, gcnArchName="",
    regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
)  # fmt: skip


class Anything(ModuleType):
    """A module in which every name is a function that must not be called."""

    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: object, **options: object) -> None:
            raise AssertionError(f"{self.__name__}.{name} was called: it is not here without a GPU")

        function.__name__ = name
        return function


class Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by the beginnings of their names, last of all finders."""

    def __init__(self, *beginnings: str) -> None:
        self.beginnings = beginnings

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.beginnings):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module) -> None:
        pass


def pretend(*compiled: str) -> None:
    """``compiled``: beginnings of the names of modules that are not there."""
    sys.meta_path.append(Compiled(*compiled))
    torch.cuda.get_device_properties = lambda *args, **options: _PROPERTIES
    torch.cuda.get_device_capability = lambda *args, **options: (_PROPERTIES.major, _PROPERTIES.minor)
    torch.cuda.get_device_name = lambda *args, **options: _PROPERTIES.name
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0


def pretend_vllm() -> None:
    """vLLM's platform is a Hopper GPU."""
    pretend("vllm._", "vllm.cumem_allocator", "vllm.vllm_flash_attn._vllm_fa", "vllm.spinloop")
    for name, answer in _ANSWERS.items():
        setattr(torch.ops._C, name, lambda *args, answer=answer: answer)
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(major=_PROPERTIES.major, minor=_PROPERTIES.minor)
    answers = {
        "get_device_capability": capability, "get_device_name": _PROPERTIES.name, "get_device_uuid": "GPU-0",
        "get_device_total_memory": MEMORY, "is_fully_connected": True, "device_count": 1,
        "log_warnings": None,
        "num_compute_units": _PROPERTIES.multi_processor_count, "is_integrated_gpu": False,
        "is_pin_memory_available": False,
    }  # fmt: skip

    def answering(value):
        return classmethod(lambda cls, *args, **options: value)

    methods = {name: answering(value) for name, value in answers.items()}
    methods["has_device_capability"] = classmethod(
        lambda cls, want, *args: (
            (want if isinstance(want, int) else want[0] * 10 + want[1]) <= capability.to_int()
        )
    )
    vllm.platforms._current_platform = type("Pretended", (cuda.CudaPlatformBase,), methods)()
