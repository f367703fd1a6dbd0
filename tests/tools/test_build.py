"""The build takes away no library that works before it has another one."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(x C)
include({root}/cmake/PutInPlace.cmake)
add_library(x SHARED x.c)
mla_fp8_put_in_place(x ${{CMAKE_SOURCE_DIR}}/lib STRIP)
"""


def test_a_library_is_replaced_as_a_whole_once_it_is_linked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    (tmp_path / "x.c").write_text("int x(void) { return 1; }")
    build = ["cmake", "--build", tmp_path / "build"]

    def run(command: list) -> int:
        return subprocess.run(command, capture_output=True, check=False).returncode

    placed, configure = (
        tmp_path / "lib/libx.so",
        ["cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build"],
    )
    assert run(configure) == run(build) == 0
    with placed.open("rb") as opened:  # as a process that has loaded it
        first = opened.read()
        (tmp_path / "x.c").write_text("int x(void) { return }")
        assert run(build) != 0 and placed.read_bytes() == first
        (tmp_path / "x.c").write_text("int x(void) { return 2; } int y(void) { return 3; }")
        assert run([*configure, f"-DCMAKE_STRIP={shutil.which('false')}"]) == 0
        assert run(build) != 0 and placed.read_bytes() == first
        assert run([*configure, "-DCMAKE_STRIP=strip"]) == run(build) == 0 and placed.read_bytes() != first
        opened.seek(0)
        assert opened.read() == first  # the old file, not the new bytes in it
    placed.unlink()
    assert run(build) == 0 and [path.name for path in placed.parent.iterdir()] == ["libx.so"]


@pytest.mark.parametrize("fails", ["-S", "--build"])
def test_a_build_that_fails_leaves_the_libraries(fails, tmp_path):
    """Configuring or compiling: neither touches what works."""
    libraries = tmp_path / "lib/mla_fp8/lib"
    libraries.mkdir(parents=True)
    for name in ("cpu", "cuda"):
        (libraries / f"libmla_fp8_{name}.so").write_text(name)
    for tool in ("cmake", "ninja"):
        path = tmp_path / "bin" / tool
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\n[ "$1" != "{fails}" ]\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
        "MLA_FP8_BUILD_DIR": str(tmp_path / "cmake"),
        "MLA_FP8_CUDA": "0",
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "CalledProcessError" in done.stderr
    assert sorted(path.name for path in libraries.iterdir()) == ["libmla_fp8_cpu.so", "libmla_fp8_cuda.so"]
