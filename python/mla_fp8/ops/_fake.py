"""Fake (shape-only) implementations, for torch.compile and torch.export."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def fake(op: str) -> Callable[[Function], Function]:
    """Decorator: this function computes the outputs' shapes and dtypes of ``torch.ops.mla_fp8.<op>``."""
    return torch.library.register_fake(f"mla_fp8::{op}")  # type: ignore[no-any-return]


def fake_returns_nothing(*ops: str) -> None:
    """The ops that write into arguments have no outputs to describe."""
    for op in ops:
        fake(op)(lambda *args, **kwargs: None)
