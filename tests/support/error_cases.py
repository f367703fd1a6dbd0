"""Spoilt arguments, and how they must be refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Rows = list[tuple[Callable[[Any], Any], str, str]]  # how it is spoilt, what it must be, what came


def error_cases(tables: dict[str, dict[str, Rows]]) -> pytest.MarkDecorator:
    """Parametrises (layout, argument, spoil, message) from one table of arguments per layout."""
    return pytest.mark.parametrize(
        "layout, argument, spoil, message",
        [
            pytest.param(layout, name, spoil, f"{name} must {must}, got {got}", id=f"{layout}-{name}-{got}")
            for layout, table in tables.items()
            for name, rows in table.items()
            for spoil, must, got in rows
        ],
    )


Errors = type[Exception] | tuple[type[Exception], ...]


def named(message: str, otherwise: Errors = (ValueError, RuntimeError)) -> Errors:
    """The error that says so: TypeError for what is no tensor."""
    return TypeError if " must be a tensor, got " in message else otherwise


def check_refused(
    function: Callable[..., Any], arguments: dict[str, Any], message: str, error: Errors | None = None
) -> None:
    """The call raises, and nothing that was passed has changed."""
    error = named(message, RuntimeError) if error is None else error
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=re.escape(message)):
        function(**arguments)
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(*(x.flatten().contiguous().view(torch.uint8) for x in (now, then)))


def misaligned(x):
    """The same values one element past a multiple of 16 bytes."""
    flat = torch.cat([x.flatten()[:1], x.flatten()])
    return flat[1:].view(x.shape)


def transposed(x):
    return x.t().contiguous().t()


def odd_rows(x):
    """The same values, rows 8 bytes further apart."""
    return torch.nn.functional.pad(x, (0, 8 // x.element_size()))[:, : x.shape[1]]
