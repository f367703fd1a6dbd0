"""A GPU library's ops on CPU tensors: its own host code and a stand-in for its runtime. Of the HIP library
one stand-in runs the kernels' source on fibers, another one executes the code object of a GPU; the CUDA
library has one in it that executes its PTX for Hopper."""

import ctypes
import os
from pathlib import Path

import torch

LIBRARY, RUNTIME = "libmla_fp8_emulated.so", "libamdhip64.so"
CUDA_LIBRARY, HOPPER = "libmla_fp8_emulated_cuda.so", "sm_90a"
_machines: list[str] = []  # the GPU whose machine code is executed


def load(folder: Path, machine: str | None = None) -> None:
    """From here on torch.ops.mla_fp8 is the emulated library. `machine`: the GPU whose machine code is
    executed, None for fibers."""
    if machine:
        _machines.append(machine)
    if machine == HOPPER:
        torch.ops.load_library(str(folder / CUDA_LIBRARY))
    else:
        if machine:
            os.environ["FAKE_HIP_ARCH"] = machine
        runtime = folder / "machine" / RUNTIME if machine else folder / RUNTIME
        ctypes.CDLL(str(runtime))  # the library finds it by its name, like torch's
        torch.ops.load_library(str(folder / LIBRARY))
    emulated = torch.ops.mla_fp8_emulated
    for name in ("sparse_attention_workspace", "index_topk_workspace"):  # of no device
        setattr(emulated, name, getattr(torch.ops.mla_fp8, name))
    torch.ops.mla_fp8 = emulated


def executes(machine: str) -> bool:
    """Whether the tests run on an emulated GPU of that name."""
    return machine in _machines


def is_cuda(device: str) -> bool:
    """Whether the CUDA library serves this device; an emulated GPU takes CPU tensors."""
    return device == "cuda" or executes(HOPPER)


def num_processors(device: str) -> int:
    """SMs of the device, for sizes of workspaces; 1 of a CPU."""
    if executes(HOPPER):
        return 132
    return torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 1


def hopper() -> str | None:
    """The device of a Hopper GPU, or of an emulated one; None if there is none."""
    if executes(HOPPER):
        return "cpu"
    is_there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "cuda" if is_there else None


def is_cpu_kernel(device: str) -> bool:
    """Whether the CPU library serves this device; an emulated GPU also takes CPU tensors."""
    return device == "cpu" and torch.ops.mla_fp8.name == "mla_fp8"
