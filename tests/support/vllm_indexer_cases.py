"""An indexer's keys in vLLM's cache, queries, and what its rows want, from what was written.

All numbers are integers and no sum exceeds 2^24: logits are exact in float, in any order.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

DIM, SCALE_BYTES = 128, 4
GARBAGE = 0xFF  # of bytes that nobody wrote: NaN, as a key and as a scale
KEY, WEIGHT, SCALE, HEADS = 3, 8, 8, 16  # the largest of each
assert DIM * KEY * KEY * WEIGHT * SCALE * HEADS < 1 << 24


@dataclass
class Row:
    """A query's entries of the past: the first ``length`` of ``request``."""

    request: int
    length: int


class Keys:
    """Keys of requests of ``lens`` entries, and vLLM's cache of them: [pages, page_size, 132] bytes.

    A page holds its keys, then their scales; more lies between pages, as other layers' do in V4.
    """

    def __init__(self, lens: list[int], *, page_size: int = 64, gap: int = 64, device: str = "cpu") -> None:
        self.page_size, self.device = page_size, device
        self.keys = [_integers(KEY, n, DIM).to(torch.float8_e4m3fn).to(device) for n in lens]
        self.scales = [torch.randint(1, SCALE + 1, (n,)).float().to(device) for n in lens]
        counts = [-(-n // page_size) for n in lens]
        page_bytes = page_size * (DIM + SCALE_BYTES)
        whole = torch.full((sum(counts) + 1, page_bytes + gap), GARBAGE, dtype=torch.uint8, device=device)
        order = torch.randperm(len(whole)).tolist()
        self.table = torch.full((len(lens), max(counts) + 1), -7, dtype=torch.int32, device=device)
        for r, (keys, scales) in enumerate(zip(self.keys, self.scales, strict=True)):
            for column, begin in enumerate(range(0, len(keys), page_size)):
                page = order.pop()
                self.table[r, column] = page
                for x, at in ((keys, 0), (scales, page_size * DIM)):
                    part = x[begin : begin + page_size].view(torch.uint8).flatten()
                    whole[page, at : at + len(part)] = part
        shape = len(whole), page_size, DIM + SCALE_BYTES
        self.cache = whole.as_strided(shape, (whole.stride(0), shape[2], 1))

    def queries(self, rows: int) -> tuple[Tensor, Tensor]:
        q = _integers(KEY, rows, HEADS, DIM).to(torch.float8_e4m3fn)
        return q.to(self.device), _integers(WEIGHT, rows, HEADS).to(self.device)

    def logits(self, q: Tensor, weights: Tensor, row: Row) -> Tensor:
        """Of one query, float64 [length]."""
        keys = self.keys[row.request][: row.length].double()
        products = (q.double() @ keys.T).relu()
        return weights.double() @ products * self.scales[row.request][: row.length].double()

    def best_blocks(self, q: Tensor, weights: Tensor, row: Row, most: int) -> Tensor:
        """[most] int32: blocks of 8 entries that a query publishes, ascending, then -1."""
        scores = self.logits(q, weights, row)
        best = torch.nn.functional.pad(scores, (0, -row.length % 8), value=-torch.inf).view(-1, 8).amax(1)
        best[-1] = torch.inf  # the newest
        blocks = best.sort(descending=True, stable=True).indices[:most].sort().values.int()
        return torch.nn.functional.pad(blocks, (0, most - len(blocks)), value=-1)

    def best_in(self, blocks: Tensor, q: Tensor, weights: Tensor, row: Row, topk: int) -> Tensor:
        """[topk] int32: the best entries of those blocks, ascending, then -1."""
        inside = torch.isin(torch.arange(row.length, device=blocks.device) // 8, blocks)
        scores = self.logits(q, weights, row).masked_fill(~inside, -torch.inf)
        most = min(topk, int(inside.sum()))
        best = scores.sort(descending=True, stable=True).indices[:most].sort().values.int()
        return torch.nn.functional.pad(best, (0, topk - most), value=-1)

    def gather(self, cache: Tensor, values: Tensor, scales: Tensor, table: Tensor, starts: Tensor) -> None:
        """vLLM's cp_gather_indexer_k_quant_cache: the requests of ``table`` one after another."""
        for pages, (begin, end) in zip(table, itertools.pairwise(starts.tolist()), strict=True):
            at = torch.arange(end - begin, device=cache.device)
            page = pages[at // self.page_size].long()
            flat = cache.as_strided((len(cache), cache.shape[1] * cache.shape[2]), (cache.stride(0), 1))
            slot = at % self.page_size
            first = slot[:, None] * DIM + torch.arange(DIM, device=cache.device)
            last = self.page_size * DIM + slot[:, None] * SCALE_BYTES
            last = last + torch.arange(SCALE_BYTES, device=cache.device)
            values[begin:end] = flat[page[:, None], first].view(values.dtype)
            scales[begin:end] = flat[page[:, None], last].view(scales.dtype)

    def assert_chosen(self, got: Tensor, q: Tensor, weights: Tensor, rows: list[Row], topk: int) -> None:
        """``got`` [rows, topk]: of each row exactly its best entries, ascending, then -1.

        Of equal ones the first, which vLLM leaves open.
        """
        assert got.shape == (len(rows), topk) and got.dtype is torch.int32
        for r, row in enumerate(rows):
            best = self.logits(q[r], weights[r], row).sort(descending=True, stable=True).indices[:topk]
            want = best.sort().values.tolist() + [-1] * (topk - len(best))
            assert got[r].tolist() == want, f"row {r}"


def _integers(most: int, *shape: int) -> Tensor:
    return torch.randint(-most, most + 1, shape).float()
