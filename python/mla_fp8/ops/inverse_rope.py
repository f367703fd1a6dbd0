import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["inverse_rope", "inverse_rope_quantize"]


def inverse_rope(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the last dims of attention's output back by the queries' positions.

    For models whose V carries the keys' rotation (V4, V4.1). Pairs of neighbours in float32, each product
    rounded, then the sum, then bf16: ``a cos + b sin, b cos - a sin``.

    Args:
        o: [num_tokens, num_heads, dim] bfloat16, any strides of tokens and heads.
        cos: As in :func:`k_norm_rope_insert`.
        sin: As in :func:`k_norm_rope_insert`.
        positions: [num_tokens] int64 or int32, of the queries. A token outside the table has zeros.
        out: [num_tokens, num_heads, dim] bfloat16; o itself, whose other dims stay, or memory apart from it.

    Returns:
        [num_tokens, num_heads, dim] bfloat16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients("inverse_rope", o=o, cos=cos, sin=sin, out=out)
    if out is None:
        return call_op("inverse_rope", o, cos, sin, positions)  # type: ignore[no-any-return]
    call_op("inverse_rope_out", o, cos, sin, positions, out=out)
    return out


def inverse_rope_quantize(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_groups: int,
    tile: int = 128,
    power_of_two: bool = True,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do :func:`inverse_rope`, then quantise to e4m3 with a scale per tile, as a grouped projection takes it.

    A tile's scale is ``max(amax, 1e-10) / 448`` of its bf16 values, NaN and infinities left out, or the
    smallest power of two that is no smaller. Values are divided by it, rounded to the nearest even and
    saturated. NaN stays NaN.

    Args:
        o: As in :func:`inverse_rope`, and so are ``cos``, ``sin`` and ``positions``.
        num_groups: Groups of consecutive heads. A group's row has D = num_heads / num_groups * dim values.
        tile: How many consecutive values share a scale, 32 or 128.
        power_of_two: Whether scales are rounded up to powers of two.
        out: [num_tokens, num_groups, D] float8_e4m3fn, any strides of tokens and groups.
        out_scale: [num_tokens, num_groups, D // tile] float32, any strides, with ``out``.

    Returns:
        (out, out_scale). New ones are laid out as DeepGEMM reads them: values [G, T, D] in memory, scales
        with strides (1, D // tile * T4, T4). T4 is num_tokens rounded up to 4; what pads them is 0.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients("inverse_rope_quantize", o=o, cos=cos, sin=sin, out_scale=out_scale)
    options = {"num_groups": num_groups, "tile": tile, "power_of_two": power_of_two}
    if not all_given("inverse_rope_quantize", out=out, out_scale=out_scale):
        return call_op("inverse_rope_quantize", o, cos, sin, positions, **options)  # type: ignore[no-any-return]
    call_op("inverse_rope_quantize_out", o, cos, sin, positions, **options, out=out, out_scale=out_scale)
    assert out is not None and out_scale is not None  # for mypy
    return out, out_scale


@fake("inverse_rope")
def _(o: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return o.new_empty((o.shape[0], o.shape[1], o.shape[2]))


@fake("inverse_rope_quantize")
def _(
    o: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_groups: int,
    tile: int = 128,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, dim = o.shape[0], o.shape[1] // num_groups * o.shape[2]
    values = o.new_empty((num_groups, num_tokens, dim), dtype=torch.float8_e4m3fn)
    rows = (num_tokens + 3) // 4 * 4
    scales = o.new_empty((num_groups, dim // tile, rows), dtype=torch.float32)
    return values.transpose(0, 1), scales[:, :, :num_tokens].permute(2, 0, 1)


fake_returns_nothing("inverse_rope_out", "inverse_rope_quantize_out")
