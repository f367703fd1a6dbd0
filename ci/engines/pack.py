#!/usr/bin/env python3
"""Packs vLLM for a GPU machine without a network: `pack.py --have NAMES [--out .engine]`, some 40 MB.

The wheel without what a Hopper GPU and this model never load, and the packages it imports that the machine
lacks, as archives that `matrix.py` unpacks there. NAMES is that machine's `pip list --format=freeze`, or one
name a line. torch, triton and what they need are the machine's own.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pins
from trim_fatbin import trim

ARCHITECTURE = 90
PYTHON = "3.12"
# Not loaded on Hopper for this model: the server in Rust, FlashAttention 2, other quantisations, Blackwell.
LEFT_OUT = (
    "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_qutlass_C", "vllm/_flashkda_C",
    "vllm/third_party/fmha_sm100",
)  # fmt: skip
# Has to load, is never called: short prompts go to sparse attention too.
WITHOUT_CODE = ("_vllm_fa3_C",)
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
        names = [n for n in archive.namelist() if not n.startswith(left_out) and "/tests/" not in n]
        archive.extractall(target, names)


def shrink(folder: Path) -> None:
    for library in folder.rglob("*.so*"):
        if b".nv_fatbin" in library.read_bytes():
            kept = set() if library.name.startswith(WITHOUT_CODE) else {ARCHITECTURE}
            print("{}: {} bytes of GPU code kept, {} zeroed".format(library.name, *trim(library, kept)))
        if library.stat().st_size > STRIP_FROM:
            subprocess.run(["strip", "--strip-unneeded", library], check=True)


def compress(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        tar.add(folder, ".")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>~! @]", name.strip(), maxsplit=1)[0]).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--have", type=Path, required=True, help="packages of the GPU machine")
    parser.add_argument("--version", default=pins.VLLM[-1])
    parser.add_argument("--out", type=Path, default=pins.ROOT / ".engine")
    args = parser.parse_args()
    have = {normal(line) for line in args.have.read_text().splitlines() if line.strip()}
    lacking = [r for r in pins.packages() if normal(r) not in have]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        wheels, engine, packages = (Path(scratch, name) for name in ("wheels", "engine", "packages"))
        download(wheels / "engine", f"vllm=={args.version}")
        download(wheels / "packages", *lacking)
        unpack(*(wheels / "engine").iterdir(), engine, LEFT_OUT)
        for wheel in (wheels / "packages").iterdir():
            unpack(wheel, packages)
        shrink(engine)
        shrink(packages)
        compress(engine, args.out / "vllm.tar.xz")
        compress(packages, args.out / "packages.tar.xz")


if __name__ == "__main__":
    main()
