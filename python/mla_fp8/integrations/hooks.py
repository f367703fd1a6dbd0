"""What takes the place of an engine's functions.

The entry points of mla_fp8_plugins call ``register`` functions once the engine's list names the plug-in.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .. import probes
from .log import say_once

Given = dict[str, Any]  # the arguments of a call, by name
# ours, and why a call with these arguments is not for it, or None
Op = tuple[Callable[..., Any], Callable[[Given], str | None]]


def hook(ours: Callable[..., Any], elsewhere: Callable[[Given], str | None]) -> Callable[..., Any]:
    """What runs around the engine's function; calls that stay the engine's are said once, with the reason.

    Where the engine's does not tell its parameters, ours has the same.
    """

    def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        names = probes.parameters(original) or probes.parameters(ours) or ()
        given = dict(zip(names, args, strict=False)) | options
        reason = elsewhere(given)
        if reason is None:
            return ours(**given)
        say_once(f"mla_fp8: {original.__name__} stays the engine's for {reason}")
        return original(*args, **options)

    return around


def register_in_sglang(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """``hooks``: target, and what runs around it."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    for target, around in hooks.items():
        registry.HookRegistry.register(target, around, registry.HookType.AROUND)
