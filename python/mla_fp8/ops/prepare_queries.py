from typing import NamedTuple

import torch

from .._arguments import expect_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS, IndexLayout, get_index_layout


class PreparedQueries(NamedTuple):
    """What :func:`prepare_queries` returns; None for what was not asked for."""

    q_pe: torch.Tensor | None
    index_q: torch.Tensor | None
    index_weights: torch.Tensor | None
    index_scale: torch.Tensor | None


def prepare_queries(
    q_pe: torch.Tensor | None,
    index_q: torch.Tensor | None,
    index_weights: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    index_cos: torch.Tensor | None = None,
    index_sin: torch.Tensor | None = None,
    *,
    neox: bool = False,
    index_neox: bool | None = None,
    index_rope_first: bool | None = None,
    hadamard: bool = False,
    layout: str | IndexLayout = "index_fp8",
    scale_format: str = "ue8m0",
    amax_floor: float | None = None,
    reciprocal: bool = False,
    weight_scale: float = 1.0,
    head_scale: float = 1.0,
    out_q_pe: torch.Tensor | None = None,
    out_index_q: torch.Tensor | None = None,
    out_index_weights: torch.Tensor | None = None,
    out_index_scale: torch.Tensor | None = None,
) -> PreparedQueries:
    """The queries of a layer behind their projections, in one launch: attention's and the indexer's.

    ====================  ==============================  =============  =====================================
    q_pe                  [num_tokens, heads, 2 * half]   bf16           or None; any strides of tokens and
                                                                         heads: the end of each head of q
    index_q               [num_tokens, index_heads, 128]  bf16           or None; as q_pe; 1 to 64 heads
    index_weights         [num_tokens, index_heads]       bf16 or fp32   with index_q; any stride of tokens
    cos, sin              [max_pos, half]                 fp32           any strides
    positions             [num_tokens]                    int64, int32   outside a table: zeros there
    index_cos, index_sin  [max_pos, half]                 fp32           the indexer's, by default cos and sin
    out_q_pe              as q_pe                         bf16           optional; any strides: q_pe itself,
                                                                         or the end of q [.., 576]
    out_index_q           [.., 128], or [.., 64] of FP4   e4m3fn, uint8  optional, contiguous
    out_index_weights     as index_weights                fp32           optional, contiguous
    out_index_scale       [num_tokens, index_heads, 4]    uint8          optional, contiguous; of FP4 alone
    ====================  ==============================  =============  =====================================

    RoPE is float32 as in :func:`mla_fp8.k_norm_rope_insert`, each result rounded to bf16. ``neox``: pairs are
    elements i and i + half of what is rotated; else neighbours. All of q_pe is rotated, a multiple of 16
    dims. Of the indexer's 128 dims the first 2 * half are (``index_rope_first``: V3.2, GLM-5), or the last
    (V4, V4.1); with ``index_neox`` (V3.2) half is 32. ``index_neox`` and ``index_rope_first`` have no
    default: a model that rotates otherwise would be fluent and wrong.

    index_q then goes through ``hadamard``, ``layout``, ``scale_format``, ``amax_floor`` and ``reciprocal`` as
    keys through :func:`mla_fp8.quantize_index_k`: the values are those of that op. In ``index_fp8`` a head
    has one scale, which goes into its weight: ``index_weights * weight_scale * scale * head_scale``,
    multiplied in this order in float32. In ``index_fp4`` scales are a result, and not in the weights.
    :func:`mla_fp8.index_topk` takes the results as they are.

    Returns (q_pe, index_q, index_weights, index_scale): buffers of the caller's where given, None for what
    was not asked for. Raises RuntimeError naming the argument, what was expected and what came, before
    anything is written; ValueError for an unknown layout name, and for index_q without ``index_neox`` or
    ``index_rope_first``.
    """
    index = {"index_cos": index_cos, "index_sin": index_sin}
    given = {"q_pe": q_pe, "index_q": index_q, "index_weights": index_weights} | index
    out = {
        "out_q_pe": out_q_pe, "out_index_q": out_index_q, "out_index_weights": out_index_weights,
        "out_index_scale": out_index_scale,
    }  # fmt: skip
    expect_tensors("prepare_queries", **given, **out)
    refuse_gradients(
        "prepare_queries", q_pe=q_pe, index_q=index_q, index_weights=index_weights, cos=cos, sin=sin,
        out_q_pe=out_q_pe, out_index_weights=out_index_weights,
    )  # fmt: skip
    if index_q is not None and (index_neox is None or index_rope_first is None):
        raise ValueError(
            "mla_fp8.prepare_queries: expected index_neox and index_rope_first with index_q, got "
            f"{index_neox} and {index_rope_first}"
        )
    found = get_index_layout(layout)
    options = {
        "neox": neox,
        "index_neox": bool(index_neox),
        "index_rope_first": bool(index_rope_first),
        "hadamard": hadamard,
        "layout": found.id,
        "scale_format": scale_format,
        "amax_floor": amax_floor,
        "reciprocal": reciprocal,
        "weight_scale": weight_scale,
        "head_scale": head_scale,
    }
    tensors = (q_pe, index_q, index_weights, cos, sin, positions, *index.values())
    if all(x is None for x in out.values()):
        results = torch.ops.mla_fp8.prepare_queries(*tensors, **options)
    else:
        results = _buffers(found, q_pe, index_q, *out.values())
        torch.ops.mla_fp8.prepare_queries_out(*tensors, **options, **dict(zip(out, results, strict=True)))
    asked = (q_pe, index_q, index_q, index_q if found is INDEX_LAYOUTS["index_fp4"] else None)
    return PreparedQueries(*(x if y is not None else None for x, y in zip(results, asked, strict=True)))


