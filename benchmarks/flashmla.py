"""FlashMLA, whichever build is on the path: vLLM's or SGLang's, which has its kernels for Hopper as a side of
their own. None without one.
"""

import functools
import inspect
from types import SimpleNamespace

try:
    import flash_mla as _package
except ImportError:
    _package = None


def _for_hopper(name: str):
    function = getattr(_package, name)
    has_sides = "use_legacy" in inspect.signature(function).parameters
    return functools.partial(function, use_legacy=True) if has_sides else function


flash_mla = _package and SimpleNamespace(
    get_mla_metadata=_package.get_mla_metadata,
    flash_mla_with_kvcache=_for_hopper("flash_mla_with_kvcache"),
    flash_mla_sparse_fwd=_for_hopper("flash_mla_sparse_fwd"),
)
