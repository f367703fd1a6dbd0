"""A paged cache in one layout, and attention through it: what a serving engine does with the ops."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import (
    LayerCaches,
    PagedCache,
    PrefillWorkspace,
    SparsePrefillChunkCache,
    dequantize_kv,
    quantize_kv,
    sparse_decode,
)
from ...compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from ...layout import KV_LAYOUTS, KVLayout
from .model import AttentionInputs, Layer, Spec
from .pages import Batch, Pages


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

    def write(self, latent: Tensor, slots: Tensor, scale: Tensor | None) -> None:
        quantize_kv(latent, slots, self.data, layout=self.layout, page_size=self.page_size, scale=scale)

    def read(self, slots: Tensor, scale: Tensor | None, out: Tensor | None = None) -> Tensor:
        return dequantize_kv(
            self.data, slots, layout=self.layout, page_size=self.page_size, scale=scale, out=out
        )


Written = list[tuple[Store, Tensor, Tensor]]  # (cache, slots, values)


class LayerCache:
    """The caches of one layer: latents of the window (SWA), and compressed entries. Either may be missing."""

    def __init__(self, layer: Layer, layout: str, spec: Spec, pages: Pages) -> None:
        self.layer, self.spec, self.pages = layer, spec, pages
        first, _, second = layout.partition("+")  # of the window, and of the entries where it is another
        self.layout, self.entries_layout = KV_LAYOUTS[first], KV_LAYOUTS[second or first]
        self.scale: Tensor | None = None  # one per layer, where the layout wants it

        def store(layout: KVLayout, num_pages: int, page_size: int) -> Store:
            data = layout.empty(num_pages, page_size, pages.page_table.device)
            return Store(layout, page_size, data.fill_(0xFF))  # never written: NaN

        self.swa = store(self.layout, pages.num_swa_pages, pages.page_tokens) if layer.window else None
        self.entries = None
        if layer.ratio:
            self.entries = store(self.entries_layout, pages.num_pages, pages.page_size(layer.ratio))

    @property
    def num_bytes(self) -> int:
        return sum(store.data.nbytes for store in (self.swa, self.entries) if store)

    def append(self, inputs: AttentionInputs, batch: Batch) -> Written:
        """Stores the batch's latents, then the entries that it completes."""
        if self.layout.needs_scale and self.scale is None:
            # calibrated on the first batch, with one bit of headroom for those to come
            assert self.layout.fp8_dtype
            amax = torch.cat([inputs.latent, inputs.entries]).float().abs().amax()
            self.scale = (2 * amax / torch.finfo(self.layout.fp8_dtype).max).reshape(1)
        written: Written = []
        if self.swa:
            written.append((self.swa, self.pages.swa_slots(batch), inputs.latent))
        if self.entries:
            slots = self.pages.entry_slots(inputs.entry_request, inputs.entry_index, self.layer.ratio)
            written.append((self.entries, slots, inputs.entries))
        for store, slots, values in written:
            store.write(values, slots, self.scale)
        return written

    def prefill(
        self, inputs: AttentionInputs, chunk: SparsePrefillChunkCache, strategy: str = "auto"
    ) -> Tensor:
        entries, window = (
            PagedCache(store.data, store.page_size) if store else None for store in (self.entries, self.swa)
        )
        out, _, _ = chunk.attend(
            inputs.q,
            LayerCaches(self.layout, self.layer.ratio, entries, window, self.scale, self.entries_layout),
            inputs.topk_indices if self.layer.topk else None,
            sm_scale=self.spec.sm_scale,
            attn_sink=inputs.attn_sink,
            strategy=strategy,
            backend="native",
        )
        return out

    def decode(self, inputs: AttentionInputs, batch: Batch) -> Tensor:
        (main, indices), (extra, extra_indices) = self._scopes(inputs, batch)
        out, _ = sparse_decode(
            inputs.q,
            main.data,
            indices,
            layout=self.layout,
            page_size=main.page_size,
            sm_scale=self.spec.sm_scale,
            attn_sink=inputs.attn_sink,
            extra_kv_cache=extra.data if extra else None,
            extra_indices=extra_indices,
            extra_page_size=extra.page_size if extra else None,
            extra_layout=extra.layout if extra else None,
            scale=self.scale,
            backend="native",
        )
        return out

    def decode_like_flash_mla(self, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """The same by FlashMLA's call, for the layouts that FlashMLA has."""
        (main, indices), (extra, extra_indices) = self._scopes(inputs, batch)
        out, _ = flash_mla_with_kvcache(
            inputs.q[:, None],
            self.layout.flash_mla_view(main.data, main.page_size),
            None,
            None,
            self.layout.head_dim_v,
            get_mla_metadata()[0],
            softmax_scale=self.spec.sm_scale,
            is_fp8_kvcache=True,
            indices=indices[:, None],
            attn_sink=inputs.attn_sink,
            extra_k_cache=self.layout.flash_mla_view(extra.data, extra.page_size) if extra else None,
            extra_indices_in_kvcache=None if extra_indices is None else extra_indices[:, None],
        )
        return out[:, 0]

    def _scopes(
        self, inputs: AttentionInputs, batch: Batch
    ) -> tuple[tuple[Store, Tensor], tuple[Store | None, Tensor | None]]:
        """(cache, slots) of the first scope and, if the layer has both caches, of the second."""
        scopes = []
        if self.swa:
            scopes.append((self.swa, self.pages.window_slots(batch)))
        if self.entries:
            slots = self.pages.entry_slots(
                batch.request[:, None], inputs.topk_indices.long(), self.layer.ratio
            )
            scopes.append((self.entries, slots.int()))
        return scopes[0], scopes[1] if len(scopes) > 1 else (None, None)
