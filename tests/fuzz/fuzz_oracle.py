"""What each op has to give, by loops in float64 and Python's integers: from the docs, not the code."""

from dataclasses import dataclass

import numpy as np
from fuzz_formats import Array

INT_MAX = 2**31 - 1


@dataclass
class Attended:
    """One row of attention, and how far a kernel may be from it."""

    out: Array  # [heads, dim of v]
    max_logits: Array  # [heads]
    lse: Array
    out_error: float
    lse_error: float


def attend(q: Array, k: Array, v: Array, sm_scale: float, sink: Array | None, cap: float = 0.0) -> Attended:
    """``q`` [heads, dim]; ``k`` and ``v`` [keys, heads or 1, dim]."""
    heads = len(q)
    if len(k) == 0:
        empty = np.full(heads, -np.inf)
        return Attended(np.zeros((heads, v.shape[-1])), empty, empty, 0.0, 0.0)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.broadcast_to(x, (len(x), heads, x.shape[-1])) for x in (k, v))
    logits = sm_scale * np.einsum("hd,nhd->hn", q, k)
    size = abs(sm_scale) * np.einsum("hd,nhd->hn", np.abs(q), np.abs(k)).max()  # what float32 sums over
    if cap:
        logits = cap * np.tanh(logits / cap)
    top = logits.max(1)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(1)
    lse = top + np.log(total)
    with np.errstate(over="ignore"):
        with_sink = total if sink is None else total + np.exp(sink - top)
    out = np.einsum("hn,nhd->hd", weights / with_sink[:, None], v)
    drift = size * 2.0**-19 + 2.0**-18  # of a logit
    largest = np.abs(v).max()
    return Attended(out, top, lse, (2.0**-6 + 4 * drift) * largest, drift * 2 + np.abs(lse).max() * 2.0**-20)


def find_request(start: list[int], token: int) -> int | None:
    """The last request that starts at or before the token, if it holds it."""
    target = token + start[0]
    begun = [r for r in range(len(start) - 1) if start[r] <= target]
    return begun[-1] if begun and target < start[begun[-1] + 1] else None


def listed_slots(indices: list[int], length: int | None, num_slots: int) -> list[int]:
    counted = indices if length is None else indices[: max(length, 0)]
    return [i for i in counted if 0 <= i < num_slots]


def window_slots(
    table: list[list[int]],
    start: list[int],
    lens: list[int],
    token: int,
    num_slots: int,
    page_size: int,
    window: int,
) -> list[int]:
    r = find_request(start, token)
    if r is None:
        return []
    position = lens[r] - (start[r + 1] - start[0] - token)
    found = []
    for p in range(max(position - window + 1, 0), min(position + 1, len(table[r]) * page_size)):
        page = table[r][p // page_size]
        slot = page * page_size + p % page_size
        if page >= 0 and slot < num_slots:
            found.append(slot)
    return found


def entry_slots(
    table: list[list[int]], start: list[int], length: int, token: int, num_slots: int, page_size: int
) -> list[int]:
    r = find_request(start, token)
    entries = range(0 if r is None else max(min(length, len(table[r]) * page_size), 0))
    slots = [table[r][e // page_size] * page_size + e % page_size for e in entries]
    return [slot for slot in slots if 0 <= slot < num_slots]


def ragged_slots(
    indptr: list[int], pages: list[int], last: int, request: int, hidden: int, num_pages: int, page_size: int
) -> list[tuple[int, int]]:
    """(page, row) of the keys of a request but the ``hidden`` last ones."""
    begin, end = (min(max(x, 0), len(pages)) for x in indptr[request : request + 2])
    own = pages[begin:end]
    num_keys = (len(own) - 1) * page_size + min(max(last, 0), page_size) - hidden
    slots = [(page, row) for page in own for row in range(page_size)][: max(num_keys, 0)]
    return [(page, row) for page, row in slots if 0 <= page < num_pages]


def paged_rows(
    table: list[list[int]],
    lens: list[int],
    gather: list[int],
    offsets: list[int],
    num_rows: int,
    page_size: int,
) -> dict[int, int]:
    """Which slot goes to which row; -1: zeros."""
    written = {}
    for r, pages in enumerate(table):
        for row in range(max(offsets[r], 0), min(offsets[r] + max(gather[r], 0), num_rows)):
            position = lens[r] - gather[r] + row - offsets[r]
            known = 0 <= position < len(pages) * page_size and pages[position // page_size] >= 0
            written[row] = pages[position // page_size] * page_size + position % page_size if known else -1
    return written


def swa_ids(
    lens: list[int], extend: list[int], pool: list[int], tokens: list[list[int]], swa: list[int], window: int,
    capacity: int,
) -> tuple[list[int], list[int], list[int], list[int]]:  # fmt: skip
    ids, first, gathered, offsets = [], [], [], [0]
    for r, n in enumerate(lens):
        gather = max(min(n, extend[r] + window - 1), 0)
        for p in range(n - gather, n - gather + min(gather, capacity - len(ids))):
            row = tokens[pool[r]] if 0 <= pool[r] < len(tokens) else []
            slot = row[p] if 0 <= p < len(row) else -1
            found = swa[slot] if 0 <= slot < len(swa) else -1
            ids.append(found if 0 <= found <= INT_MAX else -1)
        first.append(n - gather)
        gathered.append(gather)
        offsets.append(offsets[-1] + gather)
    return ids + [-1] * (capacity - len(ids)), first, gathered, [min(x, INT_MAX) for x in offsets]


def combined_row(
    token: int,
    entries: list[int],
    start: list[int],
    lens: list[int],
    gather: list[int],
    entry_base: list[int],
    window_base: list[int],
    window: int,
    ratio: int,
    topk: int,
    position: int | None,
    entry_lens: list[int] | None,
) -> tuple[list[int], int]:
    """(the columns that count, holes among them as -1; how many)."""
    r = find_request(start, token)
    if r is None:
        return [], 0
    pos = lens[r] - (start[r + 1] - start[0] - token) if position is None else position
    if not 0 <= pos < lens[r]:
        return [], 0
    limit = INT_MAX + 1 if entry_lens is None else entry_lens[r]
    row = [e + entry_base[r] if 0 <= e < limit else -1 for e in entries[: min((pos + 1) // ratio, topk)]]
    first = lens[r] - max(gather[r], 0)
    row += [window_base[r] + p - first for p in range(max(pos - window + 1, first, 0), pos + 1)]
    return [x if 0 <= x <= INT_MAX else -1 for x in row], len(row)


def merged(a: Array, lse_a: Array, b: Array, lse_b: Array) -> tuple[Array, Array]:
    lse = np.logaddexp(lse_a, lse_b)
    out = np.zeros(a.shape)
    for side, own in ((a, lse_a), (b, lse_b)):
        gone = np.isneginf(own)[..., None]
        with np.errstate(invalid="ignore"):
            out += np.where(gone, 0.0, np.where(gone, 0.0, side) * np.exp(own - lse)[..., None])
    return out, lse
