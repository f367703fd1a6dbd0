"""The engines that the plug-ins are tested with."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
SGLANG = ("0.5.23",)
# SGLang 0.5.23 names torch 2.14.1 and kernels for that. These are the last ones that load with torch 2.11.
SGLANG_KERNELS = ("sglang-kernel==0.4.5", "sgl-deep-gemm==0.1.5.post1", "sgl-flash-mla==1.0.0")

TILELANG = "0.1.12"


def packages(file: str = "packages.txt") -> list[str]:
    """What these engines import besides torch, each with its version."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
