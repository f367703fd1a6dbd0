"""Finds other packages' functions by name and parameters: an installed version is probed, not looked up."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Api:
    """Functions with the parameters that an adapter passes, in the first of ``modules`` that has them all."""

    modules: tuple[str, ...]
    functions: tuple[tuple[str, tuple[str, ...]], ...]


@functools.cache
def locate(api: Api) -> tuple[ModuleType | None, str]:
    """The module, or None and what is wrong with each candidate. Imports them; raises nothing."""
    reasons = []
    for name in api.modules:
        reason = _why_not(name, api)
        if reason is None:
            return import_module(name), ""
        reasons.append(f"{name} {reason}")
    return None, "; ".join(reasons)


def function(api: Api, name: str) -> Callable[..., Any]:
    """A function that dispatch found to be there."""
    module, reason = locate(api)
    if module is None:
        raise ImportError(f"mla_fp8: {reason}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def _why_not(name: str, api: Api) -> str | None:
    top = name.partition(".")[0]
    try:
        if find_spec(top) is None:
            return "is not installed"
        module = import_module(name)
    except Exception as error:  # a peer that cannot be imported, for whatever reason, is one we do not have
        return f"cannot be imported ({type(error).__name__}: {error})"
    if module.__name__.startswith("mla_fp8."):
        return "is our own stand-in for it"
    for function_name, parameters in api.functions:
        found = getattr(module, function_name, None)
        if found is None:
            return f"has no {function_name}"
        missing = [p for p in parameters if p not in inspect.signature(found).parameters]
        if missing:
            return f"has a {function_name} without {', '.join(missing)} (another version)"
    return None
