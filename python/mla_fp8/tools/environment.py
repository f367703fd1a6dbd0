"""The machine and what is installed on it. It calls no op, so it runs where the CPU library does not load."""

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from .. import _libraries, _version
from ..arch import arch_of

_GIB = 2**30


def as_text(says: str, report: dict[str, dict[str, str]], steps: list[str]) -> str:
    """The verdict first, then a section each."""
    sections = [
        "\n".join([section, *(f"  {name:<36}{what}" for name, what in rows.items())])
        for section, rows in report.items()
    ]
    return "\n\n".join([says, *sections, "\n".join(["next", *(f"  {line}" for line in steps)])])


def as_json(works: bool, says: str, report: dict[str, dict[str, str]], steps: list[str]) -> str:
    return json.dumps({"works": works, "verdict": says, **report, "next": steps}, indent=2)


def of_a_failure(error: ImportError, arguments: list[str]) -> str:
    """What `doctor` says where the import fails."""
    why = str(error).removeprefix("mla_fp8: ")
    says = f"mla_fp8 {_version.find()} does not work here: {why}"
    report = {"versions": versions(), "libraries": dict(_libraries.status), "devices": devices()}
    steps = ["docs/start.md: which torch, and which wheel or how to build"]
    return as_json(False, says, report, steps) if "--json" in arguments else as_text(says, report, steps)


def versions() -> dict[str, str]:
    """Of this package, with its commit, and of what it is used and built with."""
    return {
        "mla_fp8": _version.find() + (" (source tree)" if _version.in_source_tree() else ""),
        "commit": commit(),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none",
        "hip of torch": torch.version.hip or "none",
        "nvidia driver": nvidia_driver() or "none",
        "amd driver": _read("/sys/module/amdgpu/version") or "none",
        "nvcc": nvcc() or "none",
    }


def commit() -> str:
    """Of the source tree, and whether it has changes; of an installed package as its version has it."""
    if found := _version.git("rev-parse", "HEAD"):
        changed = _version.git("status", "--porcelain", "--untracked-files=no")
        return found + (", with changes" if changed else "")
    version = _version.find()
    short = re.search(r"[+.]g([0-9a-f]{7,40})$", version)
    return short[1] if short else "unknown" if version == "unknown" else f"that of release {version}"


def devices() -> dict[str, str]:
    """Each device that torch sees, with its memory."""
    found = {
        "cpu": f"{platform.machine()}, {_isa()} kernels, {torch.get_num_threads()} threads, {_cpu_memory()}"
    }
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        try:
            free, total = torch.cuda.mem_get_info(i)
            memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        except RuntimeError as error:  # no memory for a context is no reason to say nothing
            memory = f"{total / _GIB:.1f} GiB, {str(error).splitlines()[0]}"
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {arch_of('cuda', i)}, {memory}"
    if len(found) == 1:
        built = torch.version.cuda or torch.version.hip
        found["cuda"] = "no GPU is visible" if built else "this torch was built for the CPU alone"
    return found


def nvidia_driver() -> str:
    """Of the kernel module that runs, which needs no GPU to be visible; empty if there is none."""
    found = re.search(r"Kernel Module[^\n]*?(\d+\.[\d.]+)", _read("/proc/driver/nvidia/version"))
    return found[1] if found else ""


def nvcc() -> str:
    """Version and path of the compiler that a build would take; empty if there is none."""
    path = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not path:
        return ""
    try:
        says = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{path} does not run: {error}"
    found = re.search(r", V([\d.]+)", says)
    return f"{found[1] if found else 'of an unknown version'} at {path}"


def _isa() -> str:
    loaded = _libraries.status.get("libmla_fp8_cpu.so") == "loaded"
    return str(torch.ops.mla_fp8.cpu_isa()) if loaded else "no"


def _cpu_memory() -> str:
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    if not {"MemAvailable", "MemTotal"} <= found.keys():
        return "memory unknown"
    free, total = (int(found[name]) * 1024 / _GIB for name in ("MemAvailable", "MemTotal"))
    return f"{free:.1f} of {total:.1f} GiB free"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
