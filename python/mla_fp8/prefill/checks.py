"""What a chunk cache, its workspace and its layers refuse, by the caller's names: TypeError for an object of
another type, ValueError for the rest."""

import operator
from collections.abc import Iterable, Sequence
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


MAX_LENGTH = 2**31 - 1  # of the ops' int32


def expect_lengths(owner: str, name: str, lengths: Iterable[object], number: int | None = None) -> list[int]:
    """So many of them on the host, or as many as there are."""
    try:
        found = [operator.index(n) for n in lengths]  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{owner}: {name} must be a list of lengths, got {shown(lengths)}") from None
    number = len(found) if number is None else number
    if len(found) != number or not all(0 <= n <= MAX_LENGTH for n in found):
        raise ValueError(f"{owner}: {name} must be {number} lengths in [0, 2^31), got {shown(found)}")
    return found


def expect_kind(owner: str, name: str, x: object, kind: type) -> None:
    if not isinstance(x, kind):
        expected = "tensor" if kind is Tensor else kind.__name__
        raise TypeError(f"{owner}: {name} must be a {expected}, got {shown(x)}")


def expect_rows(owner: str, name: str, x: object, dtype: torch.dtype, *shape: int | None) -> None:
    """A tensor of that dtype and shape; None is any size."""
    expect_kind(owner, name, x, Tensor)
    assert isinstance(x, Tensor)  # for mypy
    fits = x.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits:
        raise ValueError(f"{owner}: {name} must have shape {_shape(*shape)}, got {[*x.shape]}")
    if x.dtype != dtype:
        raise ValueError(f"{owner}: {name} must be {dtype}, got {x.dtype}")


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
            kinds = " or ".join(map(str, dtypes))
            first = None if more is None or name == "seq_lens" else requests + more
            raise ValueError(
                f"{owner}: {name} must be {kinds} of shape {_shape(first, *[None] * (dim - 1))} on {device}, "
                f"got {x.dtype} of {[*x.shape]} on {x.device}"
            )


def _shape(*shape: int | None) -> str:
    """As a message has it; * is any size."""
    return f"[{', '.join('*' if n is None else str(n) for n in shape)}]"
