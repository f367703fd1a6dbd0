"""Fake (shape-only) implementations, for torch.compile, torch.export and meta tensors."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ._torch_private import schema_of
from .layout import HEAD_DIM_V

Function = TypeVar("Function", bound=Callable[..., Any])
_library = torch.library.Library("mla_fp8", "IMPL")


def fake(op: str) -> Callable[[Function], Function]:
    """Decorator: this function computes the outputs' shapes and dtypes of ``torch.ops.mla_fp8.<op>``."""
    return fake_of(_library, op)


def fake_of(library: torch.library.Library, op: str) -> Callable[[Function], Function]:
    """The same for an op of another library."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args: object, **options: object) -> object:
            _check_devices(library.ns, op, *args, **options)
            return function(*args, **options)

        torch.library.register_fake(f"{library.ns}::{op}", checked, lib=library)
        return function

    return register


def attention_outputs(number: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The fake of a sparse attention op: (out, lse), or with three results (out, max_logits, lse)."""

    def outputs(q: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, ...]:
        out = q.new_empty((q.shape[0], q.shape[1], HEAD_DIM_V), dtype=torch.bfloat16)
        per_head = [q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(number - 1)]
        return out, *per_head

    return outputs


def fake_returns_nothing(*ops: str) -> None:
    """The ops that write into arguments have no outputs to describe, and refuse lazy negative views there."""
    for op in ops:
        fake(op)(lambda *args, **kwargs: None)
        _library.impl(op, functools.partial(_without_negative_views, op), "Negative")


def _without_negative_views(op: str, *args: object, **options: object) -> None:
    """Computes inputs that are lazy negative views. torch's own fallback fails after outputs were written."""
    function = getattr(torch.ops.mla_fp8, op)
    arguments = schema_of(function).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | options
    for argument in arguments:
        x = given.get(argument.name)
        if isinstance(x, torch.Tensor) and x.is_neg():
            if argument.is_write:
                raise ValueError(
                    f"mla_fp8.{op.removesuffix('_out')}: {argument.name} must hold its own values, "
                    "got a lazy negative view (Tensor.resolve_neg)"
                )
            given[argument.name] = x.resolve_neg()
    function(**given)


_OF_HOST = "host_caches"  # lie in pinned memory, beside tensors of a GPU


def _tensors(given: dict[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those among the arguments, and those in lists."""
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            yield name, x
        elif isinstance(x, (list, tuple)):
            yield from ((f"{name}[{i}]", y) for i, y in enumerate(x) if isinstance(y, torch.Tensor))


def _check_devices(namespace: str, op: str, *args: object, **options: object) -> None:
    """One meta tensor brings a call here whose others hold data: a mismatch like any other."""
    schema = schema_of(getattr(getattr(torch.ops, namespace), op))
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | options
    (first, x), *others = sorted(_tensors(given), key=lambda named: named[0].startswith(_OF_HOST))
    for name, other in others:
        if other.device != x.device and not (name.startswith(_OF_HOST) and other.device.type == "cpu"):
            raise RuntimeError(
                f"mla_fp8.{op.removesuffix('_out')}: {name} must be on {x.device} like {first}, "
                f"got {other.device}"
            )
