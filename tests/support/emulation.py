"""The HIP library's ops on CPU tensors: its own host code, a stand-in HIP runtime, its kernels on fibers."""

import ctypes
from pathlib import Path

import torch

LIBRARY, RUNTIME = "libmla_fp8_emulated.so", "libamdhip64.so"


def load(folder: Path) -> None:
    """From here on torch.ops.mla_fp8 is the emulated library."""
    ctypes.CDLL(str(folder / RUNTIME))  # the library finds it by its name, like torch's
    torch.ops.load_library(str(folder / LIBRARY))
    torch.ops.mla_fp8 = torch.ops.mla_fp8_emulated


def is_cpu_kernel(device: str) -> bool:
    """Whether the CPU library serves this device; an emulated GPU also takes CPU tensors."""
    return device == "cpu" and torch.ops.mla_fp8.name == "mla_fp8"
