"""Fake (shape-only) implementations, for torch.compile, torch.export and meta tensors."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def fake(op: str) -> Callable[[Function], Function]:
    """Decorator: this function computes the outputs' shapes and dtypes of ``torch.ops.mla_fp8.<op>``."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args: object, **options: object) -> object:
            _check_devices(op, *args, **options)
            return function(*args, **options)

        torch.library.register_fake(f"mla_fp8::{op}", checked)
        return function

    return register


def fake_returns_nothing(*ops: str) -> None:
    """The ops that write into arguments have no outputs to describe."""
    for op in ops:
        fake(op)(lambda *args, **kwargs: None)


def _check_devices(op: str, *args: object, **options: object) -> None:
    """One meta tensor brings a call here whose others hold data: a mismatch like any other."""
    (first, x), *others = _tensors(op, *args, **options)
    for name, other in others:
        if other.device != x.device:
            raise RuntimeError(
                f"mla_fp8::{op.removesuffix('_out')}: {name} must be on {x.device} like {first}, "
                f"got {other.device}"
            )


def _tensors(op: str, *args: object, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
    names = [argument.name for argument in getattr(torch.ops.mla_fp8, op).default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    return ((name, x) for name, x in given.items() if isinstance(x, torch.Tensor))
