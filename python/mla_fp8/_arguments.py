"""Calls of ops, and what wrappers check that the ops cannot."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ._torch_private import schema_of

__all__ = ["all_given", "call_op", "expect_tensors", "need_tensors", "raise_named", "shown"]

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = 16
_short.maxother = _short.maxstring = 80
_KINDS = {"Tensor": "a tensor", "int": "an int", "float": "a float", "bool": "a bool", "str": "a string"}
_OF_TORCH = re.compile(r"(?:Expected a value of type '.*'|is missing value) for argument '(\w+)'")


def shown(x: object) -> str:
    """As a message shows what came in place of a tensor: in a line, however much it holds."""
    return " ".join(_short.repr(x).split())


def call_op(name: str, /, *args: object, **options: object) -> Any:
    """``torch.ops.mla_fp8.<name>``. TypeError for an argument of another kind, in a line: torch says more."""
    try:
        return getattr(torch.ops.mla_fp8, name)(*args, **options)
    except RuntimeError as error:
        raise_named(torch.ops.mla_fp8, name, error, args, options)


def raise_named(
    namespace: Any,
    name: str,
    error: RuntimeError,
    args: tuple[object, ...],
    options: Mapping[str, object],
) -> NoReturn:
    """What an op of the namespace raised, in our words where torch found an argument of another kind."""
    op, name, said = getattr(namespace, name), name.removesuffix("_out"), str(error)
    if found := _OF_TORCH.search(said):
        kinds = {x.name: str(x.type) for x in schema_of(op).arguments}
        given = {**dict(zip(kinds, args, strict=False)), **options}
        argument = found[1]
        kind = kinds[argument].removeprefix("Optional[").removesuffix("]")
        expected, got = _KINDS.get(kind, kind), shown(given.get(argument))
        raise TypeError(f"mla_fp8.{name}: {argument} must be {expected}, got {got}") from None
    if said.endswith("must be a tensor, got None"):  # which torch takes for a tensor without elements
        raise TypeError(said) from None
    raise error


def all_given(op: str, **buffers: torch.Tensor | None) -> bool:
    """Whether the caller passed its own output buffers. ValueError if it passed only some of them."""
    missing = [name for name, buffer in buffers.items() if buffer is None]
    if missing and len(missing) < len(buffers):
        names, got = ", ".join(buffers), ", ".join(missing)
        raise ValueError(f"mla_fp8.{op}: expected all of {names} or none, got no {got}")
    return not missing


def need_tensors(op: str, **required: object) -> None:
    """TypeError for what is no tensor, where Python code needs one before the op can look."""
    for name, x in required.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"mla_fp8.{op}: {name} must be a tensor, got {shown(x)}")


def expect_tensors(op: str, **optional: object) -> None:
    """The same of what may be None."""
    need_tensors(op, **{name: x for name, x in optional.items() if x is not None})
