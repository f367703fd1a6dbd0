"""The drafts of a request in an engine's decode step (MTP, speculation): groups of queries that share keys.

Off unless the engine's list of plug-ins names ``mla_fp8_query_groups``. Whether a group pays is a matter of
its shapes, which the plan of each call judges (``plan_sharing`` of csrc/cuda/sparse_attention/plan.cpp), and
of how many keys its queries share: four fifths and more are a gain, few a loss of up to a fifth
(docs/guide/decode.md). That is the model's and the text's, and nobody measures it in a step, so a person says
it, who can see it: ``python -m mla_fp8 replay``.

This module is the one place that says which queries are a group. Engines' layers are told apart in
vllm_sparse.py, vllm_v4.py and sglang.py; attend.py makes the call.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

NAME = "mla_fp8_query_groups"
MOST = 8  # query tokens of a request; more were not timed
_KEPT = "mla_fp8_shared_keys"  # attribute of an engine's metadata of a step


@dataclass(frozen=True)
class Layers:
    """Layers with the same slots, which share the lists of their keys in a step.

    Lists are kept with the step's metadata, one for each ``kind`` of layer. The layer that made them makes
    them again when it comes next: that is another pass, perhaps over tensors that were written in place. So
    a pass has to begin with the same layer of a kind each time, as the layers of a model do.
    """

    step: Any  # the engine's metadata, an object for each step
    kind: Hashable
    index_set: Hashable  # of this kind of layer, in this step
    layer: int  # the id() of who asks

    def lists(self, shapes: Hashable, make: Callable[[], Tensor]) -> Tensor:
        kept = vars(self.step).setdefault(_KEPT, {})
        of = (self.index_set, shapes)
        if self.kind in kept:
            known, maker, lists = kept[self.kind]
            if known == of and maker != self.layer:
                return lists  # type: ignore[no-any-return]
        lists = make()
        kept[self.kind] = of, self.layer, lists
        return lists


@dataclass(frozen=True)
class Group:
    """So many consecutive rows of a call are the queries of one request; 1: each goes alone.

    With ``starts`` a request has as many at most. Rows of none, which pad a graph, are behind.
    """

    queries: int = 1
    layers: Layers | None = None  # that share its lists; None: the call makes them
    starts: Tensor | None = None  # [num_requests + 1] int32, the first row of each request


ALONE = Group()
_switch = SimpleNamespace(on=False)
_current: ContextVar[Group | None] = ContextVar("the group of a layer's rows", default=None)


def switch(on: bool) -> None:
    """On, if the engine names :data:`NAME`."""
    _switch.on = on


def switched_on() -> bool:
    return bool(_switch.on)


def queries(num_rows: int, num_requests: int, longest: int) -> int:
    """``longest``, if the rows are as many queries of each request; 1 where they go alone."""
    return longest if 2 <= longest <= MOST and num_rows == num_requests * longest else 1


def of_requests(
    num_rows: int, num_requests: int, longest: int, starts: Tensor, layers: Layers | None = None
) -> Group:
    """The first rows of a step, by where each request starts.

    The host need not know how many a request has: ``longest`` bounds them, in a captured graph as well.
    """
    if not (2 <= longest <= MOST and num_rows > num_requests >= 1):
        return ALONE
    return Group(longest, layers, starts[: num_requests + 1])


@contextmanager
def step(group: Group) -> Iterator[None]:
    """Inside, calls of FlashMLA with one query to a request are of this group: the layer flattened them."""
    before = _current.set(group)
    try:
        yield
    finally:
        _current.reset(before)


def of_call(batch: int, s_q: int) -> Group:
    """Of a call of FlashMLA.

    A batch of one says nothing of requests: vLLM passes all tokens of a step so, where prompts and decode are
    mixed or context is parallel. One request's drafts are too few for a group to pay.
    """
    if not switched_on() or (batch == 1 and s_q > 1):
        return ALONE
    group = _current.get()
    if s_q == 1 and group is not None:
        return group if group.starts is not None or batch % group.queries == 0 else ALONE
    return Group(queries(batch * s_q, batch, s_q))
