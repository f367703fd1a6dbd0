import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing

__all__ = ["combine_topk_swa_indices", "combine_topk_swa_indices_ragged"]

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
    """Name each token's rows of an attention workspace: its chosen entries, then its sliding window.

    A token at position p has ``min((p + 1) // compress_ratio, topk)`` entries of ``topk_indices`` plus
    ``compressed_base``, then the gathered rows of positions p - window_size + 1 to p, then -1. A position
    outside [0, seq_len) and a token of no request have -1 everywhere.

    Args:
        topk_indices: [num_tokens, >= topk] int32: entries of the token's request. A negative one is a hole,
            which keeps its column.
        query_start_loc: [num_requests + 1] int32: the first token of each request. Element 0 is subtracted.
            Must not decrease.
        seq_lens: [num_requests] int32: tokens that are cached, the queries too.
        gather_lens: [num_requests] int32: how many of the last ones are in the workspace.
        compressed_base: [num_requests] int32: the first workspace row of a request's entries.
        swa_base: [num_requests] int32: the first workspace row of its gathered tokens.
        window_size: Tokens of a window, its query's among them.
        compress_ratio: Tokens that an entry stands for.
        topk: Columns of ``topk_indices`` that count.
        query_pos: [num_tokens] int32: positions, if they are not a request's last.
        compressed_lens: [num_requests] int32: entries past it are holes.
        out_indices: [num_tokens, width] int32, any row stride; with ``out_lens``.
        out_lens: [num_tokens] int32.

    Returns:
        (indices, lens): [num_tokens, width] int32, topk + window_size columns rounded up to 128, and how many
        count, holes too.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
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
        return call_op("combine_topk_swa_indices", *inputs, **options)  # type: ignore[no-any-return]
    call_op("combine_topk_swa_indices_out", *inputs, **options, out_indices=out_indices, out_lens=out_lens)
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
    """Name the rows of :func:`combine_topk_swa_indices` without holes, one token after another (CSR).

    Args:
        topk_indices: As in :func:`combine_topk_swa_indices`, and so are all that are not listed here.
        out_indptr: [num_tokens + 1] int32, contiguous; with ``out_indices``.
        out_indices: [num_tokens * (topk + window_size)] int32, contiguous. The size must fit int32.

    Returns:
        (indptr, indices): token t has ``indices[indptr[t] : indptr[t + 1]]``; -1 behind the last row.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`combine_topk_swa_indices`.
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
        return call_op("combine_topk_swa_indices_ragged", *inputs, **options)  # type: ignore[no-any-return]
    call_op(
        "combine_topk_swa_indices_ragged_out",
        *inputs,
        **options,
        out_indptr=out_indptr,
        out_indices=out_indices,
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
