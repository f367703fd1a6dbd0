"""A layer in float64 on the data that the projections gave: no cache, no format, none of the ops."""

import torch
from torch import Tensor

from ...index_layout import INDEX_DIM
from . import around, exact
from .around import Near
from .layer import Prepared
from .model import Constants, Layer, Projected, Spec
from .pages import Batch

BLOCK_SIZE = 8  # of entries, that an indexer publishes


class LayerTruth:
    """The rows of one layer, plainly: latents of all requests, then entries of all requests."""

    def __init__(
        self, layer: Layer, spec: Spec, constants: Constants, num_requests: int, max_len: int,
        before: "list[LayerTruth]",
    ) -> None:  # fmt: skip
        self.layer, self.spec, self.constants, self.max_len = layer, spec, constants, max_len
        self.source = None if layer.source is None else before[layer.source]
        self.max_entries = layer.max_entries(max_len)
        self.max_blocks = -(-self.max_entries // BLOCK_SIZE)
        self.first_entry = num_requests * max_len if layer.window else 0
        device = constants.cos.device
        self.block_of = torch.arange(self.max_entries, device=device) // BLOCK_SIZE
        shape = (self.first_entry + num_requests * self.max_entries, spec.latent.head_dim_qk)
        self.rows = torch.full(shape, float("nan"), dtype=torch.float64, device=device)
        self.scores = torch.zeros(num_requests, max_len, layer.score_width, device=device)
        self.index_keys = torch.zeros(num_requests, self.max_entries, INDEX_DIM, device=device)  # as stored
        if self.source:
            self.index_keys = self.source.index_keys

    def append(self, x: Projected, batch: Batch) -> tuple[Near, Near, Near | None]:
        """q, the rows that the batch adds (those of the window first), and the latents of new entries."""
        c, closing = self.constants, batch.closing(max(self.layer.ratio, 1))
        rows, latents = around.latent(x.kv, c, batch.pos), None
        if self.layer.compresses:
            self.scores[batch.request, batch.pos] = x.kv_score
            before = torch.arange(1 - self.layer.pooled_tokens, 1, device=batch.pos.device)
            at = (batch.pos[closing, None] + before).clamp_min(0)
            scores = self.scores[batch.request[closing, None], at]
            pooled = around.pooled(scores, batch.pos[closing], c, self.layer)
            latents, entries = around.entry(pooled, batch.pos[closing], c, self.layer)
            rows = Near(*(torch.cat(pair) for pair in zip(_pair(rows), _pair(entries), strict=True)))
        self.rows[self.new_rows(batch)] = rows.value
        if self.source:
            self.rows[self.first_entry :] = self.source.rows[self.first_entry :]
        return around.query(x.q, c, batch.pos, norm_q=self.spec.norm_q), rows, latents

    def new_rows(self, batch: Batch) -> Tensor:
        """Where the rows of :meth:`append` are."""
        found = []
        if self.layer.window:
            found.append(batch.request * self.max_len + batch.pos)
        if self.layer.writes_entries:
            closing = batch.closing(self.layer.ratio)
            entry = batch.pos[closing] // self.layer.ratio
            found.append(self.first_entry + batch.request[closing] * self.max_entries + entry)
        return torch.cat(found)

    def attended(self, positions: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, window + num_selected] rows, -1 = none. Plain indexing, without the ops under test."""
        request = batch.request[:, None]
        pos = batch.pos[:, None] - torch.arange(self.layer.window, device=batch.pos.device)
        window = torch.where(pos >= 0, request * self.max_len + pos, -1)
        entries = self.first_entry + request * self.max_entries + positions
        return torch.cat([window, torch.where(positions >= 0, entries, -1)], -1)

    def attention(self, q: Tensor, attended: Tensor, batch: Batch) -> Tensor:
        """What the layer hands to its output projection."""
        out = exact.attention(q, self.rows, attended, self.constants.attn_sink, self.spec.sm_scale)
        return self.turned_back(out, batch).value

    def turned_back(self, out: Tensor, batch: Batch) -> Near:
        if not self.spec.turns_back:
            return Near.exactly(out)
        return around.rotated(Near.exactly(out), self.constants, batch.pos, inverse=True)

    def selection_ratio(self, x: Projected, prepared: Prepared, batch: Batch) -> Tensor:
        """[num_tokens] how much better an entry was left out than one that was taken, of what sums may err.

        Infinite where the number of entries is wrong, or one is of the future or there twice. The same of
        blocks where the layer publishes them; where it selects in blocks, of their entries.
        """
        q = prepared.index_q.double() * prepared.index_q_scale[..., None]
        ratios = torch.zeros(len(batch.pos), dtype=torch.float64, device=q.device)
        seen = (batch.pos + 1) // self.layer.ratio
        for r in range(len(batch.seq_lens)):
            mine = (batch.request == r).nonzero().squeeze(1)
            if not self.max_entries or not len(mine):
                continue
            logits = around.index_logits(q[mine], x.index_weights[mine], self.index_keys[r])
            n = seen[mine, None]
            past = torch.arange(self.max_entries, device=q.device) < n
            slack = torch.where(past, logits.error, 0).amax(-1)
            if self.source:
                assert prepared.blocks is not None
                past &= _counts(prepared.blocks[mine], self.max_blocks).gt(0)[:, self.block_of]
            ratios[mine] = _best(prepared.positions[mine], logits.value, past, slack, self.layer.topk)
            if self.layer.num_blocks:
                assert prepared.blocks is not None
                visible = logits.value.masked_fill(~past, float("-inf"))
                best = visible.new_full((len(mine), self.max_blocks), float("-inf"))
                best.scatter_reduce_(1, self.block_of.expand(len(mine), -1), visible, "amax")
                newest = (n - 1) // BLOCK_SIZE
                best.scatter_(1, newest.clamp_min(0), float("inf"))  # it comes first
                some = torch.arange(self.max_blocks, device=q.device) <= newest
                blocks = _best(prepared.blocks[mine], best, some, slack, self.layer.num_blocks)
                ratios[mine] = torch.maximum(ratios[mine], blocks)
        return ratios


def _counts(chosen: Tensor, width: int) -> Tensor:
    """``[rows, width]``: how often a row has each number. -1 is none."""
    counts = torch.zeros(len(chosen), width, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, chosen.long().clamp_min(0), (chosen >= 0).long())


def _best(chosen: Tensor, scores: Tensor, allowed: Tensor, slack: Tensor, most: int) -> Tensor:
    """``[rows]``: how far ``chosen`` is from the ``most`` best that are allowed, of twice ``slack``."""
    counts = _counts(chosen, scores.shape[1])
    taken = counts > 0
    right = (counts.sum(-1) == allowed.sum(-1).clamp_max(most)) & (counts <= allowed).all(-1)
    # The least that was taken, at its best, against the best that was not, at its worst.
    least = torch.where(taken, scores, float("inf")).amin(-1)
    left = torch.where(allowed & ~taken, scores, float("-inf")).amax(-1)
    better = ((left - least) / (2 * slack)).clamp_min(0).nan_to_num(nan=float("inf"))
    better = better.where((left > float("-inf")) & (least < float("inf")), 0)
    return better.where(right, float("inf"))


def _pair(x: Near) -> tuple[Tensor, Tensor]:
    return x.value, x.error
