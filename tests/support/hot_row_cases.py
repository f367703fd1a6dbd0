"""States of hot buffers, calls of resolve_hot_rows on them, and what the specification says."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import hot_rows_reference as reference

Options = dict[str, Any]
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
POISON = 1 << 30
TABLES = {"host": "host_page_table", "hot": "hot_page_table", "resident": "resident_page_table"}


def new_state(states: int, num_hot: int) -> tuple[Tensor, Tensor]:
    held = torch.full((states, num_hot), -1, dtype=torch.int32)
    return held, torch.arange(num_hot, dtype=torch.int16).repeat(states, 1)


@dataclass
class Case:
    """A call, and the state before it. ``tables`` are those of the reference, as lists."""

    entries: Tensor
    held: Tensor
    order: Tensor
    tables: reference.Tables
    row_to_request: list[int] | None = None
    next_n: int = 1
    state_rows: list[int] | None = None
    entry_lens: list[int] | None = None
    num_valid_rows: int | None = None
    int64: bool = False
    more: Options = field(default_factory=dict)

    @property
    def requests(self) -> list[int]:
        rows = len(self.entries)
        found = self.row_to_request or [i // self.next_n for i in range(rows)]
        exist = range(len(self.held) if self.state_rows is None else len(self.state_rows))
        valid = rows if self.num_valid_rows is None else self.num_valid_rows
        return [x if i < valid and x in exist else -1 for i, x in enumerate(found)]

    @property
    def states(self) -> list[int]:
        rows = range(len(self.held)) if self.state_rows is None else self.state_rows
        return [x if 0 <= x < len(self.held) else -1 for x in rows]

    def options(self, device: str) -> Options:
        wide = torch.int64 if self.int64 else torch.int32
        given: Options = {
            name: None if (rows := getattr(self.tables, of)) is None
            else torch.tensor(rows, dtype=wide if of == "host" else torch.int32, device=device)
            for of, name in TABLES.items()
        }  # fmt: skip
        sizes = ("num_host_rows", "host_page_size", "hot_page_size", "first_page", "by_entry")
        given |= {name: getattr(self.tables, name) for name in sizes} | {"next_n": self.next_n}
        for name, dtype in (("row_to_request", wide), ("state_rows", torch.int32), ("entry_lens", wide)):
            if (values := getattr(self, name)) is not None:
                given[name] = torch.tensor(values, dtype=dtype, device=device)
        if self.num_valid_rows is not None:
            given["num_valid_rows"] = torch.tensor([self.num_valid_rows], dtype=torch.int32, device=device)
        return given | self.more


def check(case: Case, device: str) -> None:
    """Both forms against the specification: results, state, counters; nothing behind a count is written."""
    rows, k = case.entries.shape
    held, order = case.held.clone(), case.order.clone()
    want, hits, plan, counts = reference.resolve_hot_rows(
        case.entries, held, order, case.tables, requests=case.requests, states=case.states,
        next_n=case.next_n, lengths=case.entry_lens,
    )  # fmt: skip
    host, hot = torch.full((2, rows, k), POISON)
    for i, copies in enumerate(plan):
        for j, (source, target) in enumerate(copies):
            host[i, j], hot[i, j] = source, target
    loads = torch.tensor([len(copies) for copies in plan], dtype=torch.int32).reshape(rows)

    def same(got: Tensor, wanted: Tensor, name: str) -> None:
        assert torch.equal(got.cpu().long(), wanted.long()), name

    for out in (False, True):
        state = (case.held.clone().to(device), case.order.clone().to(device))
        counters = torch.tensor([5, 7], device=device)
        options = case.options(device) | {"counters": counters}
        if out:
            wide = torch.full((rows, k + 3), POISON, dtype=torch.int32, device=device)
            dtype = torch.int64 if case.int64 else torch.int32
            options["out_hot_rows"] = wide[:, :k]
            options["out_miss_host_rows"] = torch.full((rows, k), POISON, dtype=dtype, device=device)
            options["out_miss_hot_rows"] = torch.full((rows, k), POISON, dtype=torch.int32, device=device)
            options["out_miss_counts"] = torch.full((rows,), POISON, dtype=torch.int32, device=device)
            options["out_attention_rows"] = torch.full((rows, k), POISON, dtype=torch.int32, device=device)
            options["attention_page_stride"] = case.tables.hot_page_size + 3
            options["out_lens"] = torch.full((rows,), POISON, dtype=torch.int32, device=device)
            options["out_hit_rows"] = torch.full((rows, k), POISON, dtype=torch.int32, device=device)
        got = mla_fp8.resolve_hot_rows(case.entries.to(device), *state, **options)
        same(got[0], want, "hot_rows")
        same(got[1], host if out else host.where(host != POISON, -1), "miss_host_rows")
        same(got[2], hot if out else hot.where(hot != POISON, -1), "miss_hot_rows")
        same(got[3], loads, "miss_counts")
        same(state[0], held, "hot_entries")
        same(state[1], order, "hot_order")
        assert counters.tolist() == [5 + counts[0], 7 + counts[1]]
        if out:
            assert (wide[:, k:] == POISON).all()
            size = case.tables.hot_page_size
            apart = want // size * (size + 3) + want % size
            apart = apart.long().where((want >= 0) & (apart.long() >= 0), -1)
            same(options["out_attention_rows"], apart, "attention_rows")
            same(options["out_lens"], (want >= 0).sum(1).reshape(rows), "lens")
            same(options["out_hit_rows"], hits, "hit_rows")
    case.held, case.order = held, order
