"""Other packages' functions that adapters call, in the first place that has them all."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import probes


@dataclass(frozen=True)
class Api:
    """Functions with the parameters that an adapter passes, in the first of ``modules`` that has them all.

    ``why_not`` says what else is wrong with such a module, or None.
    """

    modules: tuple[str, ...]
    functions: tuple[tuple[str, tuple[str, ...]], ...]
    why_not: Callable[[ModuleType], str | None] = lambda module: None


@functools.cache
def locate(api: Api) -> tuple[ModuleType | None, str]:
    """The module, or None and what is wrong with each candidate. Imports them; raises nothing."""
    reasons = []
    for name in api.modules:
        reason = probes.why_not_call({name: dict(api.functions)}) or api.why_not(import_module(name))
        if reason is None:
            return import_module(name), ""
        reasons.append(reason)
    return None, "; ".join(reasons)


def function(api: Api, name: str) -> Callable[..., Any]:
    """A function that dispatch found to be there."""
    module, reason = locate(api)
    if module is None:
        raise ImportError(f"mla_fp8: {reason}")
    found: Callable[..., Any] = getattr(module, name)
    return found
