"""``python -m mla_fp8 bench``: time the ops on this machine, next to ceilings and installed peers.

Runs the scripts of ``benchmarks``, each in a process of its own: what one leaves behind, or breaks, is no
matter to the next. Prints a line per case, and at the end a chart: a line per op and peer.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .cli import progress, seconds

_PACKAGE = Path(__file__).parents[1]
# In a wheel they are in the package, in a source tree at its top.
FOLDER = next(
    (x / "benchmarks" for x in (_PACKAGE, _PACKAGE.parents[1]) if (x / "benchmarks/harness.py").exists()),
    _PACKAGE,
)
SCRIPTS = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=f"default: all, {', '.join(SCRIPTS)}")
    parser.add_argument("--only", default="", help="run the cases whose label contains this")
    parser.add_argument(
        "--seconds", type=seconds, default=3.0, help="at most, per case and baseline (default 3)"
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
    passed = ["--only", options.only, "--seconds", str(options.seconds)]
    passed += ["--smoke"] if options.smoke else ["--csv", str(options.out)]
    failed = []
    with progress([1] * len(names)) as show:
        for done, name in enumerate(names):
            show(name, done)
            command = [sys.executable, str(SCRIPTS[name]), *passed]
            if stream(command, lambda name=name, done=done: show(name, done)) != 0:  # type: ignore[misc]
                failed.append(name)
            print(flush=True)
    tables = [] if options.smoke else sorted(map(str, options.out.glob("*.csv")))
    if tables:
        png = ["--png"] if options.plot else []
        if stream([sys.executable, str(FOLDER / "chart.py"), *png, *tables], lambda: None) != 0:
            failed.append("chart")
    if failed:
        print(f"mla_fp8 bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
