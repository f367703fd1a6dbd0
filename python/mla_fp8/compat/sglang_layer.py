"""SGLang's fused ops around the attention of DeepSeek V4 and V4.1, by their names and argument order.

``freqs_cis`` is [max_pos, 32] complex64, for the compressors of ratio 1 and 2 the same as floats, [max_pos,
64]. Ours round to bf16 between norm and RoPE and before quantising; what SGLang's window kernel quantises
from float32 may be one code apart. Bad input raises RuntimeError from the op, with the caller's names.

The compressors store a row as it is, where SGLang rounds those of "v4" and "v41" through FP4 first. Those of
ratio 4 and 128 are not here: they take bytes that SGLang's own planner writes.
"""

import torch

from ..layout import KV_LAYOUTS
from ..ops.compress_kv import compress_kv
from ..ops.inverse_rope import inverse_rope
from ..ops.norm_rope_insert import k_norm_rope_insert, qk_norm_rope_insert
from ..ops.prepare_queries import prepare_queries
from ._names import caller_names, expect_rows
from .sglang import LAYOUTS

__all__ = [
    "c1_decode_norm_rope_store",
    "c2_decode_norm_rope_store",
    "c2_prefill_norm_rope_store",
    "fused_k_norm_rope_flashmla",
    "fused_q_norm_rope",
    "fused_rope_inplace",
]

_ROTATION = {"cos": "freqs_cis", "sin": "freqs_cis"}
_COMPRESS = _ROTATION | {
    "kv_score": "kv_input", "start_pos": "positions", "state": "kv_state", "kv_cache": "k_cache",
    "out_latent": "out", "query_start_loc": "kv_input", "ratio": "layout",
}  # fmt: skip


def _tables(freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not freqs_cis.is_complex():
        raise ValueError(f"freqs_cis must be complex64 of shape [max_pos, 32], got {freqs_cis.dtype}")
    parts = torch.view_as_real(freqs_cis)
    return parts[..., 0], parts[..., 1]


@caller_names(**_ROTATION, q="q_input", kv="q_input", out_q="q_output")
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


@caller_names(**_ROTATION, slot_mapping="out_loc", kv_cache="kvcache", out_q="q")
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
    q: torch.Tensor | None = None,
) -> None:
    """:func:`mla_fp8.k_norm_rope_insert` into rows of ``layout``, "v4" or "v41"; rotates ``q`` in place."""
    if layout not in ("v4", "v41"):
        raise ValueError(f"fused_k_norm_rope_flashmla: layout must be v4 or v41, got {layout!r}")
    rest = (kv, kv_weight, *_tables(freqs_cis), positions, out_loc, kvcache)
    if q is None:
        k_norm_rope_insert(*rest, layout=LAYOUTS[layout], page_size=page_size, eps=eps)
    else:
        qk_norm_rope_insert(
            q, *rest, layout=LAYOUTS[layout], page_size=page_size, eps=eps, norm_q=False, out_q=q
        )


@caller_names(**_ROTATION, o="q", out="q", q_pe="q", out_q_pe="q")
def fused_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Rotates the last dims of ``q``, and of ``k``, in place, by :func:`mla_fp8.inverse_rope`; forward by
    :func:`mla_fp8.prepare_queries`, but on AMD GPUs, where a copy of the whole table is negated."""
    cos, sin = _tables(freqs_cis)
    for x in (q,) if k is None else (q, k):
        if inverse or torch.version.hip:
            inverse_rope(x, cos, sin if inverse else -sin, positions, out=x)
        else:
            rotated = x[..., -2 * cos.shape[-1] :]
            prepare_queries(rotated, None, None, cos, sin, positions, out_q_pe=rotated)


@caller_names(**_COMPRESS, slot_mapping="out_loc", state_slots="positions")
def c1_decode_norm_rope_store(
    kv_input: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    page_size: int,
    layout: str = "v4",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`mla_fp8.compress_kv` of ratio 1. Returns the latents; slot 0 is padding and not stored."""
    out = kv_input.new_empty(len(kv_input), 512, dtype=torch.bfloat16) if out is None else out
    starts = torch.arange(len(kv_input) + 1, dtype=torch.int32, device=kv_input.device)  # a request each
    _compress(
        kv_input, starts, positions, None, starts[:-1], norm_weight, eps, freqs_cis, out_loc, k_cache,
        ratio=1, page_size=page_size, layout=layout, out=out,
    )  # fmt: skip
    return out


