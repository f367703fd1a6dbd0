"""Random calls of the ops around a hot buffer."""

from typing import Any

import numpy as np
import torch
from fuzz_cases import INT_MAX, INT_MIN, Cache, Call, Random, int32
from fuzz_formats import FP4, LAYOUTS, Array
from fuzz_other_cases import assert_equal, index_tensor
from torch import Tensor


def page_row(table: list[int], i: int, size: int, first: int) -> int:
    page = table[i // size] if i // size < len(table) else -1
    return page * size + i % size if page >= first else -1


def small(row: int) -> int:
    return row if row <= INT_MAX else -1


class Step:
    """A call on a state in mid life: some slots hold entries, in any order of use."""

    def __init__(self, r: Random) -> None:
        self.next_n, self.k, self.requests = r.pick(1, 1, 3), r.pick(0, 1, 4, 30), r.pick(1, 3)
        self.num_hot = self.next_n * self.k + r.pick(0, 1, 17)
        self.host_size, self.hot_size, self.first = r.pick(1, 4), r.pick(1, 3, 64), r.pick(0, 1)
        limit, self.by_entry, self.num_states = r.pick(2, 50, 400), r.often(), self.requests + r.pick(0, 1)
        self.state_rows = None
        if r.often():
            self.state_rows = [int(x) for x in r.rng.permutation(self.num_states)[: self.requests]]
        rows = self.requests if self.state_rows else self.num_states
        sizes = (
            (0.7, rows, -(-limit // self.host_size), 2 * limit),
            (0.7, rows, -(-self.num_hot // self.hot_size), 90),
            (0.3, self.num_states, 3, 9),
        )
        self.host, self.hot, self.resident = (
            [r.ints(pages, 0, high, 0.03) for _ in range(n)] if r.often(p) else None
            for p, n, pages, high in sizes
        )
        self.num_host = r.pick(limit, 2 * limit * self.host_size)
        self.entries = [
            r.ints(self.k, 0, limit, 0.1) for _ in range(r.pick(0, 1, self.next_n * self.requests))
        ]
        self.held = np.full((self.num_states, self.num_hot), -1, np.int32)
        order = [r.rng.permutation(self.num_hot) for _ in range(self.num_states)]
        self.order = np.array(order, np.int16).reshape(self.held.shape)
        for row in self.held:
            known = r.rng.permutation(max(self.num_host, limit))[: r.pick(0, self.num_hot // 2, self.num_hot)]
            row[: len(known)] = known
            r.rng.shuffle(row)

    def arguments(self) -> dict[str, Any]:
        tables = {
            "host_page_table": self.host,
            "hot_page_table": self.hot,
            "resident_page_table": self.resident,
        }
        rows = {
            "entries": int32(self.entries).view(len(self.entries), self.k),
            "hot_entries": int32(self.held), "hot_order": torch.from_numpy(self.order.copy()),
            "num_host_rows": self.num_host, "host_page_size": self.host_size,
            "hot_page_size": self.hot_size, "first_page": self.first, "by_entry": self.by_entry,
            "next_n": self.next_n, "counters": torch.zeros(2, dtype=torch.int64),
            "state_rows": None if self.state_rows is None else int32(self.state_rows),
        }  # fmt: skip
        return rows | {n: None if x is None else int32(x).view(len(x), -1) for n, x in tables.items()}

    def host_of(self, request: int, e: int) -> int:
        row = e if self.host is None else page_row(self.host[request], e, self.host_size, self.first)
        return row if row < self.num_host else -1

    def hot_of(self, request: int, state: int, slot: int) -> int:
        if self.hot is None:
            return state * self.num_hot + slot
        return small(page_row(self.hot[request], slot, self.hot_size, 0))

    def chosen(self, request: int, state: int, rows: range, want: Array) -> dict[int, list[tuple[int, int]]]:
        """Of each key, where it is chosen. What is resident is answered at once."""
        kept: dict[int, list[tuple[int, int]]] = {}
        for row in rows:
            for c, e in enumerate(self.entries[row]):
                host = -1 if e < 0 else self.host_of(request, e)
                at = -1
                if e >= 0 and self.resident is not None:
                    at = page_row(self.resident[state], e, self.hot_size, self.first)
                if at >= 0:
                    want[row, c] = small(at)
                elif host >= 0:
                    kept.setdefault(e if self.by_entry else host, []).append((row, c))
        return kept

    def resolve(self, request: int, rows: range, want: Array) -> tuple[list[tuple[int, int]], int]:
        """What is to load, and how many slots were used. Updates the state."""
        state = request if self.state_rows is None else self.state_rows[request]
        kept, held = self.chosen(request, state, rows, want), self.held[state]
        used = [int(slot) for slot in self.order[state] if int(held[slot]) in kept]
        free = [int(slot) for slot in self.order[state] if slot not in used]
        slot_of = {int(held[slot]): slot for slot in used}
        loads = [key for key in kept if key not in slot_of]
        for key, slot in zip(loads, free, strict=False):
            slot_of[key], held[slot] = slot, key
        self.order[state] = free[len(loads) :] + free[: len(loads)] + used
        at = {key: self.hot_of(request, state, slot) for key, slot in slot_of.items()}
        for key, places in kept.items():
            for place in places:
                want[place] = at[key]
        return [(self.host_of(request, key) if self.by_entry else key, at[key]) for key in loads], len(used)


def resolve_hot_rows(r: Random) -> Call:
    step = Step(r)
    arguments, rows, k = step.arguments(), len(step.entries), step.k
    want, plans, counters = np.full((rows, k), -1), [[] for _ in range(rows)], [0, 0]
    for first in range(0, rows, step.next_n):
        own = range(first, min(rows, first + step.next_n))
        plan, used = step.resolve(first // step.next_n, own, want)
        counters = [counters[0] + used, counters[1] + len(plan)]
        for i, row in enumerate(own):
            plans[row] = plan[i * k : (i + 1) * k]

    def check(results: tuple[Tensor, ...]) -> None:
        assert_equal("hot_rows", results[0], want)
        assert_equal("miss_counts", results[3], [len(plan) for plan in plans])
        for row, plan in enumerate(plans):
            for i, name in ((0, "miss_host_rows"), (1, "miss_hot_rows")):
                assert_equal(name, results[1 + i][row], [pair[i] for pair in plan] + [-1] * (k - len(plan)))
        assert_equal("hot_entries", arguments["hot_entries"], step.held)
        assert_equal("hot_order", arguments["hot_order"], step.order)
        assert_equal("counters", arguments["counters"], counters)

    return Call("resolve_hot_rows", arguments, check)


def copy(r: Random, op: str) -> Call:
    layout = r.pick(*LAYOUTS, FP4)
    hosts, hots = Cache(r, layout), Cache(r, layout)
    source, target = (hosts, hots) if op == "copy_host_rows" else (hots, hosts)
    lists, width = r.pick(0, 1, 4), r.pick(0, 1, 7)
    free = [int(x) for x in r.rng.permutation(target.num_slots)]
    to = [[free.pop() if free and r.often(0.8) else r.pick(-1, INT_MIN, INT_MAX, target.num_slots)
           for _ in range(width)] for _ in range(lists)]  # fmt: skip
    origin = [r.ints(width, 0, source.num_slots, 0.1, (source.num_slots,)) for _ in range(lists)]
    counts = r.ints(lists, 0, width + 2, 0.1) if op == "copy_host_rows" and r.often() else None

    def rows(values: list[list[int]]) -> Tensor:
        return index_tensor(r, [x for row in values for x in row]).view(lists, width)

    rows_from, rows_to = rows(origin), rows(to)
    origin, to = rows_from.tolist(), rows_to.tolist()
    want = target.pages.copy()
    for i, row in enumerate(origin):
        for c in range(width if counts is None else min(max(counts[i], 0), width)):
            if row[c] < 0 or not 0 <= to[i][c] < target.num_slots:
                continue
            page, at = divmod(to[i][c], target.page_size)
            for j, field in enumerate(layout.fields(want[page], target.page_size, at)):
                field[:] = 0
                if row[c] < source.num_slots:
                    page_from, at_from = divmod(row[c], source.page_size)
                    field[:] = layout.fields(source.pages[page_from], source.page_size, at_from)[j]
    names = ("host_rows", "hot_rows") if op == "copy_host_rows" else ("hot_rows", "host_rows")
    arguments = {
        "host_caches": hosts.tensor, "hot_caches": hots.tensor, names[0]: rows_from, names[1]: rows_to,
        "layout": layout.name, "host_page_size": hosts.page_size, "hot_page_size": hots.page_size,
    }  # fmt: skip
    if op == "copy_host_rows":
        arguments["counts"] = None if counts is None else int32(counts)

    def check(results: tuple[Tensor, ...]) -> None:
        assert_equal("the cache", target.tensor, want)

    return Call(op, arguments, check)


def copy_host_rows(r: Random) -> Call:
    return copy(r, "copy_host_rows")


def store_host_rows(r: Random) -> Call:
    return copy(r, "store_host_rows")


def forget_rows(r: Random) -> Call:
    states, num_hot, n, requests = r.pick(0, 1, 3), r.pick(0, 1, 20), r.pick(0, 1, 9), r.pick(1, 4)
    held = np.array([r.ints(num_hot, -1, 12) for _ in range(states)], np.int32).reshape(states, num_hot)
    entries = r.ints(n, 0, 12, 0.1)
    request = r.ints(n, 0, requests, 0.1) if r.often(0.7) else None
    state_rows = r.ints(requests, 0, states, 0.1) if request is not None and r.often() else None
    arguments = {
        "entries": index_tensor(r, entries), "hot_entries": int32(held),
        "row_to_request": None if request is None else int32(request),
        "state_rows": None if state_rows is None else int32(state_rows),
    }  # fmt: skip
    want: Array = held.copy()
    given = arguments["entries"].tolist()
    for i, entry in enumerate(given):
        of: list[int] = list(range(states))
        if request is not None:
            known = range(states) if state_rows is None else range(requests)
            of = [request[i] if state_rows is None else state_rows[request[i]]] if request[i] in known else []
        for state in of:
            if 0 <= state < states and entry >= 0:
                want[state][want[state].astype(np.int64) == entry] = -1

    def check(results: tuple[Tensor, ...]) -> None:
        assert_equal("hot_entries", arguments["hot_entries"], want)

    return Call("forget_rows", arguments, check)
