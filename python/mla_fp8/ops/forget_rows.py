import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing

__all__ = ["forget_rows"]


def forget_rows(
    entries: torch.Tensor,
    hot_entries: torch.Tensor,
    *,
    row_to_request: torch.Tensor | None = None,
    state_rows: torch.Tensor | None = None,
) -> None:
    """Make a hot buffer forget entries that were written again.

    Experimental. The next :func:`resolve_hot_rows` loads them anew.

    Args:
        entries: [n] int32 or int64, as ``hot_entries`` names them. A negative one is none.
        hot_entries: [states, num_hot] int32, of :func:`resolve_hot_rows`; updated.
        row_to_request: [n] int32: whose state forgets the entry; by default each does.
        state_rows: [requests] int32, with ``row_to_request``; by default the request.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    call_op("forget_rows", entries, hot_entries, row_to_request, state_rows)


fake_returns_nothing("forget_rows")
