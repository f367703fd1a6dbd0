import torch

from .._arguments import all_given, expect_tensors
from .._fake import fake, fake_returns_nothing


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
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that :func:`index_topk` chose as slots of a cache that is attended to.

    ==============  =======================  =====  =======================================================
    positions       [num_rows, k]            int32  of a request; negative: a hole, which keeps its column
    page_table      [num_requests, pages]    int32  pages of ``page_size`` tokens; negative: no page
    row_to_request  [num_rows]               int32  optional; else row // ``next_n``. A request that does
                                                    not exist: -1 everywhere, length 0
    token_lens      [num_rows]               int32  optional: tokens that each row sees
    lens            [num_rows]               int32  optional: how many columns of positions count; else up
                                                    to the last one that is not negative
    out_slots       [num_rows, width]        int32  optional; any row stride
    out_lens        [num_rows]               int32  optional, with out_slots
    ==============  =======================  =====  =======================================================

    A position p becomes ``page_table[request, p // page_size] * page_size + p % page_size``, or -1 where
    there is no page. Where a position stands for ``group_size`` tokens, p becomes those of tokens
    ``p * group_size`` and on. With ``token_lens`` the tokens after the last whole group,
    ``token_lens % group_size``, follow. Then comes -1; a row's length counts what is before it, holes too.
    ``width`` is k * group_size, with ``token_lens`` plus group_size - 1.

    Returns (slots, lens). Raises RuntimeError naming the argument, what was expected and what came;
    ValueError for one of the two buffers without the other.
    """
    expect_tensors("topk_to_slots", row_to_request=row_to_request, token_lens=token_lens, lens=lens)
    options = {
        "page_size": page_size,
        "row_to_request": row_to_request,
        "next_n": next_n,
        "group_size": group_size,
        "token_lens": token_lens,
        "lens": lens,
    }
    if not all_given("topk_to_slots", out_slots=out_slots, out_lens=out_lens):
        return torch.ops.mla_fp8.topk_to_slots(positions, page_table, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.topk_to_slots_out(
        positions, page_table, **options, out_slots=out_slots, out_lens=out_lens
    )
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
