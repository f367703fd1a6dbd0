"""SGLang's fused ops around the attention of DeepSeek V4, by their names and argument order.

``freqs_cis`` is [max_pos, 32] complex64. Ours round to bf16 between norm and RoPE and before quantising;
what SGLang's window kernel quantises from float32 may be one code apart. Bad input raises RuntimeError from
the op, under our argument names.
"""

import torch

from ..layout import KV_LAYOUTS
from ..ops.inverse_rope import inverse_rope
from ..ops.norm_rope_insert import k_norm_rope_insert, qk_norm_rope_insert

_LAYOUTS = {"v4": "dsv4", "v41": "dsv41"}


def _tables(freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = torch.view_as_real(freqs_cis)
    return parts[..., 0], parts[..., 1]


def fused_q_norm_rope(
    q_input: torch.Tensor,
    q_output: torch.Tensor,
    eps: float | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """The heads of :func:`mla_fp8.qk_norm_rope_insert` alone; without ``eps`` (V4.1) they are not normed."""
    nothing = KV_LAYOUTS["dsv4"].empty(0, 1, q_input.device)
    rows = q_input.new_empty(1, 512).expand(len(q_input), -1)  # none of them is read
    qk_norm_rope_insert(
        q_input, rows, None, *_tables(freqs_cis), positions, positions[:0], nothing,
        layout="dsv4", page_size=1, eps=eps or 0.0, norm_q=eps is not None, out_q=q_output,
    )  # fmt: skip


def fused_k_norm_rope_flashmla(
    kv: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    kvcache: torch.Tensor,
    page_size: int,
    layout: str = "v4",
) -> None:
    """:func:`mla_fp8.k_norm_rope_insert` into rows of ``layout``: "v4" or "v41"."""
    if layout not in _LAYOUTS:
        raise ValueError(f"fused_k_norm_rope_flashmla: layout must be v4 or v41, got {layout!r}")
    k_norm_rope_insert(
        kv, kv_weight, *_tables(freqs_cis), positions, out_loc, kvcache,
        layout=_LAYOUTS[layout], page_size=page_size, eps=eps,
    )  # fmt: skip


def fused_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Rotates the last dims of ``q``, and of ``k``, in place, by :func:`mla_fp8.inverse_rope`."""
    cos, sin = _tables(freqs_cis)
    for x in (q,) if k is None else (q, k):
        inverse_rope(x, cos, sin if inverse else -sin, positions, out=x)
