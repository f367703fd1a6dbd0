"""FlashMLA, whichever build is on the path. In SGLang's, kernels for Hopper are what it calls legacy."""

import functools
import importlib
import inspect
from types import SimpleNamespace


def find_flash_mla() -> SimpleNamespace | None:
    try:
        package = importlib.import_module("flash_mla")
    except ImportError:
        return None

    def for_hopper(name: str):
        function = getattr(package, name)
        has_sides = "use_legacy" in inspect.signature(function).parameters
        return functools.partial(function, use_legacy=True) if has_sides else function

    kernels = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    found = {name: for_hopper(name) for name in kernels}
    return SimpleNamespace(get_mla_metadata=package.get_mla_metadata, **found)
