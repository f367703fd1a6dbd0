"""Sparse decode against FlashMLA, in one process.

    PYTHONPATH=python:.peers python benchmarks/bench_sparse_decode.py [--real-rows | --batch-invariant]

FlashMLA takes 64 or 128 heads: fewer are padded; `flash_mla` is its kernels alone, `flash_mla, pad, slice`
with the copies that a user pays. Errors are relative to float64 over the dequantised rows. Indices are
uniform over a million rows, and launches rotate over several sets of them, so rows come from HBM.

`--real-rows` runs only what engines send (row_kinds.py), and compares every result with FlashMLA's, without
FlashMLA the first rows with float64. A CPU runs these cases only if they are asked for.

`--batch-invariant` runs only what that costs: beside the plan that a call takes without it, whose results it
compares.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from flashmla import find_flash_mla
from row_kinds import ROW_KINDS, RowKind, expected_keys, selected, windows
from summary import markdown
from table import OURS

import mla_fp8
from harness import Work, arguments, relative_difference, run
from mla_fp8 import KV_LAYOUTS, reference

flash_mla = find_flash_mla()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NUM_SLOTS = 1 << (20 if CUDA else 12)
BYTES_PER_GRAPH, MAX_SETS = 400e6, 48 if CUDA else 1  # of rows: several times the L2
HEADS = (8, 16, 32, 64, 128)
REAL_BATCHES = (32, 128) if CUDA else (4,)
PROMPT_ROWS = 4096 if CUDA else 4
REAL_ROUNDS, INVARIANT_ROUNDS = 7, 5
RATIO = 4  # tokens of an entry of V4
PEERS = {"dsv41": "dsv4", "dsv32_nope": "dsv32"}  # what engines on Hopper keep such a model's rows in


@dataclass(frozen=True)
class Shape:
    layout: str
    num_q_heads: int
    batch: int
    topk: int
    page_size: int = 64
    extra_topk: int = 0
    extra_page_size: int = 64
    s_q: int = 1
    rows: RowKind | None = None  # None: every index valid, and uniform in both caches
    extra_layout: str = ""  # that of the first cache

    @property
    def peer(self) -> "Shape | None":
        """The same in layouts that others read, if this one is in none."""
        if self.layout not in PEERS and not self.extra_layout:
            return None
        return replace(self, layout=PEERS.get(self.layout, self.layout), extra_layout="")

    @property
    def label(self) -> str:
        layouts = f"{self.layout}+{self.extra_layout}" if self.extra_layout else self.layout
        extra = f"+{self.extra_topk}" if self.extra_topk else ""
        pages = f" p{self.extra_page_size}" if self.extra_page_size != 64 else ""
        s_q = f" s_q{self.s_q}" if self.s_q > 1 else ""
        rows = f": {self.rows.label}" if self.rows else ""
        return f"{layouts} {self.topk}{extra}{pages}{s_q} h{self.num_q_heads} b{self.batch}{rows}"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.s_q

    @property
    def keys(self) -> int:
        if self.rows is None:
            return self.num_tokens * (self.topk + self.extra_topk)
        if not self.extra_topk:
            return int(expected_keys(self.rows, self.num_tokens, self.topk, 1))
        window = expected_keys(replace(self.rows, holes=0.0), self.num_tokens, self.topk, 1)
        return int(window + expected_keys(self.rows, self.num_tokens, self.extra_topk, RATIO))

    @property
    def row_bytes(self) -> int:
        first, second = (
            KV_LAYOUTS[x].bytes_per_token for x in (self.layout, self.extra_layout or self.layout)
        )
        return self.keys * first + self.num_tokens * self.extra_topk * (second - first)

    @property
    def flops(self) -> int:
        layout = KV_LAYOUTS[self.layout]
        return 2 * self.keys * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v)


# Batches of engines whose work is no whole number of waves of CTAs.
BATCHES_BETWEEN = (44, 72, 144)


def shapes() -> Iterator[Shape]:
    for heads, batch in itertools.product(HEADS, (1, 8, 32, 64, 128, 256)):
        yield Shape("dsv32", heads, batch, 2048)
    for topk, heads, batch in itertools.product((512, 1024), HEADS, (32, 128, 256)):
        yield Shape("dsv4", heads, batch, 128, 256, topk)
    for heads, batch in itertools.product(HEADS, BATCHES_BETWEEN):
        yield Shape("dsv32", heads, batch, 2048)
        yield Shape("dsv4", heads, batch, 128, 256, 512)
    for heads in (8, 16, 32, 64):
        yield Shape("dsv4", heads, 128, 128, 256, 512, s_q=2)
        yield Shape("dsv4", heads, 128, 128, 256, 1024, extra_page_size=2)
    for heads, batch in itertools.product(HEADS, (1, 8, 32, 64, 128, 256)):
        yield Shape("dsv41", heads, batch, 128, 256, 512, extra_layout="dsv41_fp4")
        yield Shape("dsv32_nope", heads, batch, 2048)
    for heads, batch in itertools.product(HEADS, (32, 128)):
        yield Shape("dsv4", heads, batch, 128, 256, 512, extra_layout="dsv41_fp4")


def cpu_shapes() -> Iterator[Shape]:
    for batch, heads in itertools.product((1, 8), HEADS):
        yield Shape("dsv32", heads, batch, 2048)
        yield Shape("dsv4", heads, batch, 128, 256, 512)


def real_shapes() -> Iterator[Shape]:
    """Heads innermost: they share their indices."""
    widths = (("dsv32", 2048, 64, 0), ("dsv4", 128, 256, 512))
    for kind, (layout, topk, page_size, extra) in itertools.product(ROW_KINDS, widths):
        batches = REAL_BATCHES if kind.prompt_from is None else (PROMPT_ROWS,)
        for batch, heads in itertools.product(batches, HEADS):
            yield Shape(layout, heads, batch, topk, page_size, extra, s_q=kind.s_q, rows=kind)


def invariant_shapes() -> Iterator[Shape]:
    widths = (("dsv32", 2048, 64, 0), ("dsv4", 128, 256, 512), ("dsv4", 128, 256, 1024))
    batches = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    short = [kind for kind in ROW_KINDS if kind.label in ("context 256", "context 512", "50 % holes")]
    for kind, (layout, topk, page_size, extra) in itertools.product((None, *short), widths):
        for heads, batch in itertools.product(HEADS, batches if kind is None else (1, 8, 32, 128)):
            yield Shape(layout, heads, batch, topk, page_size, extra, rows=kind)
    for heads, batch in itertools.product(HEADS, (1, 8, 32, 128)):  # whose splits are fixed
        yield Shape("bf16", heads, batch, 2048)
        yield Shape("dsv41", heads, batch, 128, 256, 512, extra_layout="dsv41_fp4")


@functools.cache
def cache(layout_name: str, page_size: int) -> torch.Tensor:
    """A million random rows (fewer on a CPU), written by quantize_kv."""
    layout, part = KV_LAYOUTS[layout_name], min(NUM_SLOTS, 1 << 18)
    kv_cache = layout.empty(NUM_SLOTS // page_size, page_size, DEVICE).zero_()
    for first in range(0, NUM_SLOTS, part):
        latent = torch.randn(part, layout.head_dim_qk, device=DEVICE).bfloat16()
        slots = torch.arange(first, first + part, device=DEVICE)
        mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=page_size)
    return kv_cache


class Problem:
    def __init__(self, shape: Shape) -> None:
        self.shape, self.layout = shape, KV_LAYOUTS[shape.layout]
        self.num_sets = min(MAX_SETS, max(4, int(BYTES_PER_GRAPH / shape.row_bytes)))
        tokens, heads = shape.num_tokens, shape.num_q_heads
        self.q = torch.randn(self.num_sets, tokens, heads, self.layout.head_dim_qk, device=DEVICE).bfloat16()
        self.sm_scale = self.layout.head_dim_qk**-0.5
        self.main = cache(shape.layout, shape.page_size)
        self.sink = torch.randn(heads, device=DEVICE) if shape.extra_topk else None
        self.extra_layout = KV_LAYOUTS[shape.extra_layout or shape.layout]
        self.extra = cache(self.extra_layout.name, shape.extra_page_size) if shape.extra_topk else None
        self.indices, self.length = self._indices(shape.topk, window=shape.extra_topk > 0)
        self.extra_indices, self.extra_length = self._indices(shape.extra_topk, window=False)

    def _indices(self, topk: int, window: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind, size = self.shape.rows, (self.num_sets, self.shape.num_tokens, topk)
        if kind is None:
            return torch.randint(NUM_SLOTS, size, device=DEVICE, dtype=torch.int32), None
        if window:
            indices, valid = windows(kind, size, NUM_SLOTS, DEVICE)
        else:
            indices, valid = selected(kind, size, NUM_SLOTS, RATIO if self.shape.extra_topk else 1, DEVICE)
        return indices, valid if kind.lengths else None

    def native(self, i: int, batch_invariant: bool = False) -> torch.Tensor:
        extra = {}
        if self.extra is not None:
            extra = {
                "extra_kv_cache": self.extra,
                "extra_indices": self.extra_indices[i],
                "extra_topk_length": self.extra_length,
                "extra_page_size": self.shape.extra_page_size,
                "extra_layout": self.extra_layout,
            }
        return mla_fp8.sparse_decode(
            self.q[i], self.main, self.indices[i], layout=self.layout, page_size=self.shape.page_size,
            sm_scale=self.sm_scale, topk_length=self.length, attn_sink=self.sink,
            batch_invariant=batch_invariant, backend="native", **extra,
        )[0]  # fmt: skip

    def prepare_flash_mla(self) -> None:
        self.meta, _ = flash_mla.get_mla_metadata()
        self.padded_heads = 64 if self.shape.num_q_heads <= 64 else 128
        self.padded_q = [self._pad(self.q[i]) for i in range(self.num_sets)]
        sink = self.sink
        if sink is not None and len(sink) < self.padded_heads:
            sink = torch.full((self.padded_heads,), -float("inf"), device=DEVICE)
            sink[: len(self.sink)] = self.sink
        self.padded_sink = sink

    def _pad(self, q: torch.Tensor) -> torch.Tensor:
        if q.shape[1] == self.padded_heads:
            return q
        padded = q.new_zeros(len(q), self.padded_heads, q.shape[2])
        padded[:, : q.shape[1]] = q
        return padded

    def _flash_mla(self, q: torch.Tensor, i: int) -> torch.Tensor:
        s = self.shape
        per_request = (s.batch, s.s_q)
        extra = {}
        if self.extra is not None:  # it knows lengths in V4 only
            extra = {
                "extra_k_cache": self.layout.flash_mla_view(self.extra, s.extra_page_size),
                "extra_indices_in_kvcache": self.extra_indices[i].unflatten(0, per_request),
                "topk_length": self.length,
                "extra_topk_length": self.extra_length,
            }
        out, _ = flash_mla.flash_mla_with_kvcache(
            q.unflatten(0, per_request), self.layout.flash_mla_view(self.main, s.page_size), None, None, 512,
            self.meta, softmax_scale=self.sm_scale, is_fp8_kvcache=True,
            indices=self.indices[i].unflatten(0, per_request), attn_sink=self.padded_sink, **extra,
        )  # fmt: skip
        return out.flatten(0, 1)[:, : s.num_q_heads]

    def flash_mla_kernels(self, i: int) -> torch.Tensor:
        return self._flash_mla(self.padded_q[i], i)

    def flash_mla_padded(self, i: int) -> torch.Tensor:
        return self._flash_mla(self._pad(self.q[i]), i).contiguous()

    def error(self, out: torch.Tensor, num_tokens: int = 4) -> float:
        """Of set 0's first tokens, relative to float64 over the dequantised rows."""
        scopes = []
        for layout, kv_cache, indices, page_size in (
            (self.layout, self.main, self.indices, self.shape.page_size),
            (self.extra_layout, self.extra, self.extra_indices, self.shape.extra_page_size),
        ):
            if kv_cache is None:
                continue
            chosen = indices[0, :num_tokens]
            rows = dequantized(layout, kv_cache, chosen.flatten().clamp_min(0), page_size)
            at = torch.arange(len(rows), device=DEVICE, dtype=torch.int32).view_as(chosen)
            scopes.append((rows, at.where(chosen >= 0, -1), None))
        q = self.q[0, :num_tokens].double()
        exact, _, _ = reference.sparse_attention(q, scopes, sm_scale=self.sm_scale, attn_sink=self.sink)
        return ((out[:num_tokens].double() - exact).norm() / exact.norm()).item()


