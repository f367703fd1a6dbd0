"""FlashMLA, whichever build is on the path. In SGLang's, kernels for Hopper are what it calls legacy."""

import importlib
from types import SimpleNamespace

from mla_fp8.backends.flash_mla import for_our_layouts, has_sides


def find_flash_mla() -> SimpleNamespace | None:
    try:
        package = importlib.import_module("flash_mla")
    except ImportError:
        return None
    kernels = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    found = {name: for_our_layouts(getattr(package, name)) for name in kernels}
    return SimpleNamespace(get_mla_metadata=package.get_mla_metadata, **found)


def build() -> str:
    """Which one it is, as `commit` of its rows has it: `sgl-flash-mla 1.0.0`."""
    package = importlib.import_module("flash_mla")
    name = "sgl-flash-mla" if has_sides(package.flash_mla_with_kvcache) else "flash_mla"
    return f"{name} {getattr(package, '__version__', '')}".rstrip()
