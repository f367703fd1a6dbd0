"""The specification in plain PyTorch, as a backend: for checking, not for serving."""

from torch import Tensor

from .. import reference
from ..call import Pair, Scope, SparseCall, Triple


def scopes(call: SparseCall) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """What :func:`mla_fp8.reference.sparse_attention` takes: (rows, indices, length) of each cache."""
    return [(_rows(call, scope), _slots(call, scope), scope.length) for scope in call.scopes]


def _rows(call: SparseCall, scope: Scope) -> Tensor:
    if call.op == "sparse_prefill":
        return scope.kv
    return reference.dequantize_cache(
        scope.kv, layout=scope.layout, page_size=scope.page_size, scale=call.scale
    )


def _slots(call: SparseCall, scope: Scope) -> Tensor:
    if scope.indices is not None:
        return scope.indices
    assert call.window is not None
    *tables, size = call.window
    if scope.page_table is not None:
        assert scope.length is not None
        return reference.entry_slots(
            scope.page_table, call.window.query_start_loc, scope.length,
            num_tokens=len(call.q), page_size=scope.page_size,
        )  # fmt: skip
    return reference.window_slots(
        *tables, num_tokens=len(call.q), page_size=scope.page_size, window_size=size
    )


def sparse_prefill(call: SparseCall) -> Triple:
    return reference.sparse_attention(call.q, scopes(call), sm_scale=call.sm_scale, attn_sink=call.attn_sink)


sparse_prefill_paged = sparse_prefill_window = sparse_prefill


def sparse_decode(call: SparseCall) -> Pair:
    out, _, lse = sparse_prefill(call)
    return out, lse
