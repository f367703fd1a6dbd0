import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout

__all__ = ["quantize_index_k"]


def quantize_index_k(
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_cache: torch.Tensor,
    *,
    layout: str | IndexLayout,
    page_size: int,
    scale_format: str = "ue8m0",
    amax_floor: float | None = None,
    hadamard: bool = False,
    reciprocal: bool = False,
) -> None:
    """Quantise index keys and store them in the indexer's cache, in place.

    Experimental. k is rounded to bf16 first. ``"ue8m0"``: the smallest power of two with ``amax / largest <=
    scale``, of 128 elements in ``index_fp8``, of 32 in ``index_fp4``, and ``x / scale`` to nearest even.
    ``"f32"`` (``index_fp8``): ``amax / 448`` and ``x / scale``. Infinities and NaN are as in
    :func:`quantize_kv`.

    Args:
        k: [num_tokens, 128] bfloat16, float16 or float32, 16-byte aligned rows.
        slot_mapping: As in :func:`quantize_kv`.
        index_cache: [num_pages, page_bytes] of a one-byte dtype, or [num_pages, page_size, 1,
            bytes_per_entry]; see :class:`mla_fp8.IndexLayout`.
        layout: Of the cache: a name of ``INDEX_LAYOUTS``.
        page_size: Entries of a page.
        scale_format: ``"ue8m0"`` or ``"f32"``.
        amax_floor: The least amax, by default 1e-4, in ``index_fp4`` 6 * 2^-126.
        hadamard: Rotate k first: Walsh-Hadamard times 128^-0.5, in float32, rounded to bf16 again.
        reciprocal: With ``"f32"``, ``x * (1 / scale)`` in place of ``x / scale``, as SGLang's writer has it.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients("quantize_index_k", k=k, index_cache=index_cache)
    call_op(
        "quantize_index_k",
        k,
        slot_mapping,
        index_cache,
        layout=get_index_layout(layout).id,
        page_size=page_size,
        scale_format=scale_format,
        amax_floor=amax_floor,
        hadamard=hadamard,
        reciprocal=reciprocal,
    )


fake_returns_nothing("quantize_index_k")
