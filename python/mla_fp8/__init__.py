"""FP8 latent KV caches and sparse MLA attention for PyTorch, compiled ahead of time."""

from . import _libraries

_libraries.load_all()

from .layout import KV_LAYOUTS, KVLayout
from .ops.dequantize_kv import dequantize_kv, dequantize_kv_paged
from .ops.quantize_kv import quantize_kv
from .ops.sparse_decode import sparse_decode
from .ops.sparse_prefill import sparse_prefill, sparse_prefill_paged

__all__ = [
    "KV_LAYOUTS",
    "KVLayout",
    "dequantize_kv",
    "dequantize_kv_paged",
    "quantize_kv",
    "sparse_decode",
    "sparse_prefill",
    "sparse_prefill_paged",
]
