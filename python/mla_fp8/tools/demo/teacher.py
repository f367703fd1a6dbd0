"""The float64 model; every layout attends to the same inputs in every layer, so errors have an address."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...prefill import STRATEGIES, SparsePrefillChunkCache
from . import exact
from .cache import LayerCache, Written, new_chunk
from .model import AttentionInputs
from .pages import Batch
from .workload import Workload

FLASH_MLA_LAYOUTS = ("dsv32", "dsv4")
CHECKED_PER_BATCH = 32  # query tokens whose float64 rounding bound is computed


@dataclass
class LayerError:
    """What one layout did in one layer, over all batches. The two ratios may not exceed 1."""

    storage_ratio: float = 0.0  # largest |cached - latent| / what the format allows
    kernel_ratio: float = 0.0  # largest |out - float64 over the cached values| / what bf16 and float32 allow
    path_difference: float = 0.0  # largest, between the ways of prefill, or the calls of decode
    max_error: float = 0.0  # largest |out - float64 over the unquantised values|
    sum_squared_error: float = 0.0
    sum_squared: float = 0.0

    num_values: int = 0

    @property
    def rms_error(self) -> float:
        """Relative to the root mean square of the output, as all errors are printed."""
        return self.relative((self.sum_squared_error / self.num_values) ** 0.5)

    def relative(self, error: float) -> float:
        return error / float((self.sum_squared / self.num_values) ** 0.5)

    @property
    def ok(self) -> bool:
        return self.storage_ratio <= 1.0 and self.kernel_ratio <= 1.0  # false for NaN

    def add(self, out: Tensor, truth: Tensor) -> None:
        error = out.double() - truth
        self.max_error = _larger(self.max_error, error.abs())
        self.sum_squared_error += float(error.square().sum())
        self.sum_squared += float(truth.square().sum())
        self.num_values += truth.numel()


class LayerRows:
    """The values of one layer as plain rows: latents of all requests, then entries of all requests."""

    def __init__(self, workload: Workload, layer: int) -> None:
        spec, num_requests = workload.spec, len(workload.texts)
        self.layer, self.max_len = spec.layers[layer], workload.max_len
        self.max_entries = self.layer.max_entries(self.max_len)
        self.first_entry = num_requests * self.max_len if self.layer.window else 0
        shape = (self.first_entry + num_requests * self.max_entries, spec.latent.head_dim_qk)
        self.exact = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=workload.device)
        self.cached = {layout: self.exact.clone() for layout in spec.layouts}  # as read back

    def attended(self, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """[num_tokens, window + topk] rows, -1 = none. Plain indexing, without the ops under test."""
        request = batch.request[:, None]
        pos = batch.pos[:, None] - torch.arange(self.layer.window, device=batch.pos.device)
        window = torch.where(pos >= 0, request * self.max_len + pos, -1)
        selected = inputs.topk_indices
        entries = torch.where(selected >= 0, self.first_entry + request * self.max_entries + selected, -1)
        return torch.cat([window, entries], -1)

    def new(self, inputs: AttentionInputs, batch: Batch) -> list[Tensor]:
        """The rows of what the batch stores, in the order of :meth:`LayerCache.append`."""
        rows = []
        if self.layer.window:
            rows.append(batch.request * self.max_len + batch.pos)
        if self.layer.ratio:
            rows.append(self.first_entry + inputs.entry_request * self.max_entries + inputs.entry_index)
        return rows


class TeacherForced:
    def __init__(self, workload: Workload) -> None:
        layers, layouts = range(len(workload.spec.layers)), workload.spec.layouts
        self.workload = workload
        self.errors = {(i, layout): LayerError() for i in layers for layout in layouts}
        self.hidden: list[Tensor] = []  # of the float64 model, each batch
        self._pages = workload.pages()
        self._caches = {layout: workload.caches(layout, self._pages) for layout in layouts}
        self._rows = [LayerRows(workload, i) for i in layers]

    @torch.inference_mode()
    def run(self, progress: Callable[[str], None]) -> None:
        model = self.workload.model(torch.float64)
        history = model.new_history(len(self.workload.texts), self.workload.max_len)
        workspace = self.workload.workspace()
        for phase, batch in self.workload.batches():
            progress(f"teacher-forced: {phase} to position {max(batch.seq_lens_host)}")
            self._pages.advance(batch)
            chunk = new_chunk(batch, self._pages, workspace) if phase == "prefill" else None

            def attend(
                layer: int,
                inputs: AttentionInputs,
                batch: Batch = batch,
                chunk: SparsePrefillChunkCache | None = chunk,
            ) -> Tensor:
                return self._attend(layer, inputs, batch, chunk)

            self.hidden.append(model.forward(batch, history, attend))

    def _attend(
        self, i: int, inputs: AttentionInputs, batch: Batch, chunk: SparsePrefillChunkCache | None
    ) -> Tensor:
        rows, spec = self._rows[i], self.workload.spec
        new_rows, attended = rows.new(inputs, batch), rows.attended(inputs, batch)
        some = slice(None, None, -(-len(inputs.q) // CHECKED_PER_BATCH))
        truth: Tensor | None = None
        for layout, caches in self._caches.items():
            cache, error = caches[i], self.errors[i, layout]
            written = cache.append(inputs, batch)
            _check_storage(error, cache, written, new_rows, rows.cached[layout])
            if truth is None:
                for row, (_, _, values) in zip(new_rows, written, strict=True):
                    rows.exact[row] = values
                truth = exact.attention(inputs.q, rows.exact, attended, inputs.attn_sink, spec.sm_scale)
            if chunk:
                outs = [cache.prefill(inputs, chunk, strategy) for strategy in STRATEGIES]
            else:
                outs = [cache.decode(inputs, batch)]
                if layout in FLASH_MLA_LAYOUTS:
                    outs.append(cache.decode_like_flash_mla(inputs, batch))
            for out in outs[1:]:
                error.path_difference = _larger(error.path_difference, (outs[0] - out).abs())
            error.add(outs[0], truth)
            checked = (inputs.q[some], rows.cached[layout], attended[some], inputs.attn_sink, spec.sm_scale)
            over_cache, bound = exact.attention_and_bound(*checked, bf16_rows=not cache.layout.needs_scale)
            for out in outs:
                distance = (out[some].double() - over_cache).abs()
                error.kernel_ratio = _larger(error.kernel_ratio, _ratio(distance, bound))
        assert truth is not None
        return truth


def _check_storage(
    error: LayerError, cache: LayerCache, written: Written, rows: list[Tensor], cached: Tensor
) -> None:
    """Reads back what was just written, keeps it in ``cached`` and holds it against the format's steps."""
    for (store, slots, values), row in zip(written, rows, strict=True):
        cached[row] = store.read(slots, cache.scale)
        distance = (cached[row].double() - values.double()).abs()
        allowed = exact.storage_bound(values, store.layout, cache.scale)
        error.storage_ratio = _larger(error.storage_ratio, _ratio(distance, allowed))


def _ratio(distance: Tensor, allowed: Tensor) -> Tensor:
    """Infinite where nothing is allowed and something is found."""
    return torch.where(distance == 0, 0.0, distance / allowed)


def _larger(value: float, other: Tensor) -> float:
    """The larger of the two; NaN wins, so that it cannot hide."""
    if not other.numel():
        return value
    largest = float(other.amax())
    return value if math.isnan(value) or largest <= value else largest
