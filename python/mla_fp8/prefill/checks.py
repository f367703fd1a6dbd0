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


def expect_shape(owner: str, name: str, x: object, want: Sequence[int | None]) -> None:
    """None in ``want`` is any size."""
    expect_kind(owner, name, x, Tensor)
    assert isinstance(x, Tensor)  # for mypy
    if not _fits(x, want):
        raise ValueError(f"{owner}: {name} must have shape {_written(want)}, got {[*x.shape]}")


def expect_chunk(owner: str, sources: dict[str, Tensor | None]) -> None:
    """What the tables of a chunk are made of, as the ops want it that read them."""
    seq_lens = sources["seq_lens"]
    for name in ("seq_lens", "query_lens", "page_table"):
        expect_kind(owner, name, sources[name], Tensor)
    assert seq_lens is not None
    number = seq_lens.shape[0] if seq_lens.dim() else 0
    wanted: dict[str, tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]] = {
        "seq_lens": ((torch.int32,), (None,)),
        "query_lens": ((torch.int32,), (number,)),
        "page_table": ((torch.int32,), (number, None)),
        "req_pool_indices": ((torch.int64, torch.int32), (number,)),
        "req_to_token": ((torch.int32,), (None, None)),
        "full_to_swa": ((torch.int64,), (None,)),
        "query_start_loc": ((torch.int32,), (number + 1,)),
        "query_pos": ((torch.int32,), (None,)),
    }
    for name, (dtypes, want) in wanted.items():
        x = sources[name]
        if x is None:
            continue
        expect_kind(owner, name, x, Tensor)
        if x.dtype not in dtypes or x.device != seq_lens.device or not _fits(x, want):
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"{owner}: {name} must be {kinds} of shape {_written(want)} on {seq_lens.device}, "
                f"got {x.dtype} of {[*x.shape]} on {x.device}"
            )


def _fits(x: Tensor, want: Sequence[int | None]) -> bool:
    return x.dim() == len(want) and all(w in (None, n) for w, n in zip(want, x.shape, strict=True))


def _written(want: Sequence[int | None]) -> str:
    return f"[{', '.join('*' if n is None else str(n) for n in want)}]"
