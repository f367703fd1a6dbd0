"""What the tests of compress_kv share: a request's tokens, and chains of calls over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from norm_rope_cases import rope_tables
from torch import Tensor

import mla_fp8
from mla_fp8 import KV_LAYOUTS, KVLayout, layer_reference

EPS = 1e-6
# (ratio, online)
KINDS = [(1, False), (2, False), (4, False), (128, False), (128, True)]
KIND_IDS = ["1", "2", "4", "128", "128 online"]
POISON = 0xA5


def window_of(ratio: int) -> int:
    return {4: 8}.get(ratio, ratio)


def depth_of(ratio: int, online: bool, rejected: int) -> int:
    """The smallest that allows calls of which `rejected` tokens may be rejected; at least one."""
    n = max(rejected, 1)
    return n + 1 if online else window_of(ratio) - 1 + n


@dataclass
class Layer:
    """What all calls of a layer share."""

    ratio: int
    online: bool
    device: str
    layout: KVLayout = KV_LAYOUTS["dsv4"]
    page_size: int = 16
    round_pooled: bool = True
    max_pos: int = 700
    constants: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.constants:
            return
        width, device = self.width, self.device
        cos, sin = rope_tables(device, max_pos=self.max_pos)
        ape = torch.randn(self.ratio, width // 2, device=device) if self.ratio > 2 else None
        weight = torch.randn(512, device=device).bfloat16()
        self.constants = {"ape": ape, "norm_weight": weight, "cos": cos, "sin": sin}

    @property
    def width(self) -> int:
        return layer_reference.compressed_width(self.ratio)

    def rows(self, n: int) -> Tensor:
        return torch.randn(n, self.width, device=self.device) * 2

    def new_state(self, num_slots: int, rejected: int = 0, depth: int | None = None) -> Tensor | None:
        """Full of NaN: a stale row would be seen."""
        if self.ratio == 1:
            return None
        width = 3 * 512 if self.online else self.width
        shape = (num_slots, depth or depth_of(self.ratio, self.online, rejected), width)
        return torch.full(shape, float("nan"), device=self.device)

    def new_cache(self, num_rows: int) -> Tensor:
        cache = self.layout.empty(-(-num_rows // self.page_size) + 1, self.page_size, self.device)
        return cache.fill_(POISON)

    def call(
        self,
        rows: Tensor,
        lens: Sequence[int],
        start_pos: Sequence[int],
        state: Tensor | None,
        state_slots: Sequence[int],
        slots: Tensor,
        cache: Tensor,
        *,
        first: int = 0,
    ) -> Tensor:
        """Returns the latents, NaN where no token closes. `first`: what query_start_loc begins with."""

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        latent = torch.full((len(rows), 512), float("nan"), dtype=torch.bfloat16, device=self.device)
        starts = [first + sum(lens[:i]) for i in range(len(lens) + 1)]
        mla_fp8.compress_kv(
            rows, ints(starts), ints(start_pos), state, ints(state_slots), slot_mapping=slots, kv_cache=cache,
            **self.constants, ratio=self.ratio, layout=self.layout, page_size=self.page_size, eps=EPS,
            online=self.online, round_pooled=self.round_pooled, out_latent=latent,
        )  # fmt: skip
        return latent

    def slots_of(self, positions: Tensor, first_row: int = 0) -> Tensor:
        """Row p // ratio for closing tokens, garbage for the others."""
        closes = (positions + 1) % self.ratio == 0
        return torch.where(closes, first_row + positions // self.ratio, 2**30)


def chain(
    layer: Layer,
    rows: Tensor,
    cuts: Sequence[int],
    rejected: Sequence[int],
    *,
    most: int,
    start: int = 0,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Calls over `rows` from position `start` on: (latents, cache, state).

    Each accepts `cuts[i]` tokens, and computes `rejected[i]` more that are something else.
    """  # fmt: skip
    state = layer.new_state(2, most) if state is None else state
    cache, latents, at = layer.new_cache((start + len(rows)) // layer.ratio + 1), [], 0
    for accepted, more in zip(cuts, rejected, strict=True):
        part = torch.cat([rows[at : at + accepted], layer.rows(more) + 3])
        positions = torch.arange(start + at, start + at + len(part), device=layer.device)
        slots = layer.slots_of(positions)
        latents.append(layer.call(part, [len(part)], [start + at], state, [1], slots, cache)[:accepted])
        at += accepted
    return torch.cat(latents), cache, state


def live_rows(layer: Layer, state: Tensor | None, end: int) -> Tensor | None:
    """The rows of the state that a later call may need."""
    if state is None:
        return None
    need = 1 if layer.online else window_of(layer.ratio) - 1
    return (
        torch.stack([state[1, p % state.shape[1]] for p in range(max(0, end - need), end)]) if end else None
    )


def same_bits(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want)))