def dequantized(layout, kv_cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """float64 rows: code times scale, without rounding to bf16."""
    nope, scale, rope = layout.views(kv_cache, page_size)
    page, row = slots.long() // page_size, slots.long() % page_size
    scales = scale[page, row].float().double()[..., None]
    codes = nope.view(torch.uint8)[page, row].view(nope.dtype)
    tiles = reference.values_of(codes).double().unflatten(-1, (layout.num_tiles, -1)) * scales
    return torch.cat([tiles.flatten(-2), rope[page, row].double()], -1)


def peer_work(shape: Shape, problem: Problem, ours: list) -> Work:
    """Rows that others do not read: against the same model in theirs, by our kernels and by FlashMLA's."""
    peer = Problem(shape.peer)
    sets = range(min(problem.num_sets, peer.num_sets))
    made = Work(shape.label, ours, shape.row_bytes, shape.flops)
    made.errors = lambda: {OURS: problem.error(problem.native(0))}
    made.baselines[f"native, {shape.peer.layout}"] = [functools.partial(peer.native, i) for i in sets]
    if flash_mla is not None:
        peer.prepare_flash_mla()
        made.baselines[f"flash_mla, {shape.peer.layout}"] = [
            functools.partial(peer.flash_mla_kernels, i) for i in sets
        ]
    return made


def work(shape: Shape) -> Work:
    problem = Problem(shape)

    def rotating(launch):
        return [functools.partial(launch, i) for i in range(problem.num_sets)]

    if shape.peer is not None:
        return peer_work(shape, problem, rotating(problem.native))

    def errors() -> dict[str, float]:
        found = {OURS: problem.error(problem.native(0))}
        if flash_mla is not None:
            found["flash_mla"] = problem.error(problem.flash_mla_kernels(0))
        return found

    def difference() -> float:
        if flash_mla is None:
            return problem.error(problem.native(0))
        return relative_difference(problem.native(0), problem.flash_mla_kernels(0))

    made = Work(shape.label, rotating(problem.native), shape.row_bytes, shape.flops)
    if flash_mla is not None:
        problem.prepare_flash_mla()
        made.baselines["flash_mla"] = rotating(problem.flash_mla_kernels)
    if shape.rows is not None:
        made.difference = difference
        return made
    made.errors = errors
    if flash_mla is not None and shape.num_q_heads not in (64, 128):
        made.baselines["flash_mla, pad, slice"] = rotating(problem.flash_mla_padded)
    return made


def invariant_work(shape: Shape) -> Work:
    problem = Problem(shape)
    native = [functools.partial(problem.native, i) for i in range(problem.num_sets)]
    invariant = [functools.partial(launch, batch_invariant=True) for launch in native]
    made = Work(shape.label, native, shape.row_bytes, shape.flops, {"batch_invariant": invariant})
    made.difference = lambda: relative_difference(invariant[0](), native[0]())
    return made


if __name__ == "__main__":
    torch.manual_seed(0)
    options = arguments("sparse_decode", real_rows=True, batch_invariant=True)
    if options.batch_invariant:
        title = "sparse_decode_batch_invariant"
        run(title, invariant_shapes(), invariant_work, rounds=INVARIANT_ROUNDS, options=options)
        raise SystemExit
    if not options.real_rows:
        run("sparse_decode", shapes() if CUDA else cpu_shapes(), work, options=options)
    if CUDA or options.real_rows:
        title = "sparse_decode_real_rows"
        run(title, real_shapes(), work, rounds=REAL_ROUNDS, options=options, summary=markdown)
