"""What the commands of ``python -m mla_fp8`` share: arguments that argparse refuses with a sentence."""

import argparse
import math
import re
from collections.abc import Callable

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


def plain(doc: str | None) -> str:
    """A docstring as a terminal shows it."""
    return (doc or "").replace("``", "")
