"""What is run, and the run as in serving: every layout drives the whole model by itself."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...prefill import PrefillWorkspace, SparsePrefillChunkCache
from .layer import LayerOps, new_chunk
from .model import CONTEXT, Model, Projected, Spec
from .pages import Batch, Pages


@dataclass(frozen=True)
class Workload:
    """``prompt_lens[r]`` bytes of ``texts[r]`` are prefilled in chunks, the others decoded one by one."""

    spec: Spec
    texts: list[bytes]
    prompt_lens: list[int]
    chunk: int  # query tokens of one request in one prefill batch
    seed: int
    device: str

    @property
    def max_len(self) -> int:
        return max(map(len, self.texts))

    def batches(self) -> Iterator[tuple[str, Batch]]:
        """("prefill" or "decode", batch) until all texts are done."""
        done = [0] * len(self.texts)
        while done != [len(text) for text in self.texts]:
            extend = [min(self.chunk, prompt - n) for n, prompt in zip(done, self.prompt_lens, strict=True)]
            phase = "prefill" if any(n > 0 for n in extend) else "decode"
            if phase == "decode":
                extend = [min(1, len(text) - n) for n, text in zip(done, self.texts, strict=True)]
            yield phase, Batch.of(self.texts, done, extend, CONTEXT, self.device)
            done = [n + more for n, more in zip(done, extend, strict=True)]

    def pages(self) -> Pages:
        return Pages(
            num_requests=len(self.texts),
            max_len=self.max_len,
            max_extend=self.chunk,
            window=max(layer.window for layer in self.spec.layers),
            page_tokens=self.spec.page_tokens,
            device=self.device,
        )

    def workspace(self) -> PrefillWorkspace:
        return PrefillWorkspace(self.spec.latent.head_dim_qk, self.device)

    def model(self, dtype: torch.dtype) -> Model:
        return Model(self.spec, max_len=self.max_len, seed=self.seed, dtype=dtype, device=self.device)

    def layer_ops(self, layout: str, pages: Pages, model: Model, *, on_host: bool = False) -> list[LayerOps]:
        made: list[LayerOps] = []
        for layer, constants in zip(self.spec.layers, model.constants, strict=True):
            ops = LayerOps(layer, layout, self.spec, constants, pages, self.max_len, made, on_host=on_host)
            made.append(ops)
        return made


class Clock:
    """Seconds and tokens of each phase; waits for the device."""

    def __init__(self, device: str) -> None:
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.num_tokens = {"prefill": 0, "decode": 0}
        self._cuda = device != "cpu"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def tokens_per_second(self, phase: str) -> float:
        return self.num_tokens[phase] / self.seconds[phase] if self.seconds[phase] else 0.0


@dataclass
class FreeRun:
    """The outcome of one layout."""

    clock: Clock  # from projection to projection, all layers; not the model around them
    cache_bytes: int
    hidden: list[Tensor] = field(default_factory=list)  # final hidden state of each batch
    found_and_loaded: tuple[int, int] = (0, 0)  # entries that hot buffers held, and that they did not

    def same_bits(self, other: "FreeRun") -> bool:
        return all(torch.equal(x, y) for x, y in zip(self.hidden, other.hidden, strict=True))


@torch.inference_mode()
def run_free(workload: Workload, layout: str, *, on_host: bool = False) -> FreeRun:
    model, pages = workload.model(torch.float32), workload.pages()
    layers = workload.layer_ops(layout, pages, model, on_host=on_host)
    workspace = workload.workspace()
    clock = Clock(workload.device)
    result = FreeRun(clock, sum(layer.num_bytes for layer in layers))
    for phase, batch in workload.batches():
        pages.advance(batch)
        begin = clock.now()
        chunk = new_chunk(batch, pages, workspace) if phase == "prefill" else None
        clock.seconds[phase] += clock.now() - begin
        clock.num_tokens[phase] += len(batch.pos)

        def attend(
            layer: int,
            x: Projected,
            phase: str = phase,
            batch: Batch = batch,
            chunk: SparsePrefillChunkCache | None = chunk,
        ) -> Tensor:
            begin, ops = clock.now(), layers[layer]
            prepared = ops.prepare(x, batch)
            out = ops.prefill(prepared, chunk) if chunk else ops.decode(prepared, batch)
            out = ops.epilogue(out, batch)
            clock.seconds[phase] += clock.now() - begin
            return out

        result.hidden.append(model.forward(batch, attend))
    counters = [ops.hot.counters for ops in layers if ops.hot]
    if counters:
        found, loaded = torch.stack(counters).sum(0).tolist()
        result.found_and_loaded = (found, loaded)
    return result
