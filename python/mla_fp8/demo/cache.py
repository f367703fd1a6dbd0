"""A paged cache in one layout, and attention through it: what a serving engine does with the ops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import (
    build_swa_token_ids,
    combine_topk_swa_indices,
    dequantize_kv,
    dequantize_kv_paged,
    quantize_kv,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_paged,
)
from ..layout import KV_LAYOUTS, KVLayout
from .model import AttentionInputs, Layer, Spec
from .pages import Batch, Pages


@dataclass(frozen=True)
class Reach:
    """The cached window tokens that a batch can attend to, the same in every layer."""

    swa_slots: Tensor  # [num_rows] int32, all requests in a row
    gather_lens: Tensor  # [num_requests] int32
    offsets: Tensor  # [num_requests + 1] int32

    @staticmethod
    def of(batch: Batch, pages: Pages) -> "Reach":
        zeros = torch.zeros_like(batch.query_start_loc)
        if not pages.window:
            return Reach(swa_slots=zeros[:0], gather_lens=zeros[1:], offsets=zeros)
        reach = [n + pages.window - 1 for n in batch.extend_lens]
        slots, _, gather_lens, offsets = build_swa_token_ids(
            batch.seq_lens,
            batch.query_start_loc.diff(),
            torch.arange(len(reach), device=zeros.device),
            pages.req_to_token,
            pages.full_to_swa,
            window_size=pages.window,
            capacity=sum(map(min, batch.seq_lens_host, reach)),
        )
        return Reach(slots, gather_lens, offsets)


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
        self.layout = KV_LAYOUTS[layout]
        self.scale: Tensor | None = None  # one per layer, where the layout wants it

        def store(num_pages: int, page_size: int) -> Store:
            data = self.layout.empty(num_pages, page_size, pages.page_table.device)
            return Store(self.layout, page_size, data.fill_(0xFF))  # never written: NaN

        self.swa = store(pages.num_swa_pages, pages.page_tokens) if layer.window else None
        self.entries = store(pages.num_pages, pages.page_size(layer.ratio)) if layer.ratio else None

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

    def prefill(self, inputs: AttentionInputs, batch: Batch, reach: Reach) -> Tensor:
        """Dequantises everything that the batch can reach into a bf16 workspace, attends to its rows."""
        ratio = self.layer.ratio
        num_entries = sum(n // ratio for n in batch.seq_lens_host) if ratio else 0
        entry_lens = batch.seq_lens // ratio if ratio else torch.zeros_like(batch.seq_lens)
        entry_offsets = (entry_lens.cumsum(0) - entry_lens).int()
        workspace = inputs.q.new_empty(num_entries + len(reach.swa_slots), self.layout.head_dim_qk)
        if self.entries:
            dequantize_kv_paged(
                self.entries.data,
                self.pages.page_table,
                entry_lens,
                entry_lens,
                entry_offsets,
                layout=self.layout,
                page_size=self.entries.page_size,
                scale=self.scale,
                out=workspace[:num_entries],
            )
        if self.swa:
            self.swa.read(reach.swa_slots, self.scale, out=workspace[num_entries:])
        indices, lens = combine_topk_swa_indices(
            inputs.topk_indices,
            batch.query_start_loc,
            batch.seq_lens,
            reach.gather_lens,
            entry_offsets,
            reach.offsets[:-1] + num_entries,
            window_size=self.layer.window,
            compress_ratio=max(ratio, 1),
            topk=inputs.topk_indices.shape[1],
        )
        out, _, _ = sparse_prefill(
            inputs.q,
            workspace,
            indices,
            sm_scale=self.spec.sm_scale,
            attn_sink=inputs.attn_sink,
            topk_length=lens,
            backend="native",
        )
        return out

    def prefill_paged(self, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """Attends to the pages directly: no workspace."""
        return self._attend(sparse_prefill_paged, inputs, batch)

    def decode(self, inputs: AttentionInputs, batch: Batch) -> Tensor:
        return self._attend(sparse_decode, inputs, batch)

    def _attend(self, op: Callable[..., tuple[Tensor, ...]], inputs: AttentionInputs, batch: Batch) -> Tensor:
        (main, indices), (extra, extra_indices) = self._scopes(inputs, batch)
        return op(
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
            scale=self.scale,
            backend="native",
        )[0]

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
