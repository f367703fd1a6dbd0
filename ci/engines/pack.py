#!/usr/bin/env python3
"""Packs an engine for a GPU machine without a network: `pack.py --have NAMES [--engine sglang]`.

The wheels without what a Hopper GPU and these models never load, and the packages they import that the
machine lacks, as archives that `matrix.py` unpacks there: 40 MB of vLLM, 24 MB of SGLang. TileLang, 34 MB,
is what both take for V4's hyper-connections if it is there. NAMES is that machine's
`pip list --format=freeze`, or one name a line. torch, triton and what they need are the machine's.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pins
from trim_fatbin import trim

ARCHITECTURE = 90
PYTHON = "3.12"


@dataclass(frozen=True)
class Engine:
    wheels: tuple[str, ...]
    packages: str  # the file that names what it imports besides
    left_out: tuple[str, ...]  # beginnings of paths: not loaded on Hopper for these models
    without_code: tuple[str, ...] = ()  # has to load, is never called: all prompts go to sparse attention


ENGINES = {
    "vllm": Engine(
        (f"vllm=={pins.VLLM[-1]}",),
        "packages.txt",
        # The server in Rust, FlashAttention 2, other quantisations, Blackwell.
        (
            "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_qutlass_C", "vllm/_flashkda_C",
            "vllm/third_party/fmha_sm100",
        ),
        ("_vllm_fa3_C",),
    ),
    "sglang": Engine(
        (f"sglang=={pins.SGLANG[-1]}", *pins.SGLANG_KERNELS),
        "packages_sglang.txt",
        # Diffusion, the server in Rust, FlashAttention, Blackwell.
        (
            "sglang/multimodal_gen", "sglang/test", "sgl_kernel/flash_ops", "sgl_kernel/infllm_ops",
            "sgl_kernel/sm100",
            *(f"sglang/srt/rust_extensions/{name}" for name in ("_bench", "_grpc", "_multimodal", "_server")),
        ),
    ),
    # Both engines' hyper-connections of V4; without it stand-ins in PyTorch take their place.
    "tilelang": Engine(
        (f"tilelang=={pins.TILELANG}",), "packages_tilelang.txt", ("tilelang/3rdparty/composable_kernel",)
    ),
}  # fmt: skip
STRIP_FROM = 300 << 10  # bytes of a library


def download(folder: Path, *requirements: str) -> None:
    platforms = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    options = [f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64")]
    options += [f"--abi={abi}" for abi in ("abi3", "cp312", "none")]
    command = [
        sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", str(folder),
        f"--python-version={PYTHON}", "--implementation=cp", *options, *requirements,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def unpack(wheel: Path, target: Path, left_out: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.startswith(left_out)]
        names = [n for n in names if "/tests/" not in n and ".data/data/bin/" not in n]
        archive.extractall(target, names)


def shrink(folder: Path, without_code: tuple[str, ...] = ()) -> None:
    for library in folder.rglob("*.so*"):
        if b".nv_fatbin" in library.read_bytes():
            kept = set() if library.name.startswith(without_code) else {ARCHITECTURE}
            print("{}: {} bytes of GPU code kept, {} zeroed".format(library.name, *trim(library, kept)))
        if library.stat().st_size > STRIP_FROM:
            subprocess.run(["strip", "--strip-unneeded", library], check=True)


def link_copies(folder: Path) -> None:
    """Large files that are alike become one: wheels have copies of libraries for links."""
    first: dict[bytes, Path] = {}
    for file in sorted(x for x in folder.rglob("*") if x.is_file() and x.stat().st_size > STRIP_FROM):
        kept = first.setdefault(hashlib.sha256(file.read_bytes()).digest(), file)
        if kept is not file:
            file.unlink()
            file.hardlink_to(kept)


def compress(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        tar.add(folder, ".")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>~! @]", name.strip(), maxsplit=1)[0]).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--have", type=Path, required=True, help="packages of the GPU machine")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--out", type=Path, help="default: .engine, for SGLang .engine-sglang")
    args = parser.parse_args()
    engine = ENGINES[args.engine]
    out = args.out or pins.ROOT / (".engine" if args.engine == "vllm" else f".engine-{args.engine}")
    have = {normal(line) for line in args.have.read_text().splitlines() if line.strip()}
    lacking = [r for r in pins.packages(engine.packages) if normal(r) not in have]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        wheels, own, packages = (Path(scratch, name) for name in ("wheels", "engine", "packages"))
        download(wheels / "engine", *engine.wheels)
        download(wheels / "packages", *lacking)
        for wheel in (wheels / "engine").iterdir():
            unpack(wheel, own, engine.left_out)
        for wheel in (wheels / "packages").iterdir():
            unpack(wheel, packages)
        shrink(own, engine.without_code)
        shrink(packages)
        link_copies(packages)
        compress(own, out / f"{args.engine}.tar.xz")
        compress(packages, out / "packages.tar.xz")


if __name__ == "__main__":
    main()
