"""FlashMLA, whichever build is on the path. In SGLang's, kernels for Hopper are what it calls legacy."""

import importlib
from types import SimpleNamespace

from mla_fp8.backends.flash_mla import for_our_layouts


def find_flash_mla() -> SimpleNamespace | None:
    try:
        package = importlib.import_module("flash_mla")
    except ImportError:
        return None
    kernels = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    found = {name: for_our_layouts(getattr(package, name)) for name in kernels}
    return SimpleNamespace(get_mla_metadata=package.get_mla_metadata, **found)
