#!/usr/bin/env python3
"""What is compiled or linked into the libraries of a wheel, with licences, as CycloneDX JSON.

setup.py puts it into the wheel's dist-info/sboms (PEP 770). Torch itself and the C and C++ runtimes are not
in it. ``packaging/sbom.py cu130`` prints it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def component(name: str, version: str, licence: str, what: str) -> dict[str, object]:
    # An SPDX identifier where there is one; CUDA's runtime has a licence of its own.
    entry = {"name": licence} if " " in licence else {"id": licence}
    return {
        "type": "library",
        "name": name,
        "version": version,
        "description": what,
        "licenses": [{"license": entry}],
    }


def torch_version(torch_dir: Path) -> str:
    header = (torch_dir / "include/torch/headeronly/version.h").read_text()
    numbers = dict(re.findall(r"define TORCH_VERSION_(MAJOR|MINOR|PATCH) +(\d+)", header))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def nvcc_version() -> str:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r", V([\d.]+)", said)[0]


def document(version: str, torch_dir: Path, cuda: bool) -> str:
    parts = [
        component("torch", torch_version(torch_dir), "BSD-3-Clause", "headers of the stable ABI, compiled in")
    ]
    if cuda:
        eula = "NVIDIA CUDA Toolkit EULA"
        parts.append(component("cuda-cudart", nvcc_version(), eula, "the CUDA runtime, linked statically"))
    own = component("mla-fp8", version, "Apache-2.0", "this wheel")
    listing = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": parts,
    }
    return json.dumps(listing, indent=2) + "\n"


if __name__ == "__main__":
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec and spec.submodule_search_locations, "torch is not installed"
    label = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    base = (ROOT / "version.txt").read_text().strip()
    print(
        document(f"{base}+{label}", Path(spec.submodule_search_locations[0]), label.startswith("cu")), end=""
    )
