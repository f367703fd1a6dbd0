"""Whole lives of requests: what attention would read through a hot buffer is always the right row.

Requests come, share prefixes, grow, draft and take drafts back, leave; slots of host memory serve again. The
bytes that every entry should have are kept beside, and an LRU of plain lists says what is loaded when.
"""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mla_fp8
from mla_fp8 import KV_LAYOUTS

PAGE, HOT_PAGE, STATES, K = 4, 2, 3, 6
HOST_PAGES = 24
LAYOUT = KV_LAYOUTS["dsv4"]
NONE = -1


class Lru:
    """Of one request: what its slots hold, by last use; those of one step as they were before it."""

    def __init__(self, size: int) -> None:
        self.held: list[int | None] = [None] * size

    def use(self, keys: list[int]) -> list[int]:
        """Returns what has to be loaded, in order."""
        misses = [key for key in keys if key not in self.held]
        hits = [key for key in self.held if key in keys]
        others = [key for key in self.held if key not in keys]
        self.held = others[len(misses) :] + misses + hits
        return misses

    def forget(self, key: int) -> None:
        self.held = [None if held == key else held for held in self.held]


@dataclass
class Request:
    pages: list[int]
    length: int = 0


@dataclass
class World:
    """A server: its host cache, a hot buffer for STATES requests, what each host row should hold."""

    device: str
    drafts: int
    by_entry: bool
    requests: list[Request | None] = field(default_factory=lambda: [None] * STATES)

    def __post_init__(self) -> None:
        self.num_hot = self.drafts * K + 3
        hot_pages = -(-self.num_hot // HOT_PAGE)
        self.hot_table = torch.randperm(2 * STATES * hot_pages)[: STATES * hot_pages].view(STATES, -1).int()
        self.host = LAYOUT.empty(HOST_PAGES, PAGE, "cpu").random_(0, 256)
        if self.device == "cuda":
            self.host = self.host.pin_memory()
        self.hot = LAYOUT.empty(2 * STATES * hot_pages, HOT_PAGE, self.device).random_(0, 256)
        self.held = torch.full((STATES, self.num_hot), NONE, dtype=torch.int32, device=self.device)
        self.order = torch.arange(self.num_hot, dtype=torch.int16, device=self.device).repeat(STATES, 1)
        self.truth: dict[int, bytes] = {}
        self.lru = [Lru(self.num_hot) for _ in range(STATES)]
        self.counters = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.want = [0, 0]

    def bytes_of(self, cache: torch.Tensor, page_size: int, row: int) -> bytes:
        page, i = cache[row // page_size].cpu(), row % page_size
        tail = page_size * LAYOUT.token_stride + i * LAYOUT.scale_bytes
        values = page[i * LAYOUT.token_stride : (i + 1) * LAYOUT.token_stride]
        return bytes(values.numpy()) + bytes(page[tail : tail + LAYOUT.scale_bytes].numpy())

    def host_row(self, request: Request, entry: int) -> int:
        return request.pages[entry // PAGE] * PAGE + entry % PAGE

    def free_pages(self) -> list[int]:
        used = {page for request in self.requests if request for page in request.pages}
        return [page for page in range(HOST_PAGES) if page not in used]

    def write(self, state: int, entries: list[int]) -> None:
        """New rows: made on the GPU, stored to the host; every state forgets what lay there."""
        request = self.requests[state]
        rows = [self.host_row(request, e) for e in entries]
        staging = LAYOUT.empty(1, len(rows), self.device).random_(0, 256)
        at = torch.arange(len(rows), device=self.device)
        targets = torch.tensor(rows, dtype=torch.int64, device=self.device)
        mla_fp8.store_host_rows(
            staging, self.host, at, targets, layout=LAYOUT, host_page_size=PAGE, hot_page_size=len(rows)
        )
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.truth |= {row: self.bytes_of(staging, len(rows), i) for i, row in enumerate(rows)}
        if self.by_entry:
            mla_fp8.forget_rows(
                torch.tensor(entries, device=self.device), self.held,
                row_to_request=torch.full((len(entries),), state, dtype=torch.int32, device=self.device),
            )  # fmt: skip
        else:
            mla_fp8.forget_rows(targets, self.held)
        for i, lru in enumerate(self.lru):
            for key in entries if self.by_entry else rows:
                if not self.by_entry or i == state:
                    lru.forget(key)

    def come(self, state: int, length: int, prefix_of: int) -> None:
        """A request in place of another; by entry its state starts anew."""
        self.requests[state] = None
        other = self.requests[prefix_of]
        shared = other.pages[: other.length // PAGE][: length // PAGE] if other else []
        free = self.free_pages()
        request = Request(shared + free[: -(-(length + self.drafts) // PAGE) - len(shared)])
        request.length = min(length, len(request.pages) * PAGE - self.drafts)
        self.requests[state] = request if request.length > 0 else None
        if self.by_entry:
            self.held[state] = NONE
            self.lru[state] = Lru(self.num_hot)
            self.order[state] = torch.arange(self.num_hot, dtype=torch.int16)
        if request.length > len(shared) * PAGE:
            self.write(state, list(range(len(shared) * PAGE, request.length)))

    def decode(self, picks: list[int], accepted: int) -> None:
        """A step of all requests: drafts are written, each row chooses, some drafts are taken back."""
        n = self.drafts
        for state, request in enumerate(self.requests):
            if request:
                self.write(state, list(range(request.length, request.length + n)))
        entries = torch.full((STATES * n, K), NONE, dtype=torch.int32)
        for state, request in enumerate(self.requests):
            for i in range(n if request else 0):
                limit = request.length + i + 1
                some = {(pick * (state + 3) + pick // (i + 2)) % limit for pick in picks[: K - 1]} | {
                    limit - 1
                }
                entries[state * n + i, : len(some)] = torch.tensor(sorted(some))
        table = torch.full((STATES, HOST_PAGES), NONE, dtype=torch.int32)
        for state, request in enumerate(self.requests):
            if request:
                table[state, : len(request.pages)] = torch.tensor(request.pages)
        self.attend(entries, table)
        for state, request in enumerate(self.requests):
            if request:
                request.length += min(accepted, n)
                missing = -(-(request.length + n) // PAGE) - len(request.pages)
                free = self.free_pages()
                if missing > len(free):
                    self.requests[state] = None
                else:
                    request.pages += free[: max(missing, 0)]

    def attend(self, entries: torch.Tensor, table: torch.Tensor) -> None:
        rows, host_rows, hot_rows, counts = mla_fp8.resolve_hot_rows(
            entries.to(self.device), self.held, self.order, table.to(self.device),
            self.hot_table.to(self.device), num_host_rows=HOST_PAGES * PAGE, host_page_size=PAGE,
            hot_page_size=HOT_PAGE, next_n=self.drafts, by_entry=self.by_entry, counters=self.counters,
        )  # fmt: skip
        mla_fp8.copy_host_rows(
            self.host,
            self.hot,
            host_rows,
            hot_rows,
            counts,
            layout=LAYOUT,
            host_page_size=PAGE,
            hot_page_size=HOT_PAGE,
        )
        for state, request in enumerate(self.requests):
            own = slice(state * self.drafts, (state + 1) * self.drafts)
            chosen = [e for row in entries[own].tolist() for e in row if e >= 0]
            at = {e: self.host_row(request, e) for e in chosen}
            keys = list(dict.fromkeys(e if self.by_entry else at[e] for e in chosen))
            misses = self.lru[state].use(keys)
            loaded = [
                row
                for c, copies in zip(counts[own].tolist(), host_rows[own].tolist(), strict=True)
                for row in copies[:c]
            ]
            assert loaded == [at[key] if self.by_entry else key for key in misses]
            self.want = [self.want[0] + len(keys) - len(misses), self.want[1] + len(misses)]
            for row, places in zip(entries[own].tolist(), rows[own].tolist(), strict=True):
                for e, place in zip(row, places, strict=True):
                    if e < 0:
                        assert place == NONE
                    else:
                        assert self.bytes_of(self.hot, HOT_PAGE, place) == self.truth[at[e]]
        assert self.counters.tolist() == self.want


step = st.one_of(
    st.tuples(st.just("come"), st.integers(0, STATES - 1), st.integers(1, 20), st.integers(0, STATES - 1)),
    st.tuples(
        st.just("decode"), st.lists(st.integers(0, 999), min_size=1, max_size=K - 1), st.integers(0, 3)
    ),
)


@pytest.mark.op("resolve_hot_rows")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, min_size=1, max_size=14), drafts=st.integers(1, 3), by_entry=st.booleans())
def test_what_attention_reads_is_the_right_row(device, steps, drafts, by_entry):
    world = World(device, drafts, by_entry)
    world.come(0, 9, 1)
    for kind, *arguments in steps:
        getattr(world, kind)(*arguments)


@pytest.mark.op("resolve_hot_rows")
@pytest.mark.parametrize("by_entry", [False, True])
def test_a_long_life_evicts_and_comes_back(by_entry, device):
    """The property again at a fixed life that is known to evict, recycle and share."""
    world = World(device, 2, by_entry)
    world.come(0, 17, 1)
    world.come(1, 20, 0)
    world.decode([1, 7, 100, 31, 8], 2)
    for i in range(12):
        world.decode([i, 3 * i + 1, 17 * i, 5, 900 - i], i % 3)
        if i % 5 == 4:
            world.come(i % STATES, 13 + i % 4, (i + 1) % STATES)
    assert world.want[1] > 2 * world.num_hot and world.want[0] > 0
