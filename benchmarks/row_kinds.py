"""What the rows of indices look like that engines send: a table, and the indices that its lines mean.

A request in its first tokens, or shorter than top-k, has -1 behind its keys; CUDA graphs are padded with rows
of -1; indexers leave holes; the tokens of one request, or requests with one system prompt, choose alike.
"""

import functools
from dataclasses import dataclass

import torch

UNBOUNDED = 1 << 30  # tokens: a context that top-k does not reach the end of


@dataclass(frozen=True)
class RowKind:
    label: str
    context: int = UNBOUNDED  # tokens that each row may attend to
    prompt_from: int | None = None  # the rows are tokens of one prompt, which has so many before them
    empty: float = 0.0  # share of rows that are all -1, the last ones
    holes: float = 0.0  # share of a row's places that are -1, scattered
    shared: float = 0.0  # share of a row that is the same in all rows
    s_q: int = 1  # tokens of a request, which have 90 % of their keys in common
    order: str = "random"  # "sorted"; "repeated": slot 0 in every place
    lengths: bool = False  # passed as topk_length besides


ROW_KINDS = (
    RowKind("full"),
    RowKind("context 256", context=256),
    RowKind("context 512", context=512),
    RowKind("context 1000", context=1000),
    RowKind("context 2000", context=2000),
    RowKind("prompt from 0", prompt_from=0),
    RowKind("prompt from 1000", prompt_from=1000),
    RowKind("a quarter empty", empty=0.25),
    RowKind("10 % holes", holes=0.1),
    RowKind("50 % holes", holes=0.5),
    RowKind("90 % holes", holes=0.9),
    RowKind("half in common", shared=0.5),
    RowKind("sorted", order="sorted"),
    RowKind("one slot", order="repeated"),
    RowKind("90 % in common", s_q=2),
    RowKind("90 % in common", s_q=4),
    RowKind("context 256, lengths", context=256, lengths=True),
    RowKind("context 512, lengths", context=512, lengths=True),
    RowKind("context 1000, lengths", context=1000, lengths=True),
    RowKind("context 2000, lengths", context=2000, lengths=True),
    RowKind("prompt from 0, lengths", prompt_from=0, lengths=True),
    RowKind("prompt from 1000, lengths", prompt_from=1000, lengths=True),
)


def seen(kind: RowKind, num_tokens: int) -> torch.Tensor:
    """[num_tokens] tokens that each row may attend to."""
    if kind.prompt_from is not None:
        return kind.prompt_from + 1 + torch.arange(num_tokens)
    context = torch.full((num_tokens,), kind.context)
    context[num_tokens - int(num_tokens * kind.empty) :] = 0
    return context


def expected_keys(kind: RowKind, num_tokens: int, topk: int, ratio: int) -> float:
    """Of all rows, without the window's."""
    return (seen(kind, num_tokens) // ratio).clamp_max(topk).sum().item() * (1 - kind.holes)


def behind(slots: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The slots with -1 behind the first `valid` of each row."""
    column = torch.arange(slots.shape[-1], device=slots.device)
    return slots.masked_fill(column >= valid[:, None], -1).int()


@functools.lru_cache(maxsize=1)
def selected(
    kind: RowKind, size: tuple[int, int, int], num_slots: int, ratio: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [num_sets, num_tokens, topk], how many are in front of the -1 behind) of an indexer.

    An entry stands for `ratio` tokens. Prompts lie in slots 0, 1, ..; other rows choose among all slots.
    """
    _, num_tokens, topk = size
    entries = (seen(kind, num_tokens) // ratio).to(device)
    valid = entries.clamp_max(topk).int()
    slots = torch.randint(num_slots, size, device=device)
    if kind.prompt_from is not None:
        column = torch.arange(topk, device=device)
        chosen = (torch.rand(size, device=device) * entries[:, None]).long()
        slots = torch.where(entries[:, None] <= topk, column, chosen)
    if kind.order == "repeated":
        slots.zero_()
    if kind.shared:
        common = int(topk * kind.shared)
        slots[..., :common] = slots[:, :1, :common].clone()
    if kind.s_q > 1:
        first = slots[:, :: kind.s_q].repeat_interleave(kind.s_q, 1)
        slots = torch.where(torch.rand(size, device=device) < 0.9, first, slots)
    if kind.order == "sorted":
        slots = slots.sort(-1).values
    slots = slots.masked_fill(torch.rand(size, device=device) < kind.holes, -1)
    return behind(slots, valid), valid


@functools.lru_cache(maxsize=1)
def windows(
    kind: RowKind, size: tuple[int, int, int], num_slots: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, valid) of each token's sliding window, its own slot last."""
    num_sets, num_tokens, window = size
    valid = seen(kind, num_tokens).clamp_max(window).to(device)
    token = torch.arange(num_tokens, device=device)
    if kind.prompt_from is not None:
        last = (kind.prompt_from + token).expand(num_sets, -1)
    else:
        requests = (num_sets, -(-num_tokens // kind.s_q))
        first = torch.randint(window, num_slots - kind.s_q, requests, device=device)
        last = first.repeat_interleave(kind.s_q, 1)[:, :num_tokens] + token % kind.s_q
    column = torch.arange(window, device=device)
    slots = (last - valid + 1)[..., None] + column
    return behind(slots, valid), valid.int()
