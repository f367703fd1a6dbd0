"""Random chunks through SparsePrefillChunkCache: garbage lengths, tables that hold what none should."""

from typing import Any

import fuzz_oracle as oracle
import numpy as np
from fuzz_cases import Cache, Call, Random, from_bits, int32, queries, sink_of, sparse_check, tensor
from fuzz_formats import LAYOUTS, Array
from torch import Tensor

from mla_fp8 import LayerCaches, PagedCache, PrefillWorkspace, SparsePrefillChunkCache


def attend_to_chunk(
    *, q: Tensor, layout: str, entries: Tensor, entries_page_size: int, window: Tensor, window_page_size: int,
    compress_ratio: int, scale: Tensor | None, topk_indices: Tensor | None, sm_scale: float,
    attn_sink: Tensor | None, strategy: str, **chunk: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A chunk cache of one layer."""
    layer = LayerCaches(
        layout,
        compress_ratio,
        PagedCache(entries, entries_page_size) if compress_ratio else None,
        PagedCache(window, window_page_size) if chunk["window_size"] or not compress_ratio else None,
        scale,
    )
    cache = SparsePrefillChunkCache(PrefillWorkspace(q.shape[-1], "cpu"), **chunk)
    return cache.attend(q, layer, topk_indices, sm_scale=sm_scale, attn_sink=attn_sink, strategy=strategy)


def garbage(r: Random, host: list[int]) -> list[int]:
    """What a device may hold where the host knows these."""
    return [n if r.often() else x for n, x in zip(host, r.ints(len(host), 0, 30, 0.5), strict=True)]


def bounded(lengths: list[int], host: list[int]) -> list[int]:
    return [min(max(x, 0), n) for x, n in zip(lengths, host, strict=True)]


class Chunk:
    """The chunk's arguments by name, and which rows of its caches each token attends to."""

    def __init__(self, r: Random) -> None:
        layout = r.pick(*LAYOUTS)
        self.entries, self.window = Cache(r, layout, usable_pages=True), Cache(r, layout, usable_pages=True)
        if layout.scales == "layer":  # a power of two: a workspace of bf16 holds its rows as they are
            self.entries.scale = self.window.scale = 2.0**-6
        requests, self.ratio, self.window_size = r.pick(0, 1, 3), r.pick(0, 1, 2, 4), r.pick(0, 1, 5, 70)
        if not self.ratio and not self.window_size:
            self.window_size = 5
        seq = r.ints(requests, 0, 30)
        query = [min(m, n + r.pick(0, 0, 3)) for n, m in zip(seq, r.ints(requests, 0, 6), strict=True)]
        device_seq, device_query = (garbage(r, host) for host in (seq, query))
        self.seq, self.query = bounded(device_seq, seq), bounded(device_query, query)
        self.start = [0, *np.cumsum(self.query, dtype=int).tolist()]
        self.num_tokens, size = sum(query), self.entries.page_size
        max_pages, max_tokens, slots = r.pick(0, 1, 30 // size + 1), r.pick(0, 30), r.pick(0, 50)
        bad = self.entries.num_pages, *[1 << 31 >> k for k in range(1, 8)]
        self.table = [r.ints(max_pages, 0, self.entries.num_pages, 0.15, bad) for _ in range(requests)]
        self.pool = r.ints(requests, 0, 3, 0.1, (3,))
        self.tokens = [r.ints(max_tokens, 0, slots, 0.1, (slots,)) for _ in range(3)]
        self.swa = r.ints(slots, 0, self.window.num_slots, 0.1, (self.window.num_slots, 1 << 40, -(2**63)))
        self.pos = r.ints(self.num_tokens, 0, 30, 0.1) if r.often(0.3) else None
        topk = r.pick(None, 0, 3, 40)
        self.topk = None if topk is None else [r.ints(topk, 0, 30, 0.2) for _ in range(self.num_tokens)]
        self.arguments = {
            "seq_lens": int32(device_seq), "query_lens": int32(device_query),
            "page_table": int32(self.table).view(requests, max_pages),
            "req_pool_indices": tensor(np.array(self.pool, dtype=np.int64)),
            "req_to_token": int32(self.tokens).view(3, max_tokens),
            "full_to_swa": tensor(np.array(self.swa, dtype=np.int64)),
            "window_size": self.window_size, "seq_lens_host": seq, "query_lens_host": query,
            "query_pos": None if self.pos is None else int32(self.pos),
            "layout": layout.name, "compress_ratio": self.ratio, "scale": self.entries.options()["scale"],
            "entries": self.entries.tensor, "entries_page_size": size,
            "window": self.window.tensor, "window_page_size": self.window.page_size,
            "topk_indices": None if topk is None else int32(self.topk).view(self.num_tokens, topk),
        }  # fmt: skip

    def place(self, token: int) -> tuple[int, int] | None:
        """The request and the position of a token that has any."""
        r = oracle.find_request(self.start, token)
        if r is None:
            return None
        pos = self.seq[r] - self.start[r + 1] + token if self.pos is None else self.pos[token]
        return (r, pos) if 0 <= pos < self.seq[r] else None

    def rows_of_entries(self, token: int) -> Array:
        place, size, slots = self.place(token), self.entries.page_size, []
        if place and self.ratio:
            r, pos = place
            past = (pos + 1) // self.ratio
            chosen = range(past) if self.topk is None else self.topk[token][:past]
            for e in chosen:
                if 0 <= e < self.seq[r] // self.ratio and e // size < len(self.table[r]):
                    slots.append(
                        self.table[r][e // size] * size + e % size if self.table[r][e // size] >= 0 else -1
                    )
        return self.entries.rows([s for s in slots if 0 <= s < self.entries.num_slots])

    def rows_of_window(self, token: int) -> Array:
        place, slots = self.place(token), []
        if place and self.window_size:
            r, pos = place
            gathered = min(self.seq[r], self.query[r] + self.window_size - 1)
            for p in range(max(pos - self.window_size + 1, self.seq[r] - gathered, 0), pos + 1):
                if 0 <= self.pool[r] < 3 and p < len(self.tokens[0]):
                    slot = self.tokens[self.pool[r]][p]
                    slots.append(self.swa[slot] if 0 <= slot < len(self.swa) else -1)
        return self.window.rows([s for s in slots if 0 <= s < self.window.num_slots])


def chunk_cache(r: Random) -> Call:
    chunk, sm_scale = Chunk(r), r.pick(0.05, 0.002)
    q = queries(r, chunk.entries.layout.dim, chunk.num_tokens)
    sink = sink_of(r, q.shape[1])
    arguments = chunk.arguments | {
        "q": from_bits(q), "sm_scale": sm_scale, "attn_sink": None if sink is None else tensor(sink),
        "strategy": r.pick("auto", "whole", "selected", "direct"),
    }  # fmt: skip
    tokens = range(chunk.num_tokens)
    scopes = [[rows(t) for t in tokens] for rows in (chunk.rows_of_entries, chunk.rows_of_window)]
    return Call("chunk_cache", arguments, sparse_check(q, scopes, sm_scale, sink))
