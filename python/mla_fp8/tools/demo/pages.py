"""Batches of ragged requests, and where their tokens and entries live in the paged caches."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The next ``extend_lens[r]`` tokens of each request, all requests in a row (0 is legal)."""

    request: Tensor  # [num_tokens]
    pos: Tensor  # [num_tokens] position in its request
    context: Tensor  # [num_tokens, n] the byte at pos, the one before, ...; 0 before the start
    query_start_loc: Tensor  # [num_requests + 1] int32
    seq_lens: Tensor  # [num_requests] int32, this batch included
    extend_lens: list[int]
    seq_lens_host: list[int]

    @staticmethod
    def of(texts: list[bytes], done: list[int], extend: list[int], context: int, device: str) -> "Batch":
        spans = [range(begin, begin + n) for begin, n in zip(done, extend, strict=True)]
        tokens = [(r, p) for r, span in enumerate(spans) for p in span]
        history = [[texts[r][p - k] if p >= k else 0 for k in range(context)] for r, p in tokens]
        seq_lens = [span.stop for span in spans]
        return Batch(
            request=torch.tensor([r for r, _ in tokens], dtype=torch.int64, device=device),
            pos=torch.tensor([p for _, p in tokens], dtype=torch.int64, device=device),
            context=torch.tensor(history, dtype=torch.int64, device=device),
            query_start_loc=_offsets(extend, device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            extend_lens=extend,
            seq_lens_host=seq_lens,
        )

    @property
    def start_pos(self) -> Tensor:
        """[num_requests] int32: the position of each request's first token here."""
        return self.seq_lens - self.query_start_loc.diff()

    def closing(self, ratio: int) -> Tensor:
        """[n] the tokens that close an entry."""
        return ((self.pos + 1) % ratio == 0).nonzero().squeeze(1)


class Pages:
    """The page tables of all requests. Pages are dealt in random order, as after hours of serving.

    Every token has a full slot; a compressed cache keeps ``page_tokens / ratio`` entries in a page of the
    same number. The SWA cache is smaller: each request has a ring of pages, and ``full_to_swa`` says which
    SWA slot still holds a token.
    """

    def __init__(
        self, *, num_requests: int, max_len: int, max_extend: int, window: int, page_tokens: int, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def deal(pages_per_request: int) -> Tensor:
            pages = torch.randperm(num_requests * pages_per_request, generator=generator)
            return pages.view(num_requests, -1).to(device)

        self.page_tokens, self.window = page_tokens, window
        self.page_table = deal(-(-max_len // page_tokens)).int()
        self._ring = deal(-(-(max_extend + window) // page_tokens)) if window else deal(0)
        positions = torch.arange(max_len, device=device)
        self.req_to_token = self._slots(self.page_table.long(), positions, page_tokens).int()
        self.full_to_swa = torch.full((self.num_pages * page_tokens,), -1, dtype=torch.int64, device=device)

    @property
    def num_pages(self) -> int:
        return self.page_table.numel()

    @property
    def num_swa_pages(self) -> int:
        return self._ring.numel()

    def page_size(self, ratio: int) -> int:
        return self.page_tokens // ratio

    def advance(self, batch: Batch) -> None:
        """Gives the batch's tokens their SWA slots; the tokens that were there are gone."""
        if not self.window:
            return
        ring_tokens = self._ring.shape[1] * self.page_tokens
        old = batch.pos >= ring_tokens
        evicted = self.req_to_token[batch.request[old], batch.pos[old] - ring_tokens]
        self.full_to_swa[evicted.long()] = -1
        page = self._ring[batch.request, batch.pos // self.page_tokens % self._ring.shape[1]]
        full = self.req_to_token[batch.request, batch.pos].long()
        self.full_to_swa[full] = page * self.page_tokens + batch.pos % self.page_tokens

    def swa_slots(self, batch: Batch) -> Tensor:
        """[num_tokens] int64: where the batch's own latents go."""
        return self.full_to_swa[self.req_to_token[batch.request, batch.pos].long()]

    def window_slots(self, batch: Batch) -> Tensor:
        """[num_tokens, window] int32: the SWA slots that each token attends to, -1 before the start."""
        pos = batch.pos[:, None] - torch.arange(self.window, device=batch.pos.device)
        full = self.req_to_token[batch.request[:, None], pos.clamp_min(0)].long()
        return torch.where(pos >= 0, self.full_to_swa[full], -1).int()

    def entry_slots(self, batch: Batch, ratio: int) -> Tensor:
        """[num_tokens] int64: of the entry that each token belongs to, in a cache of entries."""
        entry, size = batch.pos // ratio, self.page_size(ratio)
        return self.page_table[batch.request, entry // size] * size + entry % size

    @staticmethod
    def _slots(pages: Tensor, positions: Tensor, size: int) -> Tensor:
        return pages[:, positions // size] * size + positions % size


def _offsets(lengths: list[int], device: str) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device, torch.int32)
