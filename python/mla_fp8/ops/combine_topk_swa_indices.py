import torch

from .._arguments import all_given
from .._fake import fake, fake_returns_nothing

_WIDTH_ALIGNMENT = 128


def combined_width(topk: int, window_size: int) -> int:
    """Columns of :func:`combine_topk_swa_indices`."""
    return -(-(topk + window_size) // _WIDTH_ALIGNMENT) * _WIDTH_ALIGNMENT


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    query_pos: torch.Tensor | None = None,
    compressed_lens: torch.Tensor | None = None,
    out_indices: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's rows of the attention workspace: its topk entries, then its sliding window.

    ================  =======================  =====  =====================================================
    topk_indices      [num_tokens, >= topk]    int32  request-local; negative: a hole
    query_start_loc   [num_requests + 1]       int32  first token of each request; element 0 is subtracted
    seq_lens          [num_requests]           int32  tokens cached, the queries too
    gather_lens       [num_requests]           int32  how many of the last ones are in the workspace
    compressed_base   [num_requests]           int32  first workspace row of the compressed tokens
    swa_base          [num_requests]           int32  first workspace row of the gathered tokens
    query_pos         [num_tokens]             int32  optional; else the queries are the last tokens
    compressed_lens   [num_requests]           int32  optional; entries past it are holes
    out_indices       [num_tokens, width]      int32  optional; any row stride
    out_lens          [num_tokens]             int32  optional, with out_indices
    ================  =======================  =====  =====================================================

    All inputs but topk_indices are contiguous. ``width`` is topk + window_size rounded up to 128. A token at
    position p has ``min((p + 1) // compress_ratio, topk)`` entries of topk_indices plus compressed_base, then
    the gathered ones of positions p - window_size + 1 .. p, then -1; its length counts holes, which keep
    their columns. A position outside [0, seq_len) and a token of no request have -1 everywhere and length 0.
    query_start_loc must not decrease.

    Returns (indices, lens). Raises RuntimeError naming the argument, what was expected and what came;
    ValueError for one of the two buffers without the other.
    """
    inputs = (topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base)
    options = {
        "window_size": window_size,
        "compress_ratio": compress_ratio,
        "topk": topk,
        "query_pos": query_pos,
        "compressed_lens": compressed_lens,
    }
    if not all_given("combine_topk_swa_indices", out_indices=out_indices, out_lens=out_lens):
        return torch.ops.mla_fp8.combine_topk_swa_indices(*inputs, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.combine_topk_swa_indices_out(
        *inputs, **options, out_indices=out_indices, out_lens=out_lens
    )
    assert out_indices is not None and out_lens is not None  # for mypy
    return out_indices, out_lens


def combine_topk_swa_indices_ragged(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    query_pos: torch.Tensor | None = None,
    compressed_lens: torch.Tensor | None = None,
    out_indptr: torch.Tensor | None = None,
    out_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of :func:`combine_topk_swa_indices` without their holes, one after another (CSR).

    Token t has ``indices[indptr[t] : indptr[t + 1]]``; indptr is [num_tokens + 1], indices
    [num_tokens * (topk + window_size)], which has to fit int32, with -1 behind the last row; both are int32
    and contiguous. Returns (indptr, indices), ``out_indptr`` and ``out_indices`` if they are given.
    """
    inputs = (topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base)
    options = {
        "window_size": window_size,
        "compress_ratio": compress_ratio,
        "topk": topk,
        "query_pos": query_pos,
        "compressed_lens": compressed_lens,
    }
    if not all_given("combine_topk_swa_indices_ragged", out_indptr=out_indptr, out_indices=out_indices):
        return torch.ops.mla_fp8.combine_topk_swa_indices_ragged(*inputs, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.combine_topk_swa_indices_ragged_out(
        *inputs, **options, out_indptr=out_indptr, out_indices=out_indices
    )
    assert out_indptr is not None and out_indices is not None  # for mypy
    return out_indptr, out_indices


@fake("combine_topk_swa_indices")
def _(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    query_pos: torch.Tensor | None = None,
    compressed_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = topk_indices.shape[0]
    width = combined_width(topk, window_size)
    return topk_indices.new_empty((num_tokens, width)), topk_indices.new_empty((num_tokens,))


@fake("combine_topk_swa_indices_ragged")
def _(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    query_pos: torch.Tensor | None = None,
    compressed_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = topk_indices.shape[0]
    capacity = num_tokens * (topk + window_size)
    return topk_indices.new_empty((num_tokens + 1,)), topk_indices.new_empty((capacity,))


fake_returns_nothing("combine_topk_swa_indices_out", "combine_topk_swa_indices_ragged_out")
