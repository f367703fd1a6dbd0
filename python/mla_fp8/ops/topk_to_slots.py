import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing

__all__ = ["topk_to_slots"]


def topk_to_slots(
    positions: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    row_to_request: torch.Tensor | None = None,
    next_n: int = 1,
    group_size: int = 1,
    token_lens: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    world_size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    by_slot: bool = False,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn positions that :func:`index_topk` chose into slots of a cache that is attended to.

    Experimental. A slot is that of :func:`index_topk`. Where a position stands for ``group_size`` tokens, it
    becomes the slots of tokens ``p * group_size`` and on. With ``token_lens`` the tokens after the last whole
    group follow.

    Where ``world_size`` ranks share a cache, the slots of this rank's own rows are packed in order: no holes,
    and -1 behind them. The owner of position p is rank ``p // interleave % world_size``, and ``page_table``
    names the rank's own pages. With ``by_slot`` the table names slots that the ranks share in the same way.

    Args:
        positions: [num_rows, k] int32, of a request. A negative one is a hole, which keeps its column.
        page_table: [num_requests, pages] int32. A negative page is none.
        page_size: Rows of a page.
        row_to_request: [num_rows] int32. A row of a request that does not exist has -1 everywhere.
        next_n: Rows of a request, without ``row_to_request``.
        group_size: Tokens that a position stands for.
        token_lens: [num_rows] int32: tokens that each row sees.
        lens: [num_rows] int32: how many columns of ``positions`` count; by default up to the last that is not
            negative.
        world_size: Ranks that share the cache, at most 256.
        rank: This one.
        interleave: Neighbours that one rank owns.
        by_slot: Whether ranks share slots, as in SGLang, and not positions, as in vLLM.
        out_slots: [num_rows, width] int32, any row stride; with ``out_lens``.
        out_lens: [num_rows] int32.

    Returns:
        (slots, lens): [num_rows, width] int32, k * group_size columns, with ``token_lens`` group_size - 1
        more, and how many count, holes too unless they were left out.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    options = {
        "page_size": page_size,
        "row_to_request": row_to_request,
        "next_n": next_n,
        "group_size": group_size,
        "token_lens": token_lens,
        "lens": lens,
        "world_size": world_size,
        "rank": rank,
        "interleave": interleave,
        "by_slot": by_slot,
    }
    if not all_given("topk_to_slots", out_slots=out_slots, out_lens=out_lens):
        return call_op("topk_to_slots", positions, page_table, **options)  # type: ignore[no-any-return]
    call_op("topk_to_slots_out", positions, page_table, **options, out_slots=out_slots, out_lens=out_lens)
    assert out_slots is not None and out_lens is not None  # for mypy
    return out_slots, out_lens


@fake("topk_to_slots")
def _(
    positions: torch.Tensor,
    page_table: torch.Tensor,
    *,
    group_size: int = 1,
    token_lens: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, topk = positions.shape
    width = topk * group_size + (0 if token_lens is None else group_size - 1)
    return positions.new_empty((rows, width)), positions.new_empty((rows,))


fake_returns_nothing("topk_to_slots_out")
