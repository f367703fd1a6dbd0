"""FlashInfer's kernels for packed caches on SM120 and SM121: ``dsv32``, and ``dsv4`` with one or two caches.

Its conventions: above 64 tokens 8, 16, 32, 64 or 128 heads and widths in blocks of 64; lse in base 2 unless
scaled, and with the sink in it, so ours is applied here. Its kernels round the queries and the weights to
FP8: it has to be asked for. Its wrapper remembers plans by shape, and owns scratch that calls on two streams
must not share; ours lives for one call, so that none can be captured in a CUDA graph.
"""

import math

from torch import Tensor

from ..call import Pair, Scope, SparseCall
from ..layout import KVLayout
from .convert import apply_sink, masked, padded, pages_view, refuse_capture, to_multiple
from .packages import Api, function

DECODE = Api(("flashinfer.mla",), (("SparseMLASm120Wrapper", ("kv_scale_format", "device")),))
HEADS = (8, 16, 32, 64, 128)
_WIDTH = 64


def sparse_decode(call: SparseCall) -> Pair:
    q, num_q_heads = call.q, call.q.shape[1]
    refuse_capture(q, "flashinfer_sm120", "plans in every call")
    queries, _ = padded(q.contiguous(), None, HEADS)
    (cache, rows), *extra = (_pages_and_slots(scope, call.layout) for scope in call.scopes)
    extra_cache, extra_rows = extra[0] if extra else (None, None)
    out = queries.new_empty(*queries.shape[:2], call.layout.head_dim_v)
    lse = function(DECODE, "SparseMLASm120Wrapper")(device=q.device).run(
        queries,
        cache,
        rows,
        out,
        call.sm_scale,
        extra_kv_cache=extra_cache,
        extra_indices=extra_rows,
        return_lse=True,
        lse_scale=math.log(2),
    )
    out, lse = out[:, :num_q_heads].contiguous(), lse[:, :num_q_heads].contiguous()
    return apply_sink(out, lse, call.attn_sink), lse


def _pages_and_slots(scope: Scope, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """The cache's pages and, in blocks, the slots that count."""
    pages = pages_view(scope.kv, layout, scope.page_size)
    return pages, to_multiple(masked(scope, len(pages) * scope.page_size), _WIDTH)
