#!/usr/bin/env python3
"""The plug-ins in the engines' own Python modules, without a GPU: `probe.py [--all]`, two minutes.

Wheels come from the package index, without their dependencies; their Python files and what these import
are kept in build/engines. Without the index, and with nothing kept, this says so and is no failure.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pins

CACHE = pins.ROOT / "build" / "engines"
INDEX = "https://pypi.org/simple/pip/"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class Unreachable(Exception):
    pass


def reachable() -> bool:
    try:
        with urllib.request.urlopen(INDEX, timeout=20):
            return True
    except (urllib.error.URLError, OSError):
        return False


def pip(*arguments: object) -> None:
    done = subprocess.run([*PIP, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        if not reachable():
            raise Unreachable(done.stderr.strip().splitlines()[-1])
        raise SystemExit(done.stderr)


def fetched(folder: Path, fetch) -> Path:
    """``folder``, filled by ``fetch`` at the first call."""
    if not folder.exists():
        half = folder.with_name(f"{folder.name}.{os.getpid()}")
        half.mkdir(parents=True)
        fetch(half)
        half.rename(folder)
    return folder


def engine(name: str, version: str) -> Path:
    """The files of the wheel but compiled ones."""

    def fetch(folder: Path) -> None:
        pip(
            "download", "-qq", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "-d", folder,
            "--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_34_x86_64", f"{name}=={version}",
        )  # fmt: skip
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            compiled = (".so", "vllm-rs")
            archive.extractall(folder, [n for n in archive.namelist() if not n.endswith(compiled)])
        wheel.unlink()

    return fetched(CACHE / f"{name}-{version}", fetch)


def packages() -> Path:
    """What the engines import besides torch, for the Python that runs this; SGLang's file is for 3.12."""
    wanted = pins.packages(pins.FILES["vllm"])
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder = CACHE / f"packages-{sys.implementation.cache_tag}-{digest}"
    return fetched(folder, lambda folder: pip("install", "-qq", "--no-deps", "-t", folder, *wanted))


def pins_are_the_engines(name: str) -> bool:
    """Whether the newest version allows the packages that it is tested with."""
    (metadata,) = engine(name, pins.NEWEST[name]).glob("*.dist-info/METADATA")
    found = pins.contradictions(metadata.read_text(), pins.packages(pins.FILES[name]))
    for line in found:
        print(f"ci/engines/{pins.FILES[name]} has {line} (Requires-Dist of {name} {pins.NEWEST[name]})")
    return not found


def files(name: str, version: str) -> list[Path]:
    """The tests of a version: the newest one's are all that there are for its engine."""
    here = pins.ROOT / "ci/engines"
    of_all = [here / f"test_in_{name}.py", here / f"test_index_in_{name}.py"]
    others = sorted(set(here.glob(f"test_*_in_{name}.py")) - set(of_all))
    return of_all + (others if version == pins.NEWEST[name] else [])


def run(name: str, version: str) -> bool:
    ours = ("python", "tests/support", "tests/integrations", "ci/engines")
    paths = [engine(name, version), packages(), *(pins.ROOT / x for x in ours)]
    # An engine's modules are compiled once, beside them. One thread: a fork has no other of its parent's.
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, pins.ROOT / "ci/engines/forks.py", name, *files(name, version)]
    return subprocess.run(command, cwd=pins.ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every pinned version, not the oldest and newest")
    args = parser.parse_args()
    wanted = {"vllm": pins.VLLM, "sglang": pins.SGLANG}
    if not args.all:
        wanted = {name: tuple(dict.fromkeys((v[0], v[-1]))) for name, v in wanted.items()}
    engines = [(name, version) for name, versions in wanted.items() for version in versions]
    try:
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(packages), *(pool.submit(engine, *each) for each in engines)]
            for one in waiting:
                one.result()
    except Unreachable as error:
        print(f"engines: skipped, the package index cannot be reached ({error})")
        return 0
    passed = [pins_are_the_engines(name) for name in wanted]
    passed += [run(*each) for each in engines]  # all of them, also after a failure
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