def _buffers(
    layout: IndexLayout,
    q_pe: torch.Tensor | None,
    index_q: torch.Tensor | None,
    out_q_pe: torch.Tensor | None,
    out_index_q: torch.Tensor | None,
    out_weights: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The caller's, and new ones for what else is wanted."""
    if q_pe is not None and out_q_pe is None:
        out_q_pe = torch.empty_like(q_pe, memory_format=torch.contiguous_format)
    if index_q is not None:
        codes, weights, scales = _index_outputs(index_q, layout)
        out_index_q = codes if out_index_q is None else out_index_q
        out_weights = weights if out_weights is None else out_weights
        if layout.value_bytes != INDEX_DIM and out_scale is None:
            out_scale = scales
    return out_q_pe, out_index_q, out_weights, out_scale


def _index_outputs(
    index_q: torch.Tensor, layout: IndexLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = index_q.shape[:2]
    is_fp8 = layout.value_bytes == INDEX_DIM
    codes = index_q.new_empty(
        (*rows, layout.value_bytes), dtype=torch.float8_e4m3fn if is_fp8 else torch.uint8
    )
    scales = index_q.new_empty((0 if is_fp8 else rows[0], rows[1], layout.scale_bytes), dtype=torch.uint8)
    return codes, index_q.new_empty(rows, dtype=torch.float32), scales


@fake("prepare_queries")
def _(
    q_pe: torch.Tensor | None,
    index_q: torch.Tensor | None,
    index_weights: torch.Tensor | None,
    cos: torch.Tensor,
    *tensors: object,
    layout: int = 0,
    **options: object,
) -> tuple[torch.Tensor, ...]:
    found = next(x for x in INDEX_LAYOUTS.values() if x.id == layout)
    of_index = cos.new_empty((0, 0, INDEX_DIM)) if index_q is None else index_q
    q = cos.new_empty((0, 0, 0), dtype=torch.bfloat16) if q_pe is None else q_pe.new_empty(q_pe.shape)
    return q, *_index_outputs(of_index, found)


fake_returns_nothing("prepare_queries_out")