@caller_names(**_COMPRESS, slot_mapping="raw_out_loc", state_slots="req")
def c2_decode_norm_rope_store(
    kv_input: torch.Tensor,
    kv_state: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    req: torch.Tensor,
    raw_out_loc: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    page_size: int,
    ring_size: int,
    draft_len: int = 1,
    layout: str = "v4",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`mla_fp8.compress_kv` of ratio 2, ``draft_len`` rows a request. Returns the latents.

    ``kv_state`` [*, 1024] has position p of request r in row r * ring_size + p % ring_size. A request whose
    first row has ``raw_out_loc`` 0 is padding.
    """
    out = kv_input.new_empty(len(kv_input), 512, dtype=torch.bfloat16) if out is None else out
    expect_rows(
        "c2_decode_norm_rope_store", len(kv_input), kv_input.device,
        positions=positions, req=req, raw_out_loc=raw_out_loc,
    )  # fmt: skip
    starts = torch.arange(0, len(kv_input) + 1, draft_len, dtype=torch.int32, device=kv_input.device)
    first = slice(0, len(kv_input), draft_len)
    slots = torch.where(raw_out_loc[first] == 0, -1, req[first])
    _compress(
        kv_input, starts, positions[first], _rings(kv_state, ring_size), slots, norm_weight, eps, freqs_cis,
        raw_out_loc, k_cache, ratio=2, page_size=page_size, layout=layout, out=out,
    )  # fmt: skip
    return out


@caller_names(**_COMPRESS, slot_mapping="raw_out_loc", state_slots="req")
def c2_prefill_norm_rope_store(
    kv_input: torch.Tensor,
    kv_state: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    req: torch.Tensor,
    raw_out_loc: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    k_cache: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *,
    page_size: int,
    ring_size: int,
    layout: str = "v4",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`c2_decode_norm_rope_store` of any rows: request i has ``extend_seq_lens[i]`` from
    ``extend_start_loc[i]`` on. Rows of no request are left alone.
    """
    out = kv_input.new_empty(len(kv_input), 512, dtype=torch.bfloat16) if out is None else out
    expect_rows(
        "c2_prefill_norm_rope_store", len(kv_input), kv_input.device,
        positions=positions, req=req, raw_out_loc=raw_out_loc,
    )  # fmt: skip
    expect_rows(
        "c2_prefill_norm_rope_store", 0, kv_input.device,
        extend_start_loc=extend_start_loc, extend_seq_lens=extend_seq_lens,
    )  # fmt: skip
    if extend_start_loc.dim() != 1 or extend_start_loc.shape != extend_seq_lens.shape:
        raise ValueError(
            "c2_prefill_norm_rope_store: extend_start_loc and extend_seq_lens must have shape "
            f"[num_requests], got {[*extend_start_loc.shape]} and {[*extend_seq_lens.shape]}"
        )
    # What lies before each request, mostly nothing, is a request without a state.
    spans = torch.stack([extend_start_loc, extend_start_loc + extend_seq_lens], 1).flatten().int()
    first, none = spans[::2].long().clamp(0, max(len(kv_input) - 1, 0)), torch.full_like(spans[::2], -1)
    start_pos, slots = (
        torch.stack([none, x[first] if len(kv_input) else none], 1).flatten() for x in (positions, req)
    )
    _compress(
        kv_input, torch.cat([spans.new_zeros(1), spans]), start_pos, _rings(kv_state, ring_size), slots,
        norm_weight, eps, freqs_cis, raw_out_loc, k_cache,
        ratio=2, page_size=page_size, layout=layout, out=out,
    )  # fmt: skip
    return out


def _rings(kv_state: torch.Tensor, ring_size: int) -> torch.Tensor:
    whole = kv_state[: len(kv_state) // ring_size * ring_size]
    return whole.view(-1, ring_size, kv_state.shape[1])


def _compress(
    kv_input: torch.Tensor,
    starts: torch.Tensor,
    start_pos: torch.Tensor,
    state: torch.Tensor | None,
    state_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    out_loc: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    ratio: int,
    page_size: int,
    layout: str,
    out: torch.Tensor,
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    compress_kv(
        kv_input, starts, start_pos.int(), state, state_slots, None, norm_weight, freqs_cis[:, 0::2],
        freqs_cis[:, 1::2], torch.where(out_loc == 0, -1, out_loc // ratio), k_cache, ratio=ratio,
        layout=LAYOUTS[layout], page_size=page_size, eps=eps, out_latent=out,
    )  # fmt: skip
