"""The engines that the plug-ins are tested with."""

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
VLLM = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
SGLANG = ("0.5.23",)
# SGLang 0.5.23 names torch 2.14.1 and kernels for that. These are the last ones that load with torch 2.11.
SGLANG_KERNELS = ("sglang-kernel==0.4.5", "sgl-deep-gemm==0.1.5.post1", "sgl-flash-mla==1.0.0")

TILELANG = "0.1.12"


FILES = {"vllm": "packages.txt", "sglang": "packages_sglang.txt"}  # what each imports besides torch
NEWEST = {"vllm": VLLM[-1], "sglang": SGLANG[-1]}  # whose requirements the files meet


def packages(file: str = "packages.txt") -> list[str]:
    """The packages of a file, each with its version."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def contradictions(metadata: str, pinned: list[str]) -> list[str]:
    """Pins that a wheel's METADATA does not allow, each with what it asks for."""
    versions = {
        canonicalize_name(name): version for name, _, version in (pin.partition("==") for pin in pinned)
    }
    found = []
    for line in metadata.partition("\n\n")[0].splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        requirement = Requirement(line.removeprefix("Requires-Dist: "))
        version = versions.get(canonicalize_name(requirement.name))
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and version and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}=={version}, it names {requirement.specifier}")
    return found
