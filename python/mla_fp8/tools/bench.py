"""``python -m mla_fp8 bench``: time the ops on this machine, next to ceilings and installed peers.

Runs the scripts of ``benchmarks``, each in a process of its own: what one leaves behind, or breaks, is no
matter to the next. Prints a line per case, and at the end a chart: a line per op and peer.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from .cli import progress, seconds

_PACKAGE = Path(__file__).parents[1]
# In a wheel they are in the package, in a source tree at its top.
FOLDER = next(
    (x / "benchmarks" for x in (_PACKAGE, _PACKAGE.parents[1]) if (x / "benchmarks/harness.py").exists()),
    _PACKAGE,
)
SCRIPTS = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}

CPU_SECONDS, OVERHEAD = 60, 3  # of a run on a CPU; of a process, before its first case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=f"default: all, {', '.join(SCRIPTS)}")
    parser.add_argument("--only", default="", help="run the cases whose label contains this")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every case, also on a CPU, which runs the first of each for a minute",
    )
    parser.add_argument(
        "--seconds", type=seconds, help="at most, per case and baseline (default 3; for a CPU's minute 0.2)"
    )
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--smoke", action="store_true", help="one sample of each case; writes nothing")
    parser.add_argument(
        "--out", type=Path, default=Path("bench_out"), help="folder of <device>.csv (default bench_out)"
    )
    written.add_argument("--plot", action="store_true", help="also draw the chart, <device>.png")


def stream(command: list[str], show: Callable[[], None]) -> int:
    """Prints what the command prints, line by line. Returns its exit status."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                show()
        except BrokenPipeError:  # who reads has enough: the command shall not complain of that, too
            process.kill()
            raise
    return process.returncode


def results(folder: Path) -> dict[Path, set[tuple[str, str]]]:
    """The rows of each table of a folder, as they are written, with their ops."""
    return {
        path: {(line.partition(",")[0], line) for line in path.read_text().splitlines()[1:]}
        for path in folder.glob("*.csv")
    }


def main(options: argparse.Namespace) -> int:
    """The exit status is 1 if a benchmark failed, 2 for bad arguments."""
    names = options.benchmarks or list(SCRIPTS)
    if unknown := sorted(set(names) - set(SCRIPTS)):
        print(f"mla_fp8 bench: unknown {', '.join(unknown)}; known: {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    try:
        if not options.smoke:
            options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"mla_fp8 bench: --out: {error}", file=sys.stderr)
        return 2
    short = not (options.all or torch.cuda.is_available())
    each = options.seconds if options.seconds is not None else 0.2 if short else 3.0
    passed = ["--only", options.only, "--seconds", str(each)]
    if short:
        passed += ["--limit", str(max(CPU_SECONDS / len(names) - OVERHEAD, 1))]
    passed += ["--smoke"] if options.smoke else ["--csv", str(options.out)]
    before = results(options.out)
    failed = []
    with progress([1] * len(names)) as show:
        for done, name in enumerate(names):
            show(name, done)
            command = [sys.executable, str(SCRIPTS[name]), *passed]
            if stream(command, lambda name=name, done=done: show(name, done)) != 0:  # type: ignore[misc]
                failed.append(name)
            print(flush=True)
    for table in [] if options.smoke else sorted(options.out.glob("*.csv")):
        ran = sorted(
            {op for op, row in results(options.out)[table] if (op, row) not in before.get(table, set())}
        )
        command = [sys.executable, str(FOLDER / "chart.py"), *(["--png"] if options.plot else [])]
        if ran and stream([*command, "--ops", ",".join(ran), str(table)], lambda: None) != 0:
            failed.append("chart")
    if short and not options.smoke:
        print("A minute's worth of cases; --all runs every one.", file=sys.stderr)
    if failed:
        print(f"mla_fp8 bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
