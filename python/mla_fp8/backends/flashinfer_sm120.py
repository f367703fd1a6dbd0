"""FlashInfer's kernels for packed caches on SM120 and SM121: ``dsv32``, and ``dsv4`` with one or two caches.

Its conventions: above 64 tokens 8, 16, 32, 64 or 128 heads and widths in blocks of 64; lse in base 2 unless
scaled, and with the sink in it, so ours is applied here. Its kernels round the queries and the weights to
FP8: it has to be asked for. Its wrapper remembers plans by shape, and owns scratch that calls on two streams
must not share; ours lives for one call, so that none can be captured in a CUDA graph.
"""

import math

from torch import Tensor

from ..layout import KVLayout
from .convert import apply_sink, masked, padded, pages_view, refuse_capture, to_multiple
from .native import Pair
from .packages import Api, function

DECODE = Api(("flashinfer.mla",), (("SparseMLASm120Wrapper", ("kv_scale_format", "device")),))
HEADS = (8, 16, 32, 64, 128)
_WIDTH = 64


def sparse_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_page_size: int | None = None,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> Pair:
    refuse_capture(q, "flashinfer_sm120", "plans in every call")
    num_q_heads = q.shape[1]
    queries, _ = padded(q.contiguous(), None, HEADS)
    cache, rows = _scope(kv_cache, indices, topk_length, layout, page_size)
    extra_cache = extra_rows = None
    if extra_kv_cache is not None and extra_indices is not None and extra_page_size is not None:
        extra_cache, extra_rows = _scope(
            extra_kv_cache, extra_indices, extra_topk_length, layout, extra_page_size
        )
    out = queries.new_empty(*queries.shape[:2], layout.head_dim_v)
    lse = function(DECODE, "SparseMLASm120Wrapper")(device=q.device).run(
        queries,
        cache,
        rows,
        out,
        sm_scale,
        extra_kv_cache=extra_cache,
        extra_indices=extra_rows,
        return_lse=True,
        lse_scale=math.log(2),
    )
    out, lse = out[:, :num_q_heads].contiguous(), lse[:, :num_q_heads].contiguous()
    return apply_sink(out, lse, attn_sink), lse


def _scope(
    kv_cache: Tensor, indices: Tensor, length: Tensor | None, layout: KVLayout, page_size: int
) -> tuple[Tensor, Tensor]:
    """The cache's pages and, in blocks, the slots that count."""
    cache = pages_view(kv_cache, layout, page_size)
    return cache, to_multiple(masked(indices, len(cache) * page_size, length), _WIDTH)
