import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients

__all__ = ["merge_topk"]


def merge_topk(
    scores: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    rank: int | None = None,
    interleave: int | None = None,
    out_positions: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best entries of all ranks, each of which has chosen among its own with :func:`index_topk`.

    Experimental. The order is that of :func:`index_topk`: larger score, then lower position, NaN last. With
    the positions of all ranks the result is what one rank with all entries chooses.

    With ``rank`` only scores travel, and the result is this rank's part of it. A tie then goes to the lower
    rank, within a rank to the earlier candidate, and a score of -inf is no candidate.

    Args:
        scores: [num_ranks, num_rows, k] float32, as ``out_scores`` has them, any strides of ranks and rows.
            At most 256 ranks, k at most 4096.
        positions: [num_ranks, num_rows, k] int32; a negative one is no candidate. With ``rank``
            [num_rows, k]: positions, slots or anything else of this rank's own candidates.
        topk: 1 to 4096.
        rank: This rank, where ``positions`` are its own.
        interleave: Neighbours that one rank owns, as in :func:`topk_to_slots`, a power of two. Then each rank
            has numbered its own entries alone, from 0, and results are positions of the request.
        out_positions: [num_rows, topk] int32, any row stride; with ``out_lens``.
        out_lens: [num_rows] int32.

    Returns:
        (positions, lens): [num_rows, topk] int32, ascending, then -1, and how many there are.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients("merge_topk", scores=scores)
    options = {"topk": topk, "rank": rank, "interleave": interleave}
    if not all_given("merge_topk", out_positions=out_positions, out_lens=out_lens):
        return call_op("merge_topk", scores, positions, **options)  # type: ignore[no-any-return]
    call_op("merge_topk_out", scores, positions, **options, out_positions=out_positions, out_lens=out_lens)
    assert out_positions is not None and out_lens is not None  # for mypy
    return out_positions, out_lens


@fake("merge_topk")
def _(
    scores: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    rank: int | None = None,
    interleave: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = scores.shape[1]
    return positions.new_empty((rows, topk)), positions.new_empty((rows,))


fake_returns_nothing("merge_topk_out")
