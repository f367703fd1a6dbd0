"""A GPU library's ops on CPU tensors: its own host code and a stand-in for its runtime that executes what the
library holds for a GPU. The HIP library's stand-in executes machine code, the CUDA library has one in it that
executes its PTX."""

import ctypes
import os
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[2] / "build/tests"
HIP_LIBRARY, HIP_RUNTIME = FOLDER / "libmla_fp8_emulated.so", FOLDER / "libamdhip64.so"
CUDA_LIBRARY, AMPERE, HOPPER = FOLDER / "libmla_fp8_emulated_cuda.so", "sm_80", "sm_90a"
NVIDIA = {AMPERE: 108, HOPPER: 132}  # SMs
GPUS = ("gfx90a", "gfx942", "gfx950", *NVIDIA)
cpu_ops = torch.ops.mla_fp8
_loaded: list[str] = []  # the GPU that is emulated


def library(gpu: str) -> Path:
    return CUDA_LIBRARY if gpu in NVIDIA else HIP_LIBRARY


def load(gpu: str) -> None:
    """From here on torch.ops.mla_fp8 is the emulated library, on that GPU. It knows tensors that are made
    from here on."""
    _loaded.append(gpu)
    if gpu in NVIDIA:
        os.environ["FAKE_CUDA_ARCH"] = gpu[3:5]
    else:
        os.environ["FAKE_HIP_ARCH"] = gpu
        ctypes.CDLL(str(HIP_RUNTIME))  # the library finds it by its name, like torch's
    torch.ops.load_library(str(library(gpu)))
    emulated = torch.ops.mla_fp8_emulated
    for name in ("sparse_attention_workspace", "index_topk_workspace", "index_topk_counters"):  # of no device
        setattr(emulated, name, getattr(torch.ops.mla_fp8, name))
    torch.ops.mla_fp8 = emulated


def executes(*gpus: str) -> bool:
    """Whether the tests run on an emulated GPU, one of these if any are named."""
    return any(gpu in (gpus or GPUS) for gpu in _loaded)


def runs(count: int) -> range:
    """Of so many runs that have to give the same bits those that can differ: on an emulated GPU one, as every
    CTA executes its code in the same order again."""
    return range(1 if executes() else count)


def is_cuda(device: str) -> bool:
    """Whether the CUDA library serves this device; an emulated GPU takes CPU tensors."""
    return device.startswith("cuda") or executes(*NVIDIA)


def num_processors(device: str) -> int:
    """SMs of the device, for sizes of workspaces; 1 of a CPU."""
    for gpu, count in NVIDIA.items():
        if executes(gpu):
            return count
    is_gpu = device.startswith("cuda")
    return torch.cuda.get_device_properties(0).multi_processor_count if is_gpu else 1


def hopper() -> str | None:
    """The device of a Hopper GPU, or of an emulated one; None if there is none."""
    if executes(HOPPER):
        return "cpu"
    is_there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "cuda" if is_there else None


def is_cpu_kernel(device: str) -> bool:
    """Whether the CPU library serves this device; an emulated GPU also takes CPU tensors."""
    return device == "cpu" and torch.ops.mla_fp8.name == "mla_fp8"
