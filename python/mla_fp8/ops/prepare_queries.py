from typing import NamedTuple

import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import INDEX_DIM, INDEX_LAYOUTS, IndexLayout, get_index_layout

__all__ = ["PreparedQueries", "prepare_queries"]


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
    """Prepare the queries of a layer behind their projections: attention's and the indexer's, in one launch.

    Experimental. RoPE is float32 as in :func:`k_norm_rope_insert`, each result rounded to bf16. All of
    ``q_pe`` is rotated, and 2 * half of the indexer's 128 dims. The indexer's queries are then quantised as
    :func:`quantize_index_k` does keys. In ``index_fp8`` a head has one scale, which goes into its weight:
    ``index_weights * weight_scale * scale * head_scale``, multiplied in this order in float32. In
    ``index_fp4`` scales are a result. :func:`index_topk` takes the results as they are.

    Args:
        q_pe: [num_tokens, num_heads, 2 * half] bfloat16 or None, any strides of tokens and heads: the end of
            each head of q. A multiple of 16 dims.
        index_q: [num_tokens, index_heads, 128] bfloat16 or None, any strides of tokens and heads; 1 to 64
            heads.
        index_weights: [num_tokens, index_heads] bfloat16 or float32, any stride of tokens; with ``index_q``.
        cos: As in :func:`k_norm_rope_insert`.
        sin: As in :func:`k_norm_rope_insert`.
        positions: [num_tokens] int64 or int32. A token outside a table has zeros.
        index_cos: The indexer's ``cos``, by default that of attention.
        index_sin: The indexer's ``sin``, with ``index_cos``.
        neox: Whether RoPE of ``q_pe`` takes pairs i and i + half; else it takes neighbours.
        index_neox: The same of the indexer: True of V3.2, and half is then 32. Without a default: a model
            that rotates otherwise is fluent and wrong.
        index_rope_first: Whether the first of the 128 dims are rotated (V3.2, GLM-5), or the last (V4, V4.1).
            Without a default.
        hadamard: As in :func:`quantize_index_k`.
        layout: Of the index cache: ``"index_fp8"`` or ``"index_fp4"``.
        scale_format: As in :func:`quantize_index_k`.
        amax_floor: As in :func:`quantize_index_k`.
        reciprocal: As in :func:`quantize_index_k`.
        weight_scale: Multiplied into the weights before the scale.
        head_scale: Multiplied into the weights behind the scale.
        out_q_pe: As ``q_pe``, any strides; q_pe itself, or memory apart from it, such as the last columns of
            heads whose first ones a GEMM writes.
        out_index_q: [num_tokens, index_heads, 128] float8_e4m3fn, of FP4 [.., 64] uint8, contiguous.
        out_index_weights: [num_tokens, index_heads] float32, contiguous.
        out_index_scale: [num_tokens, index_heads, 4] uint8, contiguous, of FP4.

    Returns:
        (q_pe, index_q, index_weights, index_scale). None for what was not asked for.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    index = {"index_cos": index_cos, "index_sin": index_sin}
    out = {
        "out_q_pe": out_q_pe, "out_index_q": out_index_q, "out_index_weights": out_index_weights,
        "out_index_scale": out_index_scale,
    }  # fmt: skip
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
        results = call_op("prepare_queries", *tensors, **options)
    else:
        results = _buffers(found, q_pe, index_q, *out.values())
        call_op("prepare_queries_out", *tensors, **options, **dict(zip(out, results, strict=True)))
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
