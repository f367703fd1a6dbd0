import torch

from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..index_layout import IndexLayout, get_index_layout


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
    """Quantise index keys and store them in ``index_cache``, in place.

    ============  ==========================  ==================  ==========================================
    k             [num_tokens, 128]           bf16, fp16 or fp32  16-byte aligned rows
    slot_mapping  [n], n <= num_tokens        int64 or int32      page * page_size + row; outside the cache:
                                                                  skipped; rows of k past n are padding
    index_cache   [num_pages, page_bytes]     one-byte dtype      see :class:`mla_fp8.IndexLayout`; or
                                                                  [num_pages, page_size, 1, bytes_per_entry]
    ============  ==========================  ==================  ==========================================

    k is rounded to bf16 first; ``hadamard`` then rotates it (Walsh-Hadamard times 128^-0.5, in float,
    rounded to bf16 again). ``scale_format="ue8m0"``: the smallest power of two with ``amax / largest <=
    scale``, of 128 elements in ``index_fp8``, of 32 in ``index_fp4``, and ``x / scale`` to nearest even.
    ``"f32"`` (``index_fp8``): ``amax / 448``, and ``x / scale``, or with ``reciprocal`` ``x * (1 / scale)``,
    as SGLang's writer has it. amax is at least ``amax_floor``, by default 1e-4 or, in ``index_fp4``,
    6 * 2^-126. Infinities saturate, and neither they nor NaN enter a scale; NaN stays NaN, in ``index_fp4``
    it makes the scale of its 32 NaN. No two keys may share a slot.

    Raises RuntimeError naming the argument, what was expected and what came, before anything is written;
    ValueError for an unknown layout name.
    """
    refuse_gradients("quantize_index_k", k=k, index_cache=index_cache)
    torch.ops.mla_fp8.quantize_index_k(
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
