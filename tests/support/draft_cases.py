"""Queries of one request that choose mostly the same keys: drafts, or neighbours in a prompt."""

import emulation
import pytest
import torch
from sparse_cases import INT_MAX, INT_MIN, Case, Scope, case_over, filled_scope

import mla_fp8
from mla_fp8 import KVLayout


def draft_indices(
    num_groups: int, group: int, topk: int, num_slots: int, overlap: float, device: str
) -> torch.Tensor:
    """[num_groups * group, topk]: distinct in a row; each keeps `overlap` of the one before, in any order."""
    rows = []
    for _ in range(num_groups):
        pool = torch.randperm(num_slots, device=device).int()
        row, used = pool[:topk], topk
        for _ in range(group):
            rows.append(row[torch.randperm(topk, device=device)])
            new = torch.rand(topk, device=device) >= overlap
            fresh = pool[used : used + int(new.sum())]
            used += len(fresh)
            row = row.clone()
            row[new.nonzero()[: len(fresh), 0]] = fresh
    return torch.stack(rows)


def draft_scope(
    layout: KVLayout,
    device: str,
    num_groups: int,
    group: int,
    topk: int,
    *,
    overlap: float = 0.9,
    page_size: int = 4,
    num_pages: int = 400,
    holes: float = 0.1,
    shortest: float = 0.5,
) -> Scope:
    """With holes and lengths; NaN in every slot that is not selected."""
    indices = draft_indices(num_groups, group, topk, num_pages * page_size, overlap, device)
    indices[torch.rand(indices.shape, device=device) < holes] = -1
    least = int(topk * shortest)
    length = torch.randint(least, topk + 1, (len(indices),), device=device, dtype=torch.int32)
    return filled_scope(layout, device, indices, length, num_pages, page_size)


def draft_case(
    layout: KVLayout,
    device: str,
    num_groups: int,
    group: int,
    *,
    num_q_heads: int = 8,
    topk: int = 70 if emulation.executes(emulation.AMPERE) else 200,  # whose queries go alone
    extra_topk: int = 0,
    **options,
) -> Case:
    widths = [topk, extra_topk] if extra_topk else [topk]
    return case_over(
        [draft_scope(layout, device, num_groups, group, width, **options) for width in widths], num_q_heads
    )


def uneven(case: Case, group: int, counts: list[int], padding: int = 0) -> tuple[Case, torch.Tensor]:
    """The first counts[i] queries of each group, then `padding` of no key; where groups start."""
    rows = [i * group + j for i, count in enumerate(counts) for j in range(count)]
    case = case.tokens(torch.tensor(rows + [0] * padding, device=case.q.device))
    for scope in case.scopes:
        scope.indices[len(rows) :] = -1
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=case.q.device).cumsum(0).int()
    return case, starts


def hostile_starts(tokens: int, device: str) -> list[torch.Tensor]:
    """Where no engine's requests start: anywhere, in any order, beside each other."""
    number = tokens // 4 + 1
    return [
        torch.randint(INT_MIN, INT_MAX, (number,), device=device).int(),
        torch.randint(-5, tokens + 5, (number,), device=device).int(),
        torch.arange(number, device=device).flip(0).int(),
        torch.tensor([3, INT_MAX], device=device).int(),
        torch.tensor([0, tokens, 0, tokens, 2, tokens], device=device).int(),
    ]


def refilled(scope: Scope, indices: torch.Tensor, length: torch.Tensor | None) -> Scope:
    """The same of other indices."""
    num_pages = len(scope.rows) // scope.page_size
    return filled_scope(scope.layout, indices.device, indices, length, num_pages, scope.page_size)


def plan_of(case: Case, query_groups: int, **options) -> torch.Tensor:
    """What `plan_shared_keys` makes of its indices."""
    first, *more = case.scopes
    for scope in more:
        options |= {
            "extra_indices": scope.indices, "extra_topk_length": scope.length,
            "extra_num_slots": len(scope.rows),
        }  # fmt: skip
    return mla_fp8.plan_shared_keys(
        first.indices, query_groups=query_groups, num_q_heads=case.q.shape[1], layout=case.layout,
        num_slots=len(first.rows), topk_length=first.length, **options,
    )  # fmt: skip


def without_lengths(case: Case) -> Case:
    """The same problem with holes in place of lengths, in place."""
    for scope in case.scopes:
        column = torch.arange(scope.indices.shape[1], device=scope.indices.device)
        scope.indices[column >= scope.length[:, None]] = -1
        scope.length = None
    return case


def calls_of_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, dict]]:
    """Of the ops that are called from here on: name, tokens of a group, arguments by name."""
    calls = []
    for name in ("sparse_decode", "sparse_decode_out", "plan_shared_keys"):
        op = getattr(torch.ops.mla_fp8, name)

        def spied(*args, op=op, name=name, **options):
            calls.append((name.removesuffix("_out"), options.get("query_groups", 1), options))
            return op(*args, **options)

        monkeypatch.setattr(torch.ops.mla_fp8, name, spied)
    return calls


def groups(seen: list[tuple[str, int, dict]]) -> list[tuple[str, int]]:
    return [(name, group) for name, group, _ in seen]


def many(device: str) -> int:
    """Requests; on a GPU enough for groups to pay."""
    return 160 if device == "cuda" else 5
