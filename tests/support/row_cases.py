"""Rows as engines send them, all kinds in one batch: full next to empty, holes, repeats, hostile indices."""

from collections.abc import Callable
from dataclasses import replace

import torch
from sparse_cases import INT_MAX, INT_MIN, Case, Scope, case_over, filled_scope
from torch import Tensor

import mla_fp8
from mla_fp8 import KVLayout

HEADS = (1, 8, 16, 20, 32, 64, 128)
# Which places of a row hold a key, by column and a random number in each place. Token t has kind t modulo
# their number: an empty row follows a full one.
KINDS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda column, chance: column >= 0,
    lambda column, chance: column < 0,
    lambda column, chance: column <= len(column) // 2,
    lambda column, chance: column >= len(column) // 2,
    lambda column, chance: chance < 0.5,
    lambda column, chance: chance < 0.1,
    lambda column, chance: column == len(column) - 1,
    lambda column, chance: column // 16 % 2 == 1,
    lambda column, chance: column // 64 % 2 == 1,
    lambda column, chance: column >= 0,  # of one slot
    lambda column, chance: column < 0,
)
ONE_SLOT = 9


def hostile(num_slots: int, device: str) -> Tensor:
    return torch.tensor([-1, INT_MIN, INT_MAX, num_slots, -num_slots], dtype=torch.int32, device=device)


def row_scope(
    layout: KVLayout, device: str, num_tokens: int, *, topk: int, page_size: int, num_slots: int
) -> Scope:
    """Three quarters of the slots are used; hostile indices in the places without a key."""
    num_pages = -(-num_slots // page_size)
    num_slots = num_pages * page_size
    used = torch.randperm(num_slots, device=device)[: num_slots * 3 // 4]
    indices = used[torch.randint(len(used), (num_tokens, topk), device=device)].int()
    indices[ONE_SLOT :: len(KINDS)] = indices[ONE_SLOT :: len(KINDS), :1].clone()
    column, token = torch.arange(topk, device=device), torch.arange(num_tokens, device=device)
    chance = torch.rand(num_tokens, topk, device=device)
    of_kind = torch.stack([kind(column, chance).expand_as(chance) for kind in KINDS])
    holes = hostile(num_slots, device)
    holes = holes[torch.randint(len(holes), indices.shape, device=device)]
    indices = indices.where(of_kind[token % len(KINDS), token], holes)
    return filled_scope(layout, device, indices, None, num_pages, page_size)


def row_case(
    layout: KVLayout,
    device: str,
    *,
    num_tokens: int,
    num_q_heads: int,
    topk: int = 150,
    extra_topk: int | None = None,
    extra_layout: KVLayout | None = None,
    page_size: int = 64,
    num_slots: int = 800,
) -> Case:
    scopes = [row_scope(layout, device, num_tokens, topk=topk, page_size=page_size, num_slots=num_slots)]
    if extra_topk is not None:
        second = extra_layout or layout
        scopes.append(row_scope(second, device, num_tokens, topk=extra_topk, page_size=2, num_slots=400))
    return case_over(scopes, num_q_heads)


def changed(case: Case, change: Callable[[Scope], Scope]) -> Case:
    return replace(case, scopes=[change(scope) for scope in case.scopes])


def compacted(scope: Scope) -> Scope:
    """The keys of each row in front, in their order, -1 behind."""
    valid = (scope.indices >= 0) & (scope.indices < len(scope.rows))
    order = (~valid).int().argsort(dim=1, stable=True)
    return replace(scope, indices=scope.indices.where(valid, -1).gather(1, order))


def nan_slots(scope: Scope, shape: tuple[int, ...]) -> Tensor:
    """Random slots that no row selects."""
    unused = scope.rows[:, 0].isnan().nonzero()[:, 0].int()
    return unused[torch.randint(len(unused), shape, device=unused.device)]


def with_length(scope: Scope) -> Scope:
    """The same keys by their number: NaN behind them."""
    front = compacted(scope)
    length = (front.indices >= 0).sum(1, dtype=torch.int32)
    return replace(
        front, indices=front.indices.where(front.indices >= 0, nan_slots(scope, scope.indices.shape)),
        length=length,
    )  # fmt: skip


def with_rows(scope: Scope, which: Tensor, rows: Tensor | int) -> Scope:
    """Other indices in the rows of some tokens."""
    return replace(scope, indices=torch.where(which[:, None], rows, scope.indices))


def nan_in(which: Tensor) -> Callable[[Scope], Scope]:
    """Rows full of NaN for some tokens."""
    return lambda scope: with_rows(scope, which, nan_slots(scope, scope.indices.shape))


def nothing_in(which: Tensor) -> Callable[[Scope], Scope]:
    return lambda scope: with_rows(scope, which, -1)


Run = Callable[[Case], tuple[Tensor, ...]]  # out, lse


def decode(case: Case) -> tuple[Tensor, ...]:
    return case.decode(backend="native")


def decode_in_any_batch(case: Case) -> tuple[Tensor, ...]:
    return case.decode(backend="native", batch_invariant=True)


def prefill(case: Case) -> tuple[Tensor, ...]:
    out, _, lse = case.prefill(backend="native")
    return out, lse


def portable(case: Case) -> tuple[Tensor, ...]:
    """The kernel of GPUs that have no other."""
    out, _, lse = case.run_by("portable")
    return out, lse


def workspace(case: Case) -> tuple[Tensor, ...]:
    """bf16 rows, one cache."""
    (scope,) = case.scopes
    out, _, lse = mla_fp8.sparse_prefill(
        case.q, scope.rows, scope.indices, sm_scale=case.sm_scale, attn_sink=case.attn_sink,
        topk_length=scope.length, backend="native",
    )  # fmt: skip
    return out, lse


PAGED_RUNS: dict[str, Run] = {
    "decode": decode, "batch_invariant": decode_in_any_batch, "prefill": prefill, "portable": portable,
}  # fmt: skip
