"""What wrappers check that the ops cannot."""

import reprlib

import torch

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = 16
_short.maxother = _short.maxstring = 80


def shown(x: object) -> str:
    """As a message shows what came in place of a tensor: in a line, however much it holds."""
    return " ".join(_short.repr(x).split())


def all_given(op: str, **buffers: torch.Tensor | None) -> bool:
    """Whether the caller passed its own output buffers. ValueError if it passed only some of them."""
    missing = [name for name, buffer in buffers.items() if buffer is None]
    if missing and len(missing) < len(buffers):
        names, got = ", ".join(buffers), ", ".join(missing)
        raise ValueError(f"mla_fp8.{op}: expected all of {names} or none, got no {got}")
    return not missing


def need_tensors(op: str, **required: object) -> None:
    """RuntimeError for what is no tensor where Python code needs one before the op can look."""
    for name, x in required.items():
        if not isinstance(x, torch.Tensor):
            raise RuntimeError(f"mla_fp8::{op}: {name} must be a tensor, got {shown(x)}")


def expect_tensors(op: str, **optional: object) -> None:
    """RuntimeError for a number or a list in place of a tensor, in a line: torch would print the schema."""
    need_tensors(op, **{name: x for name, x in optional.items() if x is not None})
