"""The specification of hot buffers: plain Python on lists, slow, exact. No kernels, no dispatch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import KVLayout

__all__ = ["Tables", "copy_rows", "forget_rows", "resolve_hot_rows"]

INT_MAX = (1 << 31) - 1
Table = list[list[int]] | None


@dataclass
class Tables:
    """Where rows lie. Tables of pages are nested lists."""

    num_hot: int
    num_host_rows: int
    host: Table = None
    hot: Table = None
    resident: Table = None
    host_page_size: int = 1
    hot_page_size: int = 1
    first_page: int = 0
    by_entry: bool = False

    def look_up(self, table: list[list[int]], request: int, i: int, size: int, first: int) -> int:
        """The row of the i-th of a request's rows in pages, or -1."""
        page = table[request][i // size] if i // size < len(table[request]) else -1
        return page * size + i % size if page >= first else -1

    def host_row(self, request: int, entry: int) -> int:
        row = entry
        if self.host is not None:
            row = self.look_up(self.host, request, entry, self.host_page_size, self.first_page)
        return row if row < self.num_host_rows else -1

    def hot_row(self, request: int, state: int, slot: int) -> int:
        if self.hot is None:
            return state * self.num_hot + slot
        row = self.look_up(self.hot, request, slot, self.hot_page_size, 0)
        return row if row <= INT_MAX else -1

    def known(self, request: int, state: int, entry: int, length: int | None) -> tuple[int, int]:
        """(row, -1) of what has a row in any case, or none; (-1, key) of what the state is asked for."""
        if entry < 0 or (length is not None and entry >= length):
            return -1, -1
        if length is not None and (length <= self.num_hot or entry == length - 1):
            return self.hot_row(request, state, entry if length <= self.num_hot else self.num_hot), -1
        if self.resident is not None:
            row = self.look_up(self.resident, state, entry, self.hot_page_size, self.first_page)
            if row >= 0:
                return (row if row <= INT_MAX else -1), -1
        host = self.host_row(request, entry)
        return -1, -1 if host < 0 else entry if self.by_entry else host

    def known_row(
        self, request: int, state: int, entries: Tensor, length: int | None
    ) -> list[tuple[int, int]]:
        return [self.known(request, state, entry, length) for entry in entries.tolist()]


def groups(requests: Sequence[int], states: Sequence[int], next_n: int) -> Iterator[tuple[range, int, int]]:
    """(rows, request, state) of each request; rows of none of them are padding."""
    taken: set[int] = set()
    first = 0
    while first < len(requests):
        request, end = requests[first], first + 1
        while end < len(requests) and requests[end] == request and request >= 0:
            end += 1
        counted = range(first, min(end, first + next_n))
        state = states[request] if request >= 0 else -1
        if state >= 0 and state not in taken:
            yield counted, request, state
        taken.add(state)
        first = end


def resolve_hot_rows(
    entries: Tensor, hot_entries: Tensor, hot_order: Tensor, tables: Tables, *, requests: Sequence[int],
    states: Sequence[int], next_n: int, lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, list[list[tuple[int, int]]], tuple[int, int]]:  # fmt: skip
    """Hot rows; those that are not loaded; what each row copies, (host row, hot row); (found, loaded).

    Updates the state.
    """
    rows, there = torch.full_like(entries, -1), torch.full_like(entries, -1)
    plan: list[list[tuple[int, int]]] = [[] for _ in range(len(entries))]
    found, loaded, k = 0, 0, entries.shape[1]
    for group, request, state in groups(requests, states, next_n):
        of_rows = [
            tables.known_row(request, state, entries[r], lengths[r] if lengths else None) for r in group
        ]
        keys = list(dict.fromkeys(key for row in of_rows for _, key in row if key >= 0))
        slots, hits, misses = update(keys, hot_entries[state], hot_order[state])
        at = {key: tables.hot_row(request, state, slot) if slot >= 0 else -1 for key, slot in slots.items()}
        copies = [(tables.host_row(request, key) if tables.by_entry else key, at[key]) for key in misses]
        for i, r in enumerate(group):
            for out, found_at in ((rows, at), (there, at | dict.fromkeys(misses, -1))):
                out[r] = out.new_tensor([row if key < 0 else found_at[key] for row, key in of_rows[i]])
            plan[r] = copies[i * k : (i + 1) * k]
        found, loaded = found + hits, loaded + len(misses)
    return rows, there, plan, (found, loaded)


def update(keys: list[int], held: Tensor, order: Tensor) -> tuple[dict[int, int], int, list[int]]:
    """(slot of each key, how many slots were hits, keys to load); updates one request's state."""
    num_hot, chosen, owners = len(held), set(keys), held.tolist()
    slots = {owners[slot]: slot for slot in reversed(range(num_hot)) if owners[slot] in chosen}
    is_used = {slot: 0 <= slot < num_hot and owners[slot] in chosen for slot in order.tolist()}
    used = [slot for slot in order.tolist() if is_used[slot]]
    stale = [slot for slot in order.tolist() if not is_used[slot]]
    misses = [key for key in keys if key not in slots]
    for i, key in enumerate(misses):
        slots[key] = stale[i] if i < len(stale) and 0 <= stale[i] < num_hot else -1
        if slots[key] >= 0:
            held[slots[key]] = key
    order.copy_(torch.tensor(stale[len(misses) :] + stale[: len(misses)] + used, dtype=order.dtype))
    return slots, len(used), misses


def row_bytes(cache: Tensor, layout: KVLayout, page_size: int, row: int) -> tuple[Tensor, Tensor]:
    """The values of a row and the scales that lie apart from them: views of a [pages, page_bytes] cache."""
    page, i = cache.view(torch.uint8)[row // page_size], row % page_size
    tail = 0 if layout.scale_inline else layout.scale_bytes
    first = page_size * layout.token_stride + i * tail
    return page[i * layout.token_stride : (i + 1) * layout.token_stride], page[first : first + tail]


def copy_rows(
    source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]], *, layout: KVLayout,
    source_page_size: int, target_page_size: int,
) -> None:  # fmt: skip
    """Rows of one cache to another: pairs of (source row, target row)."""
    for a, b in pairs:
        if a < 0 or not 0 <= b < len(target) * target_page_size:
            continue
        to = row_bytes(target, layout, target_page_size, b)
        for i, part in enumerate(to):
            exists = a < len(source) * source_page_size
            part.copy_(
                row_bytes(source, layout, source_page_size, a)[i] if exists else torch.zeros_like(part)
            )


def forget_rows(entries: Sequence[int], hot_entries: Tensor, states: Sequence[int] | None = None) -> None:
    """Of entry i, state ``states[i]`` alone forgets it, or each."""
    for i, entry in enumerate(entries):
        rows = range(len(hot_entries)) if states is None else [states[i]] if states[i] >= 0 else []
        for state in rows if entry >= 0 else []:
            hot_entries[state][hot_entries[state].long() == entry] = -1
