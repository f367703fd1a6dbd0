"""What functions with other packages' names share: the callers' names of arguments, and checks of these."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def caller_names(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Errors from below name the argument ``ours`` as ``names["ours"]``, which the caller passed."""
    ours = re.compile(rf"\b({'|'.join(names)})\b(?!\()")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            try:
                return function(*args, **options)
            except (RuntimeError, ValueError, TypeError) as error:
                said = ours.sub(lambda found: names[found[1]], str(error))
                if said == str(error) or type(error) not in (RuntimeError, ValueError, TypeError):
                    raise
                raise type(error)(said) from None

        return call

    return decorate


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The keyword ``other`` of another version is the parameter ``names["other"]``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            given = {names.get(name, name): value for name, value in options.items()}
            return function(*args, **given)  # type: ignore[arg-type]

        return call

    return decorate


def expect_rows(function: str, rows: int, device: torch.device, **tensors: torch.Tensor) -> None:
    """ValueError for what is elsewhere, or shorter than the code in Python that indexes it takes it for."""
    for name, x in tensors.items():
        if x.device != device:
            raise ValueError(f"{function}: {name} must be on {device}, got {x.device}")
        if x.dim() == 0 or len(x) < rows:
            raise ValueError(f"{function}: {name} must have at least {rows} rows, got {[*x.shape]}")
