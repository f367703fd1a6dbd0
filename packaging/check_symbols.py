#!/usr/bin/env python3
"""What the built libraries may import and must not export. Prints what is wrong, exit code 1 if anything is.

  packaging/check_symbols.py python/mla_fp8/lib/*.so [--objects build/cmake]
  packaging/check_symbols.py --dump .../site-packages/torch > packaging/torch_symbols_2.10.txt

Libraries: every torch symbol exists in the oldest torch that we load in, none is of libtorch's C++ ABI, none
of CPython; no RPATH; no symbol of ours is exported, which a second copy of the library would share. Objects
of the per-ISA kernels: no weak symbol. A weak definition (an inline function, a template) compiled for
AVX-512 could be the copy that the linker keeps for every CPU.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

OLDEST_TORCH = Path(__file__).parent / "torch_symbols_2.10.txt"
TORCH_C = re.compile(r"(aoti_)?torch_\w+")
TORCH_CXX = re.compile(r"_ZN?[KRO]*\w*?(3c10|2at|5torch)\d")
CPYTHON = re.compile(r"_?Py[A-Z]\w*")


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def imports(library: Path) -> list[str]:
    lines = output_of("nm", "-D", "--undefined-only", library).splitlines()
    return [line.split()[-1].split("@")[0] for line in lines]


def exports(library: Path) -> list[str]:
    return [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", library).splitlines()]


def exports_of_torch(package: Path) -> list[str]:
    found = set()
    for name in ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"):
        if (library := package / "lib" / name).exists():
            lines = output_of("nm", "-D", "--defined-only", library).splitlines()
            found |= {line.split()[-1] for line in lines if re.search(r" T (aoti_)?torch_\w+$", line)}
    return sorted(found)


def check_library(library: Path) -> list[str]:
    allowed = set(OLDEST_TORCH.read_text().split())
    wrong = []
    for symbol in imports(library):
        if TORCH_C.fullmatch(symbol) and symbol not in allowed:
            wrong.append(f"{library.name}: {symbol} is not exported by the oldest supported torch")
        if TORCH_CXX.match(symbol):
            wrong.append(f"{library.name}: {symbol} is of libtorch's C++ ABI")
        if CPYTHON.fullmatch(symbol):
            wrong.append(f"{library.name}: {symbol} is CPython's")
    for symbol in exports(library):
        if "mla_fp8" in symbol:
            wrong.append(f"{library.name}: exports {symbol}")
    if re.search(r"\((RPATH|RUNPATH)\)", output_of("readelf", "-d", library)):
        wrong.append(f"{library.name}: has an RPATH")
    return wrong


def isa_objects(build: Path) -> list[Path]:
    return sorted(build.glob("CMakeFiles/mla_fp8_isa_*.dir/**/*.o"))


def check_object(path: Path) -> list[str]:
    lines = output_of("nm", "--defined-only", path).splitlines()
    weak = [line.split()[-1] for line in lines if re.search(r" [WVu] ", line)]
    weak = [symbol for symbol in weak if not symbol.startswith("DW.ref.")]  # a pointer, always the same
    isa = path.parts[-4].removesuffix(".dir")
    return [f"{isa} {path.name}: weak symbol {symbol}" for symbol in weak]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("libraries", nargs="*", type=Path)
    parser.add_argument("--objects", type=Path, help="CMake's build folder")
    parser.add_argument("--dump", type=Path, help="print the symbols that this torch package exports")
    options = parser.parse_args()
    if options.dump:
        print("\n".join(exports_of_torch(options.dump)))
        return 0
    wrong = [line for library in options.libraries for line in check_library(library)]
    if options.objects:
        wrong += [line for path in isa_objects(options.objects) for line in check_object(path)]
    print("\n".join(wrong) or "ok")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
