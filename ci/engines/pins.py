"""The engines that the plug-ins are tested with."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
SGLANG = ("0.5.23",)


def packages() -> list[str]:
    """What these engines import besides torch, each with its version."""
    lines = (Path(__file__).parent / "packages.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
