"""What another package must have for us: named things with the parameters that we pass, compared in both
directions where we take its place. An installed version is probed, never looked up."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Needs = Mapping[str, Mapping[str, tuple[str, ...]]]  # module: {attribute: parameters that we pass}


def why_not_call(needs: Needs) -> str | None:
    """The first thing that is not there or does not take a parameter that we pass, or None."""
    for name, attributes in needs.items():
        try:
            if find_spec(name.partition(".")[0]) is None:
                return f"{name} is not installed"
            module = import_module(name)
        except Exception as error:  # of whatever kind: what cannot be imported cannot be used
            return f"{name} cannot be imported ({type(error).__name__}: {error})"
        if module.__name__.startswith("mla_fp8."):
            return f"{name} is our own stand-in for it"
        for path, passed in attributes.items():
            found = find(module, path)
            taken = parameters(found) if found is not None and passed else None
            lacking = [p for p in passed if taken is not None and p not in taken]
            if found is None:
                return f"{name} has no {path}"
            if lacking:
                return f"{name} has {path} without {', '.join(lacking)} (another version)"
    return None


def why_not_replace(
    theirs: Callable[..., Any], ours: Callable[..., Any], known: Collection[str] = ()
) -> str | None:
    """What keeps ``ours`` from being called in place of ``theirs``, or None.

    Every parameter of theirs is one of ours or ``known``; every one that ours needs is one of theirs, but
    ``original``, which a hook gets besides.
    """
    names, own = parameters(theirs), parameters(ours)
    unknown = [p for p in names or () if own is not None and p not in own and p not in known]
    if unknown:
        return f"takes {', '.join(unknown)}, which ours does not"
    needed = [p.name for p in inspect.signature(ours).parameters.values() if p.default is p.empty]
    passed = None if own is None or names is None else {"original", *names}
    lacking = [p for p in needed if passed is not None and p not in passed]
    return f"does not take {', '.join(lacking)}, which ours needs" if lacking else None


def why_not_override(theirs: type, ours: type) -> str | None:
    """The first method of ``ours`` that cannot stand for that of ``theirs``, or None."""
    methods = [name for name in vars(ours) if not name.startswith("__") and callable(getattr(ours, name))]
    for name in methods:
        if not hasattr(theirs, name):
            return f"{theirs.__name__} has no {name}"
        reason = why_not_replace(getattr(theirs, name), getattr(ours, name))
        if reason:
            return f"{theirs.__name__}.{name} {reason}"
    return None


@functools.lru_cache(maxsize=256)  # hooks ask in each call
def parameters(function: Callable[..., Any]) -> list[str] | None:
    """The names of its parameters; None if it takes any."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # of a compiled function
        return None
    anything = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found)
    return None if anything else [p.name for p in found]


def find(holder: Any, path: str) -> Any:
    for part in path.split("."):
        holder = getattr(holder, part, None)
    return holder


def why_not_rewrite(theirs: Callable[..., Any], known: Mapping[str, str]) -> str | None:
    """Why a function whose steps ours takes one by one is none that we have read, or None.

    ``known``: the version of each source that we have, by the first 16 hex digits of its SHA-256.
    """
    function = inspect.unwrap(theirs)
    try:
        digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        digest = "no source"
    found = known.get(digest)
    return None if found else f"{function.__qualname__} is not that of {', '.join(known.values())} ({digest})"
