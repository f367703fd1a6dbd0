"""What the commands of ``python -m mla_fp8`` share: refusals of arguments, and progress."""

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch


def device(name: str) -> str:
    """``cpu``, or a GPU that is there."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda (ROCm's name too) or cuda:N, got {name!r}")
    if name != "cpu" and int(found[1] or 0) >= torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"{torch.cuda.device_count()} GPUs are visible"
            if built
            else "this torch was built for the CPU alone"
        )
        raise argparse.ArgumentTypeError(f"there is no {name}: {why}")
    return name


def at_least(minimum: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from ``minimum`` on, or to ``most``."""
    wanted = f"of at least {minimum}" if most is None else f"from {minimum} to {most}"

    def number(text: str) -> int:
        found = int(text) if re.fullmatch(r"-?\d+", text, re.ASCII) else minimum - 1
        if found < minimum or (most is not None and found > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {wanted}, got {text!r}")
        return found

    return number


def seconds(text: str) -> float:
    """How long to measure at most: 0 is as short as it gets."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds of at least 0, got {text!r}")
    return number


@contextlib.contextmanager
def progress(weights: Sequence[float]) -> Iterator[Callable[[str, int], None]]:
    """Says on stderr what runs: a bar where someone watches and rich is installed, else a line per name.

    ``weights``: how long each step takes, in any unit. Yields ``show(name, number of steps that are done)``.
    """
    try:
        from rich import progress as bars  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415
    except ImportError:
        watched = False
    else:
        watched = sys.stderr.isatty()
    if not watched:
        begin, said = time.monotonic(), set[str]()

        def say(name: str, done: int) -> None:
            if name not in said:
                said.add(name)
                print(
                    f"[{done + 1}/{len(weights)}, {time.monotonic() - begin:.0f} s] {name}", file=sys.stderr
                )

        yield say
        return
    columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeElapsedColumn())
    # Refreshed by us, line by line: a thread that draws would take part in what is measured.
    with bars.Progress(
        *columns, bars.TextColumn("{task.description}"), console=Console(stderr=True), transient=True,
        auto_refresh=False, redirect_stdout=sys.stdout.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=sum(weights))

        def show(name: str, done: int) -> None:
            bar.update(task, description=name, completed=sum(weights[:done]), refresh=True)

        yield show


def plain(doc: str | None) -> str:
    """A docstring as a terminal shows it."""
    return (doc or "").replace("``", "")
