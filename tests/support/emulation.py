"""The HIP library's ops on CPU tensors: its own host code, and a stand-in for the HIP runtime. One stand-in
runs the kernels' source on fibers, the other one executes the code object of a GPU."""

import ctypes
import os
from pathlib import Path

import torch

LIBRARY, RUNTIME = "libmla_fp8_emulated.so", "libamdhip64.so"
_machines: list[str] = []  # the GPU whose machine code is executed


def load(folder: Path, machine: str | None = None) -> None:
    """From here on torch.ops.mla_fp8 is the emulated library. `machine`: the GPU whose machine code is
    executed, None for fibers."""
    if machine:
        os.environ["FAKE_HIP_ARCH"] = machine
        _machines.append(machine)
    runtime = folder / "machine" / RUNTIME if machine else folder / RUNTIME
    ctypes.CDLL(str(runtime))  # the library finds it by its name, like torch's
    torch.ops.load_library(str(folder / LIBRARY))
    emulated = torch.ops.mla_fp8_emulated
    emulated.sparse_attention_workspace = torch.ops.mla_fp8.sparse_attention_workspace  # of no device
    torch.ops.mla_fp8 = emulated


def executes(machine: str) -> bool:
    """Whether the tests run on an emulated GPU of that name."""
    return machine in _machines


def is_cpu_kernel(device: str) -> bool:
    """Whether the CPU library serves this device; an emulated GPU also takes CPU tensors."""
    return device == "cpu" and torch.ops.mla_fp8.name == "mla_fp8"
