"""A layer between its projections, on the ops alone, over paged caches in one layout: what an engine does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import (
    INDEX_LAYOUTS,
    LayerCaches,
    PagedCache,
    PrefillWorkspace,
    SparsePrefillChunkCache,
    compress_kv,
    dequantize_kv,
    index_topk,
    index_topk_blocks,
    inverse_rope,
    qk_norm_rope_insert,
    quantize_index_k,
    sparse_decode,
    topk_to_slots,
)
from ...compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from ...layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout
from .hot import HotBuffer
from .model import EPS, Constants, Layer, Projected, Spec
from .pages import Batch, Pages

INDEX_LAYOUT = INDEX_LAYOUTS["index_fp8"]


def new_chunk(batch: Batch, pages: Pages, workspace: PrefillWorkspace) -> SparsePrefillChunkCache:
    """What all layers of a prefill batch share."""
    num_requests = len(batch.extend_lens)
    return SparsePrefillChunkCache(
        workspace,
        batch.seq_lens,
        batch.query_start_loc.diff(),
        pages.page_table,
        torch.arange(num_requests, device=batch.seq_lens.device),
        pages.req_to_token,
        pages.full_to_swa,
        window_size=pages.window,
        seq_lens_host=batch.seq_lens_host,
        query_lens_host=batch.extend_lens,
        query_start_loc=batch.query_start_loc,
    )


@dataclass(frozen=True)
class Store:
    """One paged cache."""

    layout: KVLayout
    page_size: int
    data: Tensor

    def read(self, slots: Tensor, scale: Tensor | None) -> Tensor:
        return dequantize_kv(self.data, slots, layout=self.layout, page_size=self.page_size, scale=scale)


@dataclass(frozen=True)
class Written:
    """Rows that a batch has stored: their cache, their slots, the tokens that they are of."""

    store: Store
    slots: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Prepared:
    """What attention is called with, once the prologue, the compressor and the indexer have run."""

    q: Tensor  # [num_tokens, num_q_heads, head_dim_qk] bf16: normed where the model does so, and rotated
    window: Written | None
    entries: Written | None
    latent: Tensor  # [num_tokens, 512] bf16: the compressor's rows before RoPE, of tokens that close one
    index_q: Tensor  # [num_tokens, INDEX_HEADS, INDEX_DIM] e4m3
    index_q_scale: Tensor  # [num_tokens, INDEX_HEADS]
    positions: Tensor  # [num_tokens, num_selected] int32: entries of the own request, then -1
    slots: Tensor  # [num_tokens, num_selected] int32: the same in the cache of entries
    blocks: Tensor | None  # [num_tokens, num_blocks] int32: that a layer published, or chose in


class LayerOps:
    """The caches of a layer, latents of the window (SWA) and entries, and its ops from q and kv on.

    ``before`` has the layers before this one, whose caches of entries it may share.
    """

    def __init__(
        self,
        layer: Layer,
        layout: str,
        spec: Spec,
        constants: Constants,
        pages: Pages,
        max_len: int,
        before: "list[LayerOps]",
        *,
        on_host: bool = False,
    ) -> None:
        self.layer, self.spec, self.constants, self.pages = layer, spec, constants, pages
        self.source = None if layer.source is None else before[layer.source]
        self.blocks: Tensor | None = None  # of this batch
        first, _, second = layout.partition("+")  # of the window, and of the entries where it is another
        self.layout, self.entries_layout = KV_LAYOUTS[first], KV_LAYOUTS[second or first]
        self.scale: Tensor | None = None  # one per layer, where the layout wants it
        self.max_len, device = max_len, pages.page_table.device

        def store(layout: KVLayout, num_pages: int, page_size: int) -> Store:
            data = layout.empty(num_pages, page_size, device)
            return Store(layout, page_size, data.fill_(0xFF))  # never written: NaN

        self.swa = store(self.layout, pages.num_swa_pages, pages.page_tokens) if layer.window else None
        self.entries, self.index, self.state = None, None, None
        if self.source:
            self.entries, self.index = self.source.entries, self.source.index
        elif layer.ratio:
            page_size = pages.page_size(layer.ratio)
            self.entries = store(self.entries_layout, pages.num_pages, page_size)
            if layer.topk:
                self.index = INDEX_LAYOUT.empty(pages.num_pages, page_size, device).fill_(0xFF)
        self.hot: HotBuffer | None = None  # where chosen entries are decoded from, if they lie on the host
        if on_host and self.entries and self.index is not None:
            self.hot = HotBuffer(self.entries_layout, self.entries.page_size, pages, layer.num_hot(max_len))
            if self.source and self.source.hot:
                self.hot.host = self.source.hot.host
        if layer.compresses and layer.ratio > 1:
            shape = (len(pages.page_table), layer.pooled_tokens, layer.score_width)
            self.state = torch.full(shape, float("nan"), device=device)

    @property
    def num_bytes(self) -> int:
        """Of the device while it decodes."""
        own = (self.swa, self.hot or (None if self.source else self.entries))
        return sum(store.data.nbytes for store in own if store)

    def prepare(self, x: Projected, batch: Batch) -> Prepared:
        """Prologue, compressor, indexer: stores what the batch adds, and finds what its tokens attend to."""
        if self.layout.needs_scale and self.scale is None:
            # calibrated on the first batch, with one bit of headroom for those to come
            assert self.layout.fp8_dtype
            largest = self._normed(x).abs().amax()
            self.scale = (2 * largest / torch.finfo(self.layout.fp8_dtype).max).reshape(1)
        q, window, entries = self._prologue(x, batch)
        latent = x.kv.new_empty(len(x.kv), HEAD_DIM_V)
        if self.layer.compresses:
            entries = self._compress(x, batch, latent)
        if self.hot and self.entries and entries:
            self.hot.store(self.entries.data, entries.slots)
        index_q, index_q_scale = _quantize_index_q(x.index_q)
        positions = self._select(x, batch, latent, index_q, index_q_scale)
        slots = positions
        if self.entries:
            slots, _ = topk_to_slots(
                positions, self.pages.page_table, page_size=self.entries.page_size,
                row_to_request=batch.request.int(),
            )  # fmt: skip
        return Prepared(q, window, entries, latent, index_q, index_q_scale, positions, slots, self.blocks)

    def _normed(self, x: Projected) -> Tensor:
        """Plain PyTorch: how large the rows become."""
        kv = x.kv.float()
        latent = kv[:, :HEAD_DIM_V] * torch.rsqrt(kv[:, :HEAD_DIM_V].square().mean(-1, keepdim=True) + EPS)
        return torch.cat([latent * self.constants.kv_weight, kv[:, HEAD_DIM_V:]], -1)

    def _prologue(self, x: Projected, batch: Batch) -> tuple[Tensor, Written | None, Written | None]:
        """Norm, RoPE, quantise and insert; the latents go to the window or, without one, to the entries."""
        c, tokens = self.constants, torch.arange(len(batch.pos), device=batch.pos.device)
        if self.swa:
            to = Written(self.swa, self.pages.swa_slots(batch), tokens)
        else:
            assert self.entries
            to = Written(self.entries, self.pages.entry_slots(batch, 1), tokens)
        q = qk_norm_rope_insert(
            x.q, x.kv[:, :HEAD_DIM_V], c.kv_weight, c.cos, c.sin, batch.pos, to.slots, to.store.data,
            layout=to.store.layout, page_size=to.store.page_size, eps=EPS, norm_q=self.spec.norm_q,
            k_rope=x.kv[:, HEAD_DIM_V:] if x.kv.shape[1] > HEAD_DIM_V else None, scale=self.scale,
        )  # fmt: skip
        return (q, to, None) if self.swa else (q, None, to)

    def _compress(self, x: Projected, batch: Batch, out_latent: Tensor) -> Written:
        assert self.entries
        c, ratio, slots = self.constants, self.layer.ratio, self.pages.entry_slots(batch, self.layer.ratio)
        state_slots = torch.arange(len(batch.seq_lens), device=slots.device)
        compress_kv(
            x.kv_score, batch.query_start_loc, batch.start_pos, self.state, state_slots, c.ape,
            c.entry_weight, c.cos, c.sin, slots, self.entries.data,
            ratio=ratio, layout=self.entries.layout, page_size=self.entries.page_size, eps=EPS,
            scale=self.scale, out_latent=out_latent,
        )  # fmt: skip
        closing = batch.closing(ratio)
        return Written(self.entries, slots[closing], closing)

    def _select(
        self, x: Projected, batch: Batch, latent: Tensor, index_q: Tensor, index_q_scale: Tensor
    ) -> Tensor:
        """[num_tokens, num_selected] int32 entries of each token's past: the best, or without topk all.

        With an indexer there is a column at least, of -1 before there is an entry.
        """
        ratio, width = self.layer.ratio, self.layer.num_selected(self.max_len)
        if self.index is None:
            entries = torch.arange(width, device=batch.pos.device)
            seen = ((batch.pos + 1) // max(ratio, 1))[:, None]
            return torch.where(entries < seen, entries, -1).int()
        closing, page_size = batch.closing(ratio), self.pages.page_size(ratio)
        if self.layer.writes_entries:
            slots, keys = self.pages.entry_slots(batch, ratio)[closing], self.index_keys(x, latent, closing)
            quantize_index_k(keys, slots, self.index, layout=INDEX_LAYOUT, page_size=page_size)
        inputs = (index_q, x.index_weights, self.index, self.pages.page_table, batch.seq_lens)
        options: dict[str, Any] = {
            "layout": INDEX_LAYOUT, "page_size": page_size, "topk": max(width, 1), "q_scale": index_q_scale,
            "query_start_loc": batch.query_start_loc, "compress_ratio": ratio,
        }  # fmt: skip
        if self.layer.num_blocks:
            positions, _, _, self.blocks = index_topk_blocks(
                *inputs, **options, num_blocks=self.layer.num_blocks
            )
            return positions
        if self.source:
            self.blocks = self.source.blocks
            options["candidate_blocks"] = self.blocks
        positions, _, _ = index_topk(*inputs, **options)
        return positions

    def index_keys(self, x: Projected, latent: Tensor, closing: Tensor) -> Tensor:
        """[n, INDEX_DIM] bf16: a projection of the compressor's latents, or of the tokens."""
        if not self.layer.compresses:
            return x.index_k
        return (latent[closing].float() @ self.constants.index_k).bfloat16()

    def prefill(self, x: Prepared, chunk: SparsePrefillChunkCache, strategy: str = "auto") -> Tensor:
        entries, window = (
            PagedCache(store.data, store.page_size) if store else None for store in (self.entries, self.swa)
        )
        out, _, _ = chunk.attend(
            x.q,
            LayerCaches(self.layout, self.layer.ratio, entries, window, self.scale, self.entries_layout),
            x.positions if self.layer.topk else None,
            sm_scale=self.spec.sm_scale,
            attn_sink=self.constants.attn_sink,
            strategy=strategy,
            backend="native",
        )
        return out

    def decode(self, x: Prepared, batch: Batch) -> Tensor:
        (main, indices), (extra, extra_indices) = self._scopes(x, batch)
        out, _ = sparse_decode(
            x.q,
            main.data,
            indices,
            layout=main.layout,
            page_size=main.page_size,
            sm_scale=self.spec.sm_scale,
            attn_sink=self.constants.attn_sink,
            extra_kv_cache=extra.data if extra else None,
            extra_indices=extra_indices,
            extra_page_size=extra.page_size if extra else None,
            extra_layout=extra.layout if extra else None,
            scale=self.scale,
            backend="native",
        )
        return out

    def decode_like_flash_mla(self, x: Prepared, batch: Batch) -> Tensor:
        """The same by FlashMLA's call, for the layouts that FlashMLA has."""
        (main, indices), (extra, extra_indices) = self._scopes(x, batch)
        out, _ = flash_mla_with_kvcache(
            x.q[:, None],
            self.layout.flash_mla_view(main.data, main.page_size),
            None,
            None,
            self.layout.head_dim_v,
            get_mla_metadata()[0],
            softmax_scale=self.spec.sm_scale,
            is_fp8_kvcache=True,
            indices=indices[:, None],
            attn_sink=self.constants.attn_sink,
            extra_k_cache=self.layout.flash_mla_view(extra.data, extra.page_size) if extra else None,
            extra_indices_in_kvcache=None if extra_indices is None else extra_indices[:, None],
        )
        return out[:, 0]

    def epilogue(self, out: Tensor, batch: Batch) -> Tensor:
        """``out`` with the keys' positions taken out again, in place, where V has them."""
        if not self.spec.turns_back:
            return out
        return inverse_rope(out, self.constants.cos, self.constants.sin, batch.pos, out=out)

    def _scopes(
        self, x: Prepared, batch: Batch
    ) -> tuple[tuple[Store, Tensor], tuple[Store | None, Tensor | None]]:
        """(cache, slots) of the first scope and, if the layer has both caches, of the second."""
        scopes = []
        if self.swa:
            scopes.append((self.swa, self.pages.window_slots(batch)))
        if self.entries and self.hot:
            self.entries.data.fill_(0xFF)  # nobody reads it any more
            store = Store(self.entries.layout, self.hot.num_hot, self.hot.data)
            scopes.append((store, self.hot.load(x.positions, batch.request)))
        elif self.entries:
            scopes.append((self.entries, x.slots))
        return scopes[0], scopes[1] if len(scopes) > 1 else (None, None)


def _quantize_index_q(q: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: e4m3 and a scale per head, which index_topk multiplies into the weights."""
    scale = q.abs().amax(-1).clamp_min(1e-4) / 448
    return (q / scale[..., None]).to(torch.float8_e4m3fn), scale
