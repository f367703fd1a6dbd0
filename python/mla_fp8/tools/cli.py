"""What the commands of ``python -m mla_fp8`` share: arguments that argparse refuses with a sentence."""

import argparse
from collections.abc import Callable

import torch


def device(name: str) -> str:
    """``cpu``, or a GPU that is there."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda (ROCm's name too), got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"{torch.cuda.device_count()} GPUs are visible"
            if built
            else "this torch was built for the CPU alone"
        )
        raise argparse.ArgumentTypeError(f"there is no {name}: {why}")
    return name


def at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return number


def plain(doc: str | None) -> str:
    """A docstring as a terminal shows it."""
    return (doc or "").replace("``", "")
