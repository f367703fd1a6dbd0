import torch

from .._arguments import expect_tensors
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout


def quantize_kv(
    latent: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    scale: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    fp8_max: float | None = None,
) -> None:
    """Quantise ``latent`` and store it in ``kv_cache``, in place.

    ============  ==========================  ==================  ==========================================
    latent        [num_tokens, head_dim_qk]   bf16, fp16 or fp32  nope, then rope; or nope alone
    slot_mapping  [n], n <= num_tokens        int64 or int32      page * page_size + row; outside the cache:
                                                                  skipped; latent rows past n are padding
    kv_cache      [num_pages, page_bytes]     uint8 (or a view)   see :class:`mla_fp8.KVLayout`
    scale         one element                 fp32                the layer's scale: ``fp8_e4m3*`` only
    rope          [num_tokens, rope_dim]      that of latent      if given, ``latent`` is the nope part
    ============  ==========================  ==================  ==========================================

    The latent is rounded to bf16 first. Layouts with scales of tiles: each tile of nope gets the smallest
    power-of-two scale with ``amax / fp8_max <= scale`` (floors as the engines' writers have them), rope is
    stored as it is; in ``dsv41`` and ``dsv32_nope`` all 512 elements are nope, rotated ones too. A ``latent``
    of nope alone has a rope of zeros in ``dsv32``: models without RoPE in the rows of those that have it.
    ``dsv41_fp4``: a tile's scale is the e4m3 nearest to ``amax / 6``, its codes those of the quotients.
    ``fp8_e4m3``: everything is divided by ``scale``. NaN stays NaN (FP4 has none: its tile becomes NaN),
    infinities saturate; neither enters a scale. ``fp8_max`` is the largest magnitude written, by default the
    format's own (448, fnuz 240); some fnuz caches are written with 224. No two tokens may share a slot.

    Raises RuntimeError naming the argument, what was expected and what came, before anything is written;
    ValueError for an unknown layout name.
    """
    expect_tensors("quantize_kv", scale=scale, rope=rope)
    refuse_gradients("quantize_kv", latent=latent, kv_cache=kv_cache, scale=scale, rope=rope)
    layout = get_layout(layout)
    torch.ops.mla_fp8.quantize_kv(
        latent,
        slot_mapping,
        kv_cache,
        layout=layout.id,
        page_size=page_size,
        scale=scale,
        rope=rope,
        fp8_max=fp8_max,
    )


fake_returns_nothing("quantize_kv")
