"""What a chunk cache, its workspace and its layers refuse, by the caller's names: ValueError throughout."""

from collections.abc import Sequence, Sized
from numbers import Integral

import torch
from torch import Tensor

from .._arguments import shown


def check_strategy(strategy: str, known: Sequence[str]) -> None:
    if strategy not in known:
        raise ValueError(f"mla_fp8: strategy must be one of {', '.join(known)}, got {strategy!r}")


def expect_at_least(owner: str, name: str, x: object, minimum: int) -> None:
    if not isinstance(x, Integral) or int(x) < minimum:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {minimum}, got {shown(x)}")


def expect_lengths(owner: str, name: str, lengths: Sequence[int], number: int | None = None) -> None:
    """So many of them on the host, or as many as there are."""
    if not isinstance(lengths, Sized):  # NumPy's arrays are no Sequence
        raise ValueError(f"{owner}: {name} must be a list of lengths, got {shown(lengths)}")
    number = len(lengths) if number is None else number
    if len(lengths) != number or min(lengths, default=0) < 0:
        raise ValueError(f"{owner}: {name} must be {number} lengths >= 0, got {shown(list(lengths))}")


def expect_kind(owner: str, name: str, x: object, kind: type) -> None:
    if not isinstance(x, kind):
        raise ValueError(f"{owner}: {name} must be a {kind.__name__}, got {shown(x)}")


def expect_rows(owner: str, name: str, x: object, number: int, dim: int) -> None:
    """A tensor of ``dim`` dimensions with so many rows."""
    expect_kind(owner, name, x, Tensor)
    assert isinstance(x, Tensor)  # for mypy
    if x.dim() != dim or x.shape[0] != number:
        raise ValueError(f"{owner}: {name} must have shape {_shape(number, dim)}, got {[*x.shape]}")


_I32, _I64 = torch.int32, torch.int64
# What a chunk's tables are made of, as the ops want it that read them: dtypes, dimensions, and how many more
# than requests in the first one (None: any number).
_SOURCES: dict[str, tuple[tuple[torch.dtype, ...], int, int | None]] = {
    "seq_lens": ((_I32,), 1, 0),
    "query_lens": ((_I32,), 1, 0),
    "page_table": ((_I32,), 2, 0),
    "req_pool_indices": ((_I64, _I32), 1, 0),
    "req_to_token": ((_I32,), 2, None),
    "full_to_swa": ((_I64,), 1, None),
    "query_start_loc": ((_I32,), 1, 1),
    "query_pos": ((_I32,), 1, None),
}


def expect_chunk(owner: str, sources: dict[str, Tensor | None]) -> None:
    """``seq_lens`` says how many requests there are, and on which device; only what has a default is None."""
    for name in ("seq_lens", "query_lens", "page_table"):
        expect_kind(owner, name, sources[name], Tensor)
    seq_lens = sources["seq_lens"]
    assert seq_lens is not None
    requests, device = seq_lens.shape[0] if seq_lens.dim() else 0, seq_lens.device
    for name, (dtypes, dim, more) in _SOURCES.items():
        x = sources[name]
        if x is None:
            continue
        expect_kind(owner, name, x, Tensor)
        fits = x.dtype in dtypes and x.device == device and x.dim() == dim
        if not fits or (more is not None and x.shape[0] != requests + more):
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            first = None if more is None or name == "seq_lens" else requests + more
            raise ValueError(
                f"{owner}: {name} must be {kinds} of shape {_shape(first, dim)} on {device}, "
                f"got {x.dtype} of {[*x.shape]} on {x.device}"
            )


def _shape(first: int | None, dim: int) -> str:
    """As a message has it; * is any size."""
    return f"[{', '.join(['*' if first is None else str(first), *['*'] * (dim - 1)])}]"
