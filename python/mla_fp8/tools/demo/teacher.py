"""The float64 model; every layout attends to the same inputs in every layer, so errors have an address."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...prefill import STRATEGIES, SparsePrefillChunkCache
from . import around, exact
from .around import Near
from .layer import INDEX_LAYOUT, LayerOps, Prepared, Written, new_chunk
from .model import Projected
from .pages import Batch
from .truth import LayerTruth
from .workload import Workload

FLASH_MLA_LAYOUTS = ("dsv32", "dsv4")
CHECKED_PER_BATCH = 32  # query tokens whose float64 rounding bound of attention is computed
# The steps of a layer, in their order: what they are compared in.
STEPS = {
    "q": "normed and rotated query heads",
    "stored": "rows that are read back from the caches, the compressor's and index keys too",
    "index": "by how much the best entry that was left out is above the worst that was taken",
    "attention": "over what the caches hold",
    "epilogue": "the output, rotated back",
}


@dataclass
class LayerError:
    """What one layout did in one layer, over all batches. No ratio may exceed 1."""

    ratios: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))  # largest, by step
    path_difference: float = 0.0  # largest, between the ways of prefill, or the calls of decode
    max_error: float = 0.0  # largest |out - float64 of the whole layer|
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
        return all(ratio <= 1.0 for ratio in self.ratios.values())  # false for NaN

    def add(self, out: Tensor, truth: Tensor) -> None:
        error = out.double() - truth
        self.max_error = _larger(self.max_error, error.abs())
        self.sum_squared_error += float(error.square().sum())
        self.sum_squared += float(truth.square().sum())
        self.num_values += truth.numel()

    def check(self, step: str, distance: Tensor, allowed: Tensor) -> None:
        """Infinite where nothing is allowed and something is found."""
        ratio = torch.where(distance == 0, 0.0, distance / allowed)
        self.ratios[step] = _larger(self.ratios[step], ratio)

    def check_near(self, step: str, got: Tensor, want: Near) -> None:
        self.check(step, (got.double() - want.value).abs(), want.error)


@dataclass
class _Exact:
    """A layer's batch in float64: the same for all layouts."""

    q: Near
    rows: Near  # of the window, then entries
    latents: Near | None  # of the compressor
    new_rows: Tensor
    prepared: Prepared | None = None  # by the first layout: all must agree
    attended: Tensor | None = None
    index_ratio: Tensor | None = None
    out: Tensor | None = None


