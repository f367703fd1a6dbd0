"""FlashInfer's sparse MLA decode, which takes one list of slots per query token in place of a page table.

bf16 and per-tensor FP8 caches on SM100 (TRTLLM-GEN). Its conventions: the valid slots of a row come first; no
row may be empty; lse in base 2 unless asked. FP8 wants queries in FP8 too, rounded with one scale per call:
that is a backend of its own that has to be asked for. FlashInfer's call for ``dsv4`` on SM100,
`trtllm_batch_decode_sparse_mla_dsv4`, gives no lse, which `sparse_decode` always returns, so there is no
adapter for it. What there is for SM90 and SM120 is in `flashinfer_sm90` and `flashinfer_sm120`.
"""

from typing import Any

import torch

from ..call import Pair, SparseCall
from .convert import (
    apply_sink,
    masked,
    nothing_where,
    packed,
    padded,
    rows_view,
    to_fp8_queries,
    to_multiple,
    with_dummies,
)
from .packages import Api, function

DECODE = Api(
    ("flashinfer.mla",),
    (
        (
            "trtllm_batch_decode_with_kv_cache_mla",
            ("sparse_mla_top_k", "return_lse", "return_lse_base"),
        ),
    ),
)
HEADS = (8, 16, 32, 64, 128)
_WORKSPACE_BYTES = 128 << 20
_QK_NOPE_HEAD_DIM = 128  # of the model before absorption; the kernels only check it
_WIDTH = 128


def sparse_decode(call: SparseCall) -> Pair:
    q, layout, (scope, *_) = call.q, call.layout, call.scopes
    if len(q) == 0:
        return q.new_empty(0, q.shape[1], layout.head_dim_v), q.new_empty(0, q.shape[1], dtype=torch.float32)
    num_slots = len(scope.kv) * scope.page_size
    rows, empty = with_dummies(packed(to_multiple(masked(scope, num_slots), _WIDTH))[0])
    options: dict[str, Any] = {"bmm1_scale": call.sm_scale, "bmm2_scale": 1.0}
    queries, _ = padded(q, None, HEADS)
    dtype = layout.fp8_dtype or torch.bfloat16
    cache = rows_view(scope.kv, scope.page_size, layout.head_dim_qk, dtype)
    if call.scale is not None:
        queries, q_scale = to_fp8_queries(queries, dtype)
        options |= {"bmm1_scale": q_scale * call.scale * call.sm_scale, "bmm2_scale": call.scale}
    out, lse = function(DECODE, "trtllm_batch_decode_with_kv_cache_mla")(
        query=queries[:, None],
        kv_cache=cache.view(-1, 1, scope.page_size, q.shape[2]),
        workspace_buffer=torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        qk_nope_head_dim=_QK_NOPE_HEAD_DIM,
        kv_lora_rank=layout.head_dim_v,
        qk_rope_head_dim=layout.head_dim_qk - layout.head_dim_v,
        block_tables=rows[:, None],
        seq_lens=(rows >= 0).sum(1, dtype=torch.int32),
        max_seq_len=rows.shape[1],
        sparse_mla_top_k=rows.shape[1],
        return_lse=True,
        return_lse_base="basee",
        **options,
    )
    num_tokens, heads, _ = queries.shape
    out, lse = out.view(num_tokens, heads, layout.head_dim_v), lse.view(num_tokens, heads)
    out, lse = nothing_where(empty, out[:, : q.shape[1]], lse[:, : q.shape[1]])
    return apply_sink(out, lse, call.attn_sink), lse
