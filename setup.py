"""Packaging only: runs CMake, installs the libraries into the package, tags the wheel ``py3-none-*``.

The libraries use neither CPython's C API nor libtorch's C++ ABI, so one wheel serves every Python and every
torch >= 2.10. Build settings come as environment variables of the build:

``MLA_FP8_CUDA``        ``1`` or ``0``: build ``libmla_fp8_cuda.so`` (default: if nvcc is found)
``MLA_FP8_CUDA_ARCHS``  ``all``, as wheels have, or such as ``90a`` or ``80;90a`` (default: those of the GPUs
                        that are here, all if there are none)
``MLA_FP8_CPU_NATIVE``  ``1``: of the instruction sets of CPUs, the best that this machine has alone
``MLA_FP8_HIP``         ``1``: build ``libmla_fp8_hip.so``; ziglang must be installed
``MLA_FP8_SANITIZE``    ``1``: with AddressSanitizer and UBSan, symbols kept; see ``ci/fuzz.sh``
``MLA_FP8_TESTS``       ``1``: also build the test-only module, next to the package, never inside it
``MLA_FP8_LOCAL``       label of the variant in the version, such as ``cu130``
``MLA_FP8_HOME``        URL of the sources, for the links of the package's page
``MLA_FP8_TARGETS``     CMake targets that are built alone, such as ``place_mla_fp8_cpu``; the build folder
                        stays configured for the GPUs that it was configured for
``CMAKE_ARGS``          passed on to CMake
``MAX_JOBS``            parallel compile jobs
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(
        f"mla_fp8: setuptools >= 77 must be installed in the build environment, got {setuptools.__version__} "
        "(pip install -U setuptools)"
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "packaging"))
import long_description
import sbom


def version() -> str:
    find = runpy.run_path(str(ROOT / "python/mla_fp8/_version.py"))["find"]
    return str(find(os.environ.get("MLA_FP8_LOCAL", "")))


def torch_dir() -> str:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "mla_fp8: torch >= 2.10 must be installed in the build environment (its headers are used)"
        )
    return spec.submodule_search_locations[0]


def asked(name: str) -> bool | None:
    """What the environment says of MLA_FP8_<name>; None if nothing."""
    variable = f"MLA_FP8_{name}"
    value = os.environ.get(variable, "").upper()
    known = {"": None} | dict.fromkeys(("1", "ON", "TRUE", "YES"), True)
    known |= dict.fromkeys(("0", "OFF", "FALSE", "NO"), False)
    if value not in known:
        raise SystemExit(f"mla_fp8: {variable} must be 1 or 0, got {os.environ[variable]!r}")
    return known[value]


def wants_cuda() -> bool:
    if (wanted := asked("CUDA")) is not None:
        return wanted
    found = shutil.which("nvcc") or os.environ.get("CUDACXX")
    print(f"mla_fp8: CUDA library {'is built with ' + found if found else 'is not built (no nvcc found)'}")
    return bool(found)


def cuda_archs() -> str:
    """The CUDA architectures to build for, as CMake takes them."""
    if asked_for := os.environ.get("MLA_FP8_CUDA_ARCHS"):
        return asked_for
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    numbers = {
        int(capability.replace(".", "")) for capability in found if re.fullmatch(r"\d+\.\d", capability)
    }
    return ";".join("90a" if number == 90 else str(number) for number in sorted(numbers)) or "all"


# Minutes of one core of a server, with nothing in ccache.
CPU_MINUTES, HIP_MINUTES = 2, 4
CUDA_MINUTES = {"90a": 8, "all": 16}
CUDA_MINUTES_OF_OTHERS = 2  # each: they have the portable kernels alone


def expected_minutes(archs: str, hip: bool, jobs: int) -> int:
    cuda = sum(CUDA_MINUTES.get(arch, CUDA_MINUTES_OF_OTHERS) for arch in archs.split(";") if arch)
    return -(-(CPU_MINUTES + cuda + HIP_MINUTES * hip) // jobs)


class CMakeBuild(build_ext):
    def run(self) -> None:
        tests, sanitize = (asked(name) or False for name in ("TESTS", "SANITIZE"))
        # `pip install -e` builds in a folder that stays: the next one compiles what has changed alone.
        temporary = ROOT / "build/editable" if self.editable_mode else Path(self.build_temp) / "cmake"
        build = Path(os.environ.get("MLA_FP8_BUILD_DIR", temporary)).resolve()
        in_tree = self.inplace or self.editable_mode
        package = ROOT / "python/mla_fp8" if in_tree else Path(self.build_lib).resolve() / "mla_fp8"
        cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
        if not cmake or not ninja:
            raise SystemExit("mla_fp8: cmake >= 3.25 and ninja must be on PATH (pip install cmake ninja)")
        configure = [
            cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            # explicit: with pip's build isolation a cached path would point into a deleted environment
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DMLA_FP8_TORCH_DIR={torch_dir()}",
            f"-DMLA_FP8_TESTS={'ON' if tests else 'OFF'}",
            f"-DMLA_FP8_SANITIZE={'ON' if sanitize else 'OFF'}",
            f"-DMLA_FP8_CPU_NATIVE={'ON' if asked('CPU_NATIVE') else 'OFF'}",
            f"-DMLA_FP8_PACKAGE_DIR={package}",
        ]  # fmt: skip
        targets = os.environ.get("MLA_FP8_TARGETS", "").split()
        gpus = {} if targets else {"CUDA": wants_cuda(), "HIP": asked("HIP") or False}
        configure += [f"-DMLA_FP8_{name}={'ON' if on else 'OFF'}" for name, on in gpus.items()]
        archs = cuda_archs() if gpus.get("CUDA") else ""
        if archs:
            configure.append(f"-DMLA_FP8_CUDA_ARCHS={archs}")
        jobs = os.environ.get("MAX_JOBS")
        if not targets:
            kernels = ["CPUs", *([f"CUDA ({archs})"] if archs else []), *(["HIP"] if gpus["HIP"] else [])]
            minutes = expected_minutes(archs, gpus["HIP"], int(jobs or os.cpu_count() or 1))
            print(f"mla_fp8: kernels for {', '.join(kernels)}; the first build takes about {minutes} min")
        subprocess.check_call(configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        make = [cmake, "--build", str(build), *(["-j", jobs] if jobs else [])]
        # Each library is put in its place as it is linked (cmake/PutInPlace.cmake). The CPU's comes first:
        # every import needs it.
        subprocess.check_call([*make, "--target", *(targets or ["place_mla_fp8_cpu"])])
        if not targets:
            subprocess.check_call(make)
            for name, on in gpus.items():  # no stale library gets into this wheel
                if not on:
                    (package / f"lib/libmla_fp8_{name.lower()}.so").unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        return []


class WithBenchmarks(build_py):
    """`python -m mla_fp8 bench` finds them in the package; in a source tree they lie at its top."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "mla_fp8/benchmarks")
            target.mkdir(parents=True, exist_ok=True)
            for script in sorted((ROOT / "benchmarks").glob("*.py")):
                self.copy_file(str(script), str(target / script.name))


class WithVersion(sdist):
    """The sources outside of a checkout know their commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        target = Path(base_dir, "version.txt")
        target.unlink()  # may be a link to the tree's
        target.write_text(f"{version()}\n")


class PlatformWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        sboms = Path(distinfo_path) / "sboms"
        sboms.mkdir(exist_ok=True)
        listing = sbom.document(version(), Path(torch_dir()), wants_cuda())
        (sboms / "mla_fp8.cdx.json").write_text(listing)

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", f"{sys.platform}_{platform.machine()}"


setup(
    version=version(),
    long_description=long_description.long_description(),
    long_description_content_type="text/markdown",
    project_urls=long_description.project_urls(),
    ext_modules=[Extension("mla_fp8._libraries", sources=[])],
    cmdclass={
        "build_py": WithBenchmarks,
        "build_ext": CMakeBuild,
        "bdist_wheel": PlatformWheel,
        "sdist": WithVersion,
    },
)
