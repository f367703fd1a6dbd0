#!/usr/bin/env python3
"""Whether wheels are what their names say. Prints what is wrong; exit code 1 if anything is.

  packaging/check_wheel.py dist/*.whl

Name, metadata and contents agree; the libraries of the variant are there, and nothing that does not belong.
They import what they may (check_symbols.py). They need no library but torch's and the C and C++ runtimes, and
no newer glibc than the platform tag promises. The size is within its budget. auditwheel, twine and
torch-abi-audit have their say where they are installed, as they are in .venv.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import check_symbols
import long_description

LIBRARIES = {"cpu": set(), "cu": {"libmla_fp8_cuda.so"}, "rocm": {"libmla_fp8_hip.so"}}  # besides the CPU's
MEGABYTES = {"cpu": 2, "cu": 20, "rocm": 20}
MAY_NEED = re.compile(
    r"(libtorch|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*)\.so[.\d]*"
)
CONTENT = re.compile(r"mla_fp8(_plugins)?/([\w/]+\.py|py\.typed|data/\w+\.txt)")


def kind(version: str) -> str:
    """``"cpu"``, ``"cu"`` or ``"rocm"`` of ``0.1.0+cu130``. Without a variant it is CUDA's, as on PyPI."""
    label = (
        re.sub(r"(^|\.)g[0-9a-f]{7,}$", "", version.partition("+")[2]) or "cu"
    )  # without the commit's hash
    found = re.match(r"cpu|cu(?=\d|$)|rocm", label)
    if found is None:
        raise ValueError(f"unknown variant {label}")
    return found[0]


def check_metadata(name: str, wheel: zipfile.ZipFile) -> Iterator[str]:
    distribution, version, *tag = name.removesuffix(".whl").split("-")
    info = f"{distribution}-{version}.dist-info"
    metadata, tags = (wheel.read(f"{info}/{part}").decode() for part in ("METADATA", "WHEEL"))
    if f"\nVersion: {version}\n" not in metadata:
        yield "the version in METADATA is another than in the name"
    if tag[:2] != ["py3", "none"]:
        yield f"the tag must begin with py3-none, got {'-'.join(tag)}"
    promised = {f"{tag[0]}-{tag[1]}-{platform}" for platform in tag[2].split(".")}
    if promised != set(re.findall(r"^Tag: (.*)$", tags, re.MULTILINE)):
        yield "the tags in WHEEL are others than in the name"
    _, _, description = metadata.partition("\n\n")
    for link in long_description.RELATIVE.findall(description):
        yield f"the description's link to {link[1]} leads nowhere on the page of a package index"
    for requirement in re.findall(r"^Requires-Dist: (.* @ .*)$", metadata, re.MULTILINE):
        yield f"a package index refuses the direct URL of {requirement}"
    for part in ("licenses/LICENSE", "sboms/mla_fp8.cdx.json"):
        if f"{info}/{part}" not in wheel.namelist():
            yield f"no {part}"


def check_content(version: str, names: list[str]) -> Iterator[str]:
    here = {name.removeprefix("mla_fp8/lib/") for name in names if name.startswith("mla_fp8/lib/")}
    wanted = LIBRARIES[kind(version)] | {"libmla_fp8_cpu.so"}
    if here != wanted:
        yield f"libraries must be {', '.join(sorted(wanted))}, got {', '.join(sorted(here))}"
    for name in names:
        if not (name.startswith("mla_fp8/lib/") or ".dist-info/" in name or CONTENT.fullmatch(name)):
            yield f"{name} does not belong into a wheel"


def glibc_needed(library: Path) -> tuple[int, int]:
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", check_symbols.output_of("readelf", "-V", library))
    return max((int(major), int(minor)) for major, minor in versions)


def glibc_promised(platform: str) -> tuple[int, int]:
    found = re.search(r"manylinux_(\d+)_(\d+)_", platform)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_library(library: Path, platform: str) -> Iterator[str]:
    yield from check_symbols.check_library(library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", check_symbols.output_of("readelf", "-d", library))
    for other in needed:
        if not MAY_NEED.fullmatch(other):
            yield f"{library.name} needs {other}"
    here, promised = glibc_needed(library), glibc_promised(platform)
    if here > promised:
        yield f"{library.name} needs glibc {here}, {platform} promises {promised}"


def audit(wheel: Path, libraries: list[Path]) -> Iterator[str]:
    """What the tools of others say."""
    if find_spec("auditwheel"):
        said = run("auditwheel", "show", wheel)[1]
        tag = re.search(r'constrains the platform tag to "(\w+)"', said)
        if tag is None or glibc_promised(tag[1]) > glibc_promised(wheel.name):
            yield f"auditwheel: {said}"
    if find_spec("twine"):
        status, said = run("twine", "check", "--strict", wheel)
        if status != 0:
            yield f"twine: {said}"
    if find_spec("torch_abi_audit"):
        for library in libraries:
            status, said = run("torch_abi_audit.cli", "--check", "torch", library)
            if status != 0:
                yield f"torch-abi-audit: {said}"


def run(module: str, *arguments: str | Path) -> tuple[int, str]:
    """The exit status and all that it printed, on one line."""
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def check(path: Path) -> Iterator[str]:
    _, version, *_, platform = path.name.removesuffix(".whl").split("-")
    megabytes = path.stat().st_size / 1e6
    if megabytes > MEGABYTES[kind(version)]:
        yield f"{megabytes:.2f} MB, at most {MEGABYTES[kind(version)]}"
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        yield from check_metadata(path.name, wheel)
        yield from check_content(version, names)
        libraries = [Path(wheel.extract(name, folder)) for name in names if name.endswith(".so")]
        for library in libraries:
            yield from check_library(library, platform)
        yield from audit(path, libraries)


def main() -> int:
    wrong = False
    for path in map(Path, sys.argv[1:]):
        complaints = list(check(path))
        print(*(f"{path.name}: {line}" for line in complaints), sep="\n", end="\n" if complaints else "")
        if not complaints:
            print(f"{path.name}: ok, {path.stat().st_size / 1e6:.2f} MB")
        wrong |= bool(complaints)
    return int(wrong or len(sys.argv) == 1)


if __name__ == "__main__":
    sys.exit(main())
