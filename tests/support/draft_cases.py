"""Queries of one request that choose mostly the same keys: drafts, or neighbours in a prompt."""

from dataclasses import replace

import torch
from sparse_cases import Case, Scope, filled_scope, make_case

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
    num_slots = page_size * num_pages
    indices = draft_indices(num_groups, group, topk, num_slots, overlap, device)
    indices[torch.rand(indices.shape, device=device) < holes] = -1
    least = int(topk * shortest)
    length = torch.randint(least, topk + 1, (len(indices),), device=device, dtype=torch.int32)
    return filled_scope(layout, device, None, indices, length, num_pages, page_size)


def draft_case(
    layout: KVLayout,
    device: str,
    num_groups: int,
    group: int,
    *,
    num_q_heads: int = 8,
    topk: int = 200,
    extra_topk: int = 0,
    **options,
) -> Case:
    tokens = num_groups * group
    case = make_case(layout, device, num_tokens=tokens, num_q_heads=num_q_heads, topk=8)
    scopes = [draft_scope(layout, device, num_groups, group, topk, **options)]
    if extra_topk:
        scopes.append(draft_scope(layout, device, num_groups, group, extra_topk, **options))
    return replace(case, scopes=scopes)
