#!/usr/bin/env python3
"""Engines on a GPU, vLLM or SGLang as it is and with mla_fp8: `matrix.py STEP...`, then a table.

A step is a group of engines side by side on one GPU, at most three minutes, five where times are longest:

%s

pack.py makes the archives; once they are unpacked, an engine needs no network. The table names whose kernels
ran, how far logprobs are from those of exact attention in the same engine, and what the kernels took. Exit
code 1 if an engine failed, FlashMLA was called where it should not be, or logprobs are off.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import report
import tomllib
from matrix_steps import ROOT, STEPS, Case

WORK = Path(tempfile.gettempdir(), "mla_fp8_engines")
OWN_PLUGINS = {
    "vllm.general_plugins": {"mla_fp8_engines": "model:register"},
    "sglang.srt.plugins": {"mla_fp8_engines": "sglang_engine:register"},
}

__doc__ = __doc__ % "\n".join(f"  {name:14s} {step.what}" for name, step in STEPS.items())


def extract(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(site, filter="fully_trusted")


def site_of(archives: Path) -> Path:
    """The unpacked engine, with TileLang if it was packed, and what tells the engine of our plug-ins."""
    site = WORK / archives.name
    with ProcessPoolExecutor() as pool:
        for folder in (archives, ROOT / ".engine-tilelang"):
            done = site / f".done{folder.name}"
            if folder.exists() and not done.exists():
                site.mkdir(parents=True, exist_ok=True)
                list(pool.map(extract, sorted(folder.glob("*.tar.xz")), [site] * 8))
                done.touch()
    if not (site / ".announced").exists():
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        announce(site, "mla_fp8", points)
        announce(site, "mla_fp8_engines", OWN_PLUGINS)
        (site / ".announced").touch()
    return site


def announce(site: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """What an installed distribution with these entry points looks like."""
    info = site / f"{name}-{(ROOT / 'version.txt').read_text().strip()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {info.stem.split('-')[1]}\n"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{point} = {target}" for point, target in targets.items())])
        for group, targets in points.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def environment(site: Path) -> dict[str, str]:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return os.environ | {
        "PYTHONPATH": f"{site}:{ROOT / 'python'}:{ROOT / 'ci/engines'}", "PYTHONUNBUFFERED": "1",
        "CUDA_HOME": cuda,
        "PATH": f"{cuda}/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(WORK / "vllm_cache"), "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip


def takes_turns(case: Case) -> bool:
    return "--batches" in case.more or "--first-token" in case.more


def run_step(name: str, site: Path, results: Path) -> dict[str, dict]:
    """The results of a step's engines, by name."""
    cases, begin = STEPS[name].cases, time.time()
    turns = WORK / f"turns-{name}-{os.getpid()}"
    started = {}
    for case in cases:
        out, log = results / f"{case.name}.json", results / f"{case.name}.log"
        out.unlink(missing_ok=True)  # of an earlier run
        command = case.command(out)
        if any(map(takes_turns, cases)):  # the others leave the GPU to them
            command += ["--turns", str(turns), "--of", str(len(cases))]
        with open(log, "w") as file:
            started[case.name] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(site),
                start_new_session=True,
            )  # fmt: skip
    found = {}
    for case_name, process in started.items():
        try:
            process.wait(max(1, begin + STEPS[name].seconds - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # an engine's other processes may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        path = results / f"{case_name}.json"
        ended = {
            "ok": False,
            "error": f"no result after {time.time() - begin:.0f} s, exit {process.returncode}",
        }
        if not path.exists():
            path.write_text(json.dumps(ended))
        found[case_name] = json.loads(path.read_text())
        print(f"[{time.time() - begin:4.0f} s] {case_name}", report.summary(found[case_name]), flush=True)
        lines = (results / f"{case_name}.log").read_text().splitlines()
        said = [line for line in lines if "mla_fp8 " in line or "mla_fp8: " in line][
            :4
        ]  # the plug-in's own lines
        print("\n".join(said if found[case_name]["ok"] else said + lines[-12:]))
    return found


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP")
    parser.add_argument("--archives", type=Path, help="default: .engine, for SGLang .engine-sglang")
    parser.add_argument("--out", type=Path, default=ROOT / "bench_out" / "engines")
    args = parser.parse_args()
    begin = time.time()
    engine = ".engine-sglang" if args.steps[0].startswith("sglang") else ".engine"
    site = site_of((args.archives or ROOT / engine).resolve())
    print(f"unpacked in {time.time() - begin:.0f} s", flush=True)
    results = WORK / "results"  # of all steps on this machine: later ones are compared with earlier ones
    results.mkdir(parents=True, exist_ok=True)
    for name in args.steps:
        print("==", name, STEPS[name].what, flush=True)
        run_step(name, site, results)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    problems = report.problems(found)
    (args.out / "engines.md").write_text(report.table(found, set(found)) + "\n")
    (args.out / "engine_steps.csv").write_text(report.csv_of_steps(found, gpu_name()))
    with tarfile.open(args.out / "engines.tar.gz", "w:gz") as tar:
        tar.add(results, "results")
    print(report.table(found, {case.name for name in args.steps for case in STEPS[name].cases}))
    print("\n".join(problems) or "nothing is wrong")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
