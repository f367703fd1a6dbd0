"""Logits of vLLM's indexer that nobody has computed yet, and what is asked of them meanwhile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .._torch_private import without_torch_function
from .log import say_once


class Level(NamedTuple):
    """V4.1's blocks ``[rows, n]`` int32: those to publish, or those among whose entries rows choose."""

    blocks: Tensor
    publishes: bool


class Logits(Tensor):
    """``[rows, width]`` float32 logits that nobody has computed yet. A meta tensor: it has shape and dtype.

    ``choose(out, topk, level)`` writes the positions of each row's best entries. A rank that has a part of
    the entries gives it ``scores`` to write logits into, too: they are its ``candidates``. ``make()``
    computes the logits: whatever is done with them other than asking for their shape does so first, and then
    works on those; so does what was put off by ``put_off``.
    """

    make: Callable[[], Tensor]
    choose: Callable[..., None]
    candidates: Tensor | None  # [2, rows, topk] int32: bits of logits, positions
    pages: tuple[Tensor, int, int] | None  # of decode: page table, page size, rows of a request
    made: Tensor | None
    level: Level | None
    later: Callable[[Tensor], None] | None

    @classmethod
    def of(
        cls,
        rows: int,
        width: int,
        make: Callable[[], Tensor],
        choose: Callable[..., None],
    ) -> "Logits":
        self = torch.empty((rows, width), dtype=torch.float32, device="meta").as_subclass(cls)
        self.make, self.choose, self.made, self.level, self.later = make, choose, None, None, None
        self.candidates = self.pages = None
        return self

    def put_off(self, level: Level, work: Callable[[Tensor], None]) -> None:
        """What the level does to the logits: ``work``, once they are made."""
        self.level, self.later = level, work

    def looked_at(self, by: str) -> Tensor:
        if self.made is None:
            say_once(f"mla_fp8: the indexer's logits are DeepGEMM's where {by} looks at them")
            self.made = self.make()
            if self.later is not None:
                self.later(self.made)
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            if func in _OF_SHAPE and args[0].made is None:
                return func(*args, **(kwargs or {}))
            by = getattr(func, "__name__", str(func))
            by = func.__self__.__name__ if by == "__get__" else by  # of an attribute
            given = tree_map(lambda x: x.looked_at(by) if isinstance(x, cls) else x, (args, kwargs or {}))
            return func(*given[0], **given[1])


_OF_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim")),
    *(getattr(Tensor, name) for name in ("size", "stride", "dim", "numel", "element_size", "__len__")),
}  # fmt: skip
