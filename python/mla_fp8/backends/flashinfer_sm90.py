"""FlashInfer's planned MLA wrapper on Hopper (its FA3 kernels, else FA2), with pages of one token: the slots
that a query token selected are the page list of a request of its own.

bf16 caches, and FP8 ones with a scale per layer, which it widens to bf16. A plan reads the lists' lengths on
the host, so that every call waits for the GPU and none can be captured in a CUDA graph: it has to be asked
for.

Its conventions: lists without holes, one after another, empty ones too (out 0, lse -inf, as ours); at most
16384 pieces of work in a plan; scales of the cache are rounded to bf16, so ours go into the logits and the
output. It gives no largest logits, hence no `sparse_prefill`.
"""

import torch
from torch import Tensor

from ..call import Pair, SparseCall
from ..layout import KVLayout
from .convert import apply_sink, masked, ragged, refuse_capture, rows_view
from .packages import Api, function

DECODE = Api(
    ("flashinfer.mla",),
    (
        ("BatchMLAPagedAttentionWrapper", ("float_workspace_buffer", "backend")),
        ("MLAPlanMetadata", ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
    ),
)
MAX_Q_HEADS = 128  # a token's heads in one piece of work
_MAX_BATCH = 8192  # splits of long lists come on top
_WORKSPACE_BYTES = 128 << 20


def sparse_decode(call: SparseCall) -> Pair:
    q, layout, (scope, *_) = call.q, call.layout, call.scopes
    refuse_capture(q, "flashinfer_sm90", "plans on the host")
    rows = rows_view(scope.kv, scope.page_size, layout.head_dim_qk, layout.fp8_dtype or torch.bfloat16)
    slots = masked(scope, len(rows))
    cache_scale = 1.0 if call.scale is None else call.scale.item()
    outs, lses = [torch.empty_like(q[:0, :, : layout.head_dim_v])], [q.new_empty(0, q.shape[1]).float()]
    for begin in range(0, len(q), _MAX_BATCH):
        part = slice(begin, begin + _MAX_BATCH)
        out, lse = _attend(q[part].contiguous(), rows, slots[part], layout, call.sm_scale * cache_scale)
        outs.append(out)
        lses.append(lse)
    lse = torch.cat(lses)
    return apply_sink(torch.cat(outs), lse, call.attn_sink, cache_scale), lse


def _attend(q: Tensor, rows: Tensor, slots: Tensor, layout: KVLayout, sm_scale: float) -> Pair:
    indptr, flat = ragged(slots)
    wrapper = function(DECODE, "BatchMLAPagedAttentionWrapper")(
        torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device), backend="auto"
    )
    wrapper.plan(
        metadata=function(DECODE, "MLAPlanMetadata")(
            qo_indptr=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            kv_indptr=indptr,
            kv_indices=flat,
            kv_len_arr=indptr.diff(),
        ),
        num_heads=q.shape[1],
        head_dim_ckv=layout.head_dim_v,
        head_dim_kpe=layout.head_dim_qk - layout.head_dim_v,
        page_size=1,
        causal=False,
        sm_scale=sm_scale,
        q_data_type=q.dtype,
        kv_data_type=rows.dtype,
        lse_mode="basee",
    )
    one = 1.0 if layout.needs_scale else None
    out, lse = wrapper.run(
        query=q,
        kv_cache=rows[:, None],
        return_lse=True,
        return_lse_base_on_e=True,
        ckv_scale=one,
        kpe_scale=one,
    )
    return out, lse
