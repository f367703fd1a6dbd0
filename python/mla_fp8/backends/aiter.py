"""AITER's MLA decode on MI300 and MI350, with pages of one token: the selected slots are the page list.

Its conventions: ragged slots without holes; no row may be empty; 16 or 128 heads; no sink. FP8 rounds queries
and softmax weights to FP8 as well (5 to 10 % error, AITER #5642): that is a backend of its own that has to be
asked for. The cache is read as it is, never upcast (SGLang #24129).
"""

import torch

from ..call import Pair, SparseCall
from .convert import (
    apply_sink,
    masked,
    nothing_where,
    padded,
    ragged,
    rows_view,
    to_fp8_queries,
    to_multiple,
    with_dummies,
)
from .packages import Api, function

DECODE = Api(("aiter.mla",), (("mla_decode_fwd", ("page_size", "nhead_kv", "return_lse", "q_scale")),))
HEADS = (16, 128)


def sparse_decode(call: SparseCall) -> Pair:
    q, layout, (scope, *_) = call.q, call.layout, call.scopes
    num_tokens, num_q_heads, _ = q.shape
    queries, _ = padded(q, None, HEADS)
    out = queries.new_empty(*queries.shape[:2], layout.head_dim_v)
    if num_tokens == 0:
        return out[:, :num_q_heads], q.new_empty(0, num_q_heads, dtype=torch.float32)
    dtype = layout.fp8_dtype or torch.bfloat16
    rows = rows_view(scope.kv, scope.page_size, layout.head_dim_qk, dtype)
    slots, empty = with_dummies(to_multiple(masked(scope, len(rows)), 1))
    indptr, flat = ragged(slots)
    q_scale = None
    if layout.needs_scale:
        queries, q_scale = to_fp8_queries(queries, dtype)
    _, lse = function(DECODE, "mla_decode_fwd")(
        queries,
        rows.view(-1, 1, 1, layout.head_dim_qk),
        out,
        torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device),
        indptr,
        flat,
        torch.ones(num_tokens, dtype=torch.int32, device=q.device),
        1,
        page_size=1,
        nhead_kv=1,
        sm_scale=call.sm_scale,
        q_scale=q_scale,
        kv_scale=call.scale,
        return_lse=True,
    )
    out, lse = nothing_where(empty, out[:, :num_q_heads], lse.view(num_tokens, -1)[:, :num_q_heads])
    return apply_sink(out, lse, call.attn_sink), lse
