"""Lets an engine's Python modules be imported where there is no GPU: compiled modules hold refusals, torch
reports a Hopper GPU. Nothing can run on it. To be imported before the engine.
"""

import importlib.abc
import importlib.machinery
import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import torch
import torch.utils.flop_counter  # with what else in torch looks for Triton: before that is pretended

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


class Placeholder:
    """Stands for a name at import: has every attribute, decorates, can be inherited from, does nothing."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self

    def __mro_entries__(self, bases):
        return ()

    def __iter__(self):
        return iter(())

    def __or__(self, other):
        return other

    __ror__ = __or__

    def __add__(self, other):  # of constants
        return self


def refusal(name: str):
    def function(*args: object, **options: object) -> None:
        raise AssertionError(f"{name} was called: it is not here without a GPU")

    function.__name__ = name.rpartition(".")[2]
    return function


class Absent(ModuleType):
    """A module in which every name is something."""

    __path__ = ()

    def __init__(self, name: str, something) -> None:
        super().__init__(name)
        self.__dict__["_something"] = something

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._something(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by the beginnings of their names, last of all finders."""

    def __init__(self, something, *beginnings: str) -> None:
        self.something, self.beginnings = something, beginnings

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.beginnings):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name, self.something)

    def exec_module(self, module) -> None:
        pass


def pretend(*compiled: str, absent: tuple[str, ...] = ()) -> None:
    """Beginnings of the names of modules: ``compiled`` refuse to be called, ``absent`` are of no use."""
    sys.meta_path += [Finder(refusal, *compiled), Finder(Placeholder, *absent)]
    torch.compile = lambda function=None, **options: function or (lambda wrapped: wrapped)
    torch.cuda.get_device_properties = lambda *args, **options: _PROPERTIES
    torch.cuda.get_device_capability = lambda *args, **options: (_PROPERTIES.major, _PROPERTIES.minor)
    torch.cuda.get_device_name = lambda *args, **options: _PROPERTIES.name
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0


@cache  # a process pretends once
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


@cache
def pretend_sglang() -> None:
    """Its configurations of models are left out: they import half of transformers."""
    absent = (
        "sgl_kernel", "deep_gemm", "triton", "tilelang", "cutlass", "flashinfer", "IPython", "gguf",
    )  # fmt: skip
    pretend("flash_mla", absent=absent)
    sys.meta_path.insert(0, Finder(Placeholder, "sglang.srt.configs", "sglang.srt.utils.hf_transformers"))
