"""FP8 latent KV caches and sparse MLA attention for PyTorch, compiled ahead of time."""

from . import _libraries

_libraries.load_all()

from .layout import KV_LAYOUTS, KVLayout
from .ops.dequantize_kv import dequantize_kv, dequantize_kv_paged
from .ops.quantize_kv import quantize_kv

__all__ = [
    "KV_LAYOUTS",
    "KVLayout",
    "dequantize_kv",
    "dequantize_kv_paged",
    "quantize_kv",
]