class TeacherForced:
    def __init__(self, workload: Workload) -> None:
        spec, model = workload.spec, workload.model(torch.float64)
        self.workload, self._model = workload, model
        self.errors = {(i, x): LayerError() for i in range(len(spec.layers)) for x in spec.layouts}
        self.hidden: list[Tensor] = []  # of the float64 model, each batch
        self._pages = workload.pages()
        self._layers = {x: workload.layer_ops(x, self._pages, model) for x in spec.layouts}
        sizes = len(workload.texts), workload.max_len
        self._truth: list[LayerTruth] = []
        for layer, constants in zip(spec.layers, model.constants, strict=True):
            self._truth.append(LayerTruth(layer, spec, constants, *sizes, self._truth))
        nothing = torch.full_like(self._truth[0].rows[:0], float("nan"), dtype=torch.bfloat16)
        self._cached = {  # as read back
            (i, x): nothing.new_full(self._truth[i].rows.shape, float("nan")) for i, x in self.errors
        }

    @torch.inference_mode()
    def run(self, progress: Callable[[str], None]) -> None:
        workspace = self.workload.workspace()
        for phase, batch in self.workload.batches():
            progress(f"{phase} to position {max(batch.seq_lens_host)}, float64 beside each layout")
            self._pages.advance(batch)
            chunk = new_chunk(batch, self._pages, workspace) if phase == "prefill" else None

            def attend(
                layer: int,
                x: Projected,
                batch: Batch = batch,
                chunk: SparsePrefillChunkCache | None = chunk,
            ) -> Tensor:
                want = _Exact(*self._truth[layer].append(x, batch), self._truth[layer].new_rows(batch))
                for layout in self._layers:
                    self._run(layer, layout, x, batch, chunk, want)
                assert want.out is not None
                return want.out

            self.hidden.append(self._model.forward(batch, attend))

    def _run(
        self,
        i: int,
        layout: str,
        x: Projected,
        batch: Batch,
        chunk: SparsePrefillChunkCache | None,
        want: _Exact,
    ) -> None:
        """One layout's layer, step by step beside float64. The first one completes ``want``."""
        ops, truth, error = self._layers[layout][i], self._truth[i], self.errors[i, layout]
        prepared = ops.prepare(x, batch)
        error.check_near("q", prepared.q, want.q)
        self._check_stored(i, layout, prepared, want)
        if ops.index is not None and truth.layer.writes_entries:
            self._check_index_keys(i, layout, x, prepared, batch)
        if want.prepared is None:
            want.prepared, want.attended = prepared, truth.attended(prepared.positions, batch)
            if ops.index is not None:
                want.index_ratio = truth.selection_ratio(x, prepared, batch)
            want.out = truth.attention(want.q.value, want.attended, batch)
        assert want.attended is not None and want.out is not None
        if want.index_ratio is not None:
            error.ratios["index"] = _larger(error.ratios["index"], want.index_ratio)
        chosen = zip(_chosen(prepared), _chosen(want.prepared), strict=True)
        if not all(torch.equal(a, b) for a, b in chosen):
            error.ratios["index"] = math.inf  # it looks at nothing of the layout's

        if chunk:
            outs = [ops.prefill(prepared, chunk, strategy) for strategy in STRATEGIES]
        else:
            outs = [ops.decode(prepared, batch)]
            if layout in FLASH_MLA_LAYOUTS:
                outs.append(ops.decode_like_flash_mla(prepared, batch))
        for out in outs[1:]:
            error.path_difference = _larger(error.path_difference, (outs[0] - out).abs())
        some = slice(None, None, -(-len(x.q) // CHECKED_PER_BATCH))
        checked = prepared.q[some], self._cached[i, layout], want.attended[some]
        over_cache, bound = exact.attention_and_bound(
            *checked, ops.constants.attn_sink, self.workload.spec.sm_scale,
            bf16_rows=not ops.layout.needs_scale,
        )  # fmt: skip
        for out in outs:
            error.check("attention", (out[some].double() - over_cache).abs(), bound)
        turned_back = truth.turned_back(outs[0], batch)
        out = ops.epilogue(outs[0].clone(), batch)
        error.check_near("epilogue", out, turned_back)
        error.add(out, want.out)

    def _check_stored(self, i: int, layout: str, prepared: Prepared, want: _Exact) -> None:
        """Reads back what was just written, keeps it, and holds it against float64 and the format's steps."""
        ops, error, cached = self._layers[layout][i], self.errors[i, layout], self._cached[i, layout]
        begin = 0
        for written in filter(None, (prepared.window, prepared.entries)):
            here = slice(begin, begin := begin + len(written.slots))
            cached[want.new_rows[here]] = values = _read(written, ops)
            distance = (values.double() - want.rows.value[here]).abs()
            error.check("stored", distance, want.rows[here].stored(written.store.layout, ops.scale))
        if ops.layer.source is not None:
            entries = slice(self._truth[i].first_entry, None)
            cached[entries] = self._cached[ops.layer.source, layout][entries]
        if want.latents is not None and prepared.entries:
            error.check_near("stored", prepared.latent[prepared.entries.tokens], want.latents)

    def _check_index_keys(self, i: int, layout: str, x: Projected, prepared: Prepared, batch: Batch) -> None:
        """The same of the index keys, which the truth then has as they are stored."""
        ops, truth = self._layers[layout][i], self._truth[i]
        assert ops.index is not None and prepared.entries
        slots, tokens, page_size = (
            prepared.entries.slots,
            prepared.entries.tokens,
            prepared.entries.store.page_size,
        )
        values, scales = INDEX_LAYOUT.views(ops.index, page_size)
        at = slots // page_size, slots % page_size
        stored, keys = values[at].float() * scales[at], ops.index_keys(x, prepared.latent, tokens)
        bound = around.index_key_bound(keys)
        self.errors[i, layout].check("stored", (stored.double() - keys.double()).abs(), bound)
        truth.index_keys[batch.request[tokens], batch.pos[tokens] // truth.layer.ratio] = stored


def _read(written: Written, ops: LayerOps) -> Tensor:
    return written.store.read(written.slots, ops.scale)


def _chosen(prepared: Prepared) -> list[Tensor]:
    return [prepared.positions] + ([] if prepared.blocks is None else [prepared.blocks])


def _larger(value: float, other: Tensor) -> float:
    """The larger of the two; NaN wins, so that it cannot hide."""
    if not other.numel():
        return value
    largest = float(other.amax())
    return value if math.isnan(value) or largest <= value else largest
