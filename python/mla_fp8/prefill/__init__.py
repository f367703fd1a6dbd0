"""Sparse prefill of a chunk: what its layers share is computed once per forward, the rest per layer.

A layer attends to selected compressed entries and to a sliding window. There are three ways there, with the
same result up to rounding (a slot that a table or a cache does not hold is masked in each):

``whole``     dequantise all entries of the chunk's requests into a bf16 workspace, attend to its rows
``selected``  the same with those entries only that the chunk refers to, each once
``direct``    attend to the FP8 pages: no workspace

``auto`` takes the one that :mod:`mla_fp8.prefill.costs` predicts to be fastest. Nothing here waits for the
device: sizes come from lengths that the caller knows on the host.
"""

from .chunk import SparsePrefillChunkCache
from .layer import LayerCaches, PagedCache
from .workspace import STRATEGIES, PrefillWorkspace, workspace_rows

__all__ = [
    "STRATEGIES",
    "LayerCaches",
    "PagedCache",
    "PrefillWorkspace",
    "SparsePrefillChunkCache",
    "workspace_rows",
]
