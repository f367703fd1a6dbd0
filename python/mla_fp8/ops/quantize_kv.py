import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout

__all__ = ["quantize_kv"]


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
    zero_rope: bool = False,
) -> None:
    """Quantise latents and store them in the cache, in place.

    The latent is rounded to bf16 first. A tile of nope gets the smallest power of two with ``amax / fp8_max
    <= scale``, with the floors of the engines' writers; rope is stored as it is. ``dsv41`` and ``dsv32_nope``
    quantise all 512 elements. ``dsv41_fp4``: a scale is the e4m3 nearest to ``amax / 6``. ``fp8_e4m3*``:
    everything is divided by ``scale``. NaN stays NaN (FP4: its tile becomes NaN), infinities saturate;
    neither enters a scale.

    Args:
        latent: [num_tokens, head_dim_qk] bfloat16, float16 or float32: nope, then rope.
        slot_mapping: [n] int64 or int32, n <= num_tokens. Slots: page * page_size + row. A token whose slot
            is outside the cache is skipped, and so are those past n. No two tokens may share a slot.
        kv_cache: [num_pages, page_bytes] uint8, or an engine's view of it; see :class:`mla_fp8.KVLayout`.
        layout: Of the cache: a name of ``KV_LAYOUTS``.
        page_size: Rows of a page.
        scale: 1 element, float32: the layer's scale, for ``fp8_e4m3*`` layouts alone.
        rope: [num_tokens, rope_dim] of latent's dtype; ``latent`` is then nope alone.
        fp8_max: The largest magnitude written, by default the format's own (448, fnuz 240; some fnuz caches
            have 224).
        zero_rope: ``latent`` is nope alone, and the rope is stored as zeros, of a model without RoPE. For
            ``dsv32`` and ``dsv32_fnuz`` alone.

    Raises:
        TypeError: For what is no tensor, or no number.
        ValueError: For an unknown layout.
        RuntimeError: For any other argument: its name, what was expected, what came. Nothing is written then.
    """
    refuse_gradients("quantize_kv", latent=latent, kv_cache=kv_cache, scale=scale, rope=rope)
    layout = get_layout(layout)
    call_op(
        "quantize_kv",
        latent,
        slot_mapping,
        kv_cache,
        layout=layout.id,
        page_size=page_size,
        scale=scale,
        rope=rope,
        fp8_max=fp8_max,
        zero_rope=zero_rope,
    )


fake_returns_nothing("quantize_kv")
