"""Functions of an engine that ours serve but for some calls, which stay the engine's; it is said once why."""

from collections.abc import Callable
from typing import Any

from .. import probes
from .log import say_once

Given = dict[str, Any]  # the arguments of a call, by name
# ours, and why a call with these arguments is not for it, or None
Op = tuple[Callable[..., Any], Callable[[Given], str | None]]


def hook(ours: Callable[..., Any], elsewhere: Callable[[Given], str | None]) -> Callable[..., Any]:
    """What runs around the engine's function. Where that does not tell its parameters, ours has the same."""

    def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        names = probes.parameters(original) or probes.parameters(ours) or ()
        given = dict(zip(names, args, strict=False)) | options
        reason = elsewhere(given)
        if reason is None:
            return ours(**given)
        say_once(f"mla_fp8: {original.__name__} stays the engine's for {reason}")
        return original(*args, **options)

    return around
