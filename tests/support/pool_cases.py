"""What the tests of pool_index_k share: a request's tokens, and chains of calls over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS

WRITTEN = ("index_cache", "state_k", "state_score")
LAYOUT, PAGE_SIZE, POOL, POISON = INDEX_LAYOUTS["index_fp8"], 16, 4, 0xA5


def depth_of(rejected: int) -> int:
    """The smallest that allows calls of which `rejected` tokens may be rejected; at least one."""
    return POOL - 1 + max(rejected, 1)


@dataclass
class Layer:
    """What all calls of a layer share."""

    device: str
    strided: bool = False  # rows within wider ones, states apart from each other
    ape: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ape is None:
            self.ape = torch.randn(POOL, 128, device=self.device)

    def rows(self, n: int) -> Tensor:
        """[2, n, 128]: keys and scores."""
        wide = (torch.randn(2, n, 160 if self.strided else 128, device=self.device) * 2).bfloat16()
        return wide[..., -128:]

    def new_state(self, num_slots: int, rejected: int = 0, depth: int | None = None) -> Tensor:
        """[2, slots, depth, 128], full of NaN: a stale row would be seen."""
        shape = (num_slots, 2, depth or depth_of(rejected), 128)
        whole = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        return whole.transpose(0, 1) if self.strided else whole.transpose(0, 1).contiguous()

    def new_cache(self, num_entries: int) -> Tensor:
        return LAYOUT.empty(-(-num_entries // PAGE_SIZE) + 1, PAGE_SIZE, self.device).fill_(POISON)

    def call(
        self,
        rows: Tensor,
        lens: Sequence[int],
        start_pos: Sequence[int],
        state: Tensor,
        state_slots: Sequence[int],
        slots: Tensor,
        cache: Tensor,
        *,
        first: int = 0,
    ) -> None:
        """`first`: what query_start_loc begins with."""

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        starts = [first + sum(lens[:i]) for i in range(len(lens) + 1)]
        mla_fp8.pool_index_k(
            *rows, ints(starts), ints(start_pos), *state, ints(state_slots), self.ape, slots, cache,
            page_size=PAGE_SIZE,
        )  # fmt: skip

    def slots_of(self, start: int, n: int, first: int = 0) -> Tensor:
        """Entry p // 4 for tokens that close a pool, garbage for the others."""
        positions = torch.arange(start, start + n, device=self.device)
        return torch.where((positions + 1) % POOL == 0, first + positions // POOL, 3)


def chain(
    layer: Layer,
    rows: Tensor,
    cuts: Sequence[int],
    rejected: Sequence[int],
    state: Tensor,
    *,
    slot: int = 1,
    start: int = 0,
) -> Tensor:
    """The cache after calls over `rows` from position `start` on.

    Each accepts `cuts[i]` tokens, and computes `rejected[i]` more that are something else.
    """
    cache, at = layer.new_cache((start + rows.shape[1] + max(rejected, default=0)) // POOL + 1), 0
    for accepted, more in zip(cuts, rejected, strict=True):
        part = torch.cat([rows[:, at : at + accepted], layer.rows(more) + 3], 1)
        n = part.shape[1]
        layer.call(part, [n], [start + at], state, [slot], layer.slots_of(start + at, n), cache)
        at += accepted
    return cache


def entries(cache: Tensor, first: int, last: int) -> Tensor:
    """[last - first, 132] uint8: the bytes of entries."""
    values, scales = (x.flatten(0, 1)[first:last] for x in LAYOUT.views(cache, PAGE_SIZE))
    return torch.cat([values.view(torch.uint8), scales.contiguous().view(torch.uint8).flatten(1)], 1)


def live_rows(state: Tensor, slot: int, end: int) -> Tensor:
    """The rows of the state that a later call may need."""
    return torch.stack(
        [state[:, slot, p % state.shape[2]] for p in range(end - end % POOL, end)] or [state[:, 0, 0]]
    )


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want)))


def sample(device: str, num_tokens: int) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """A call of two requests."""
    layer = Layer(device)
    requests = ([0, num_tokens - 1, num_tokens], [0, 3], [2, 0])
    starts, start_pos, state_slots = (torch.tensor(x, device=device).int() for x in requests)
    rows, state = layer.rows(num_tokens), layer.new_state(3).zero_()
    slots, cache = torch.arange(num_tokens, device=device), layer.new_cache(num_tokens).zero_()
    tensors = (*rows, starts, start_pos, *state, state_slots, layer.ape, slots, cache)
    return tensors, {"page_size": PAGE_SIZE}


def inputs(seed: int) -> dict[str, Tensor]:
    """Decode, verify and prefill in one call, from a state of random rows; 9 pages of 64."""
    torch.manual_seed(seed)
    lens = torch.tensor([0, 1, 1, 5, 93]) if seed % 2 else torch.tensor([0, 40, 1, 58, 1])
    k, score = torch.randn(2, 100, 128).bfloat16()
    state_k, state_score = torch.randn(2, 6, 9, 128).bfloat16()
    slots = torch.randperm(9 * 64)[:100]
    slots[seed::9] = -1
    return {
        "k": k, "score": score, "query_start_loc": lens.cumsum(0).int(),
        "start_pos": torch.randint(40, (4,)).int(), "state_k": state_k, "state_score": state_score,
        "state_slots": torch.randperm(6)[:4], "ape": torch.randn(4, 128), "slot_mapping": slots,
        "index_cache": torch.full((9, LAYOUT.page_bytes(64)), POISON, dtype=torch.uint8),
    }  # fmt: skip
