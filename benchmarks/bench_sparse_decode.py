"""Sparse decode against FlashMLA, in one process.

    PYTHONPATH=python:.peers python benchmarks/bench_sparse_decode.py

FlashMLA takes 64 or 128 heads: fewer are padded; `flash_mla` is its kernels alone, `flash_mla, pad, slice`
with the copies that a user pays. Errors are relative to float64 over the dequantised rows. Indices are
uniform over a million rows, and launches rotate over several sets of them, so rows come from HBM.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS, reference

try:
    import flash_mla
except ImportError:
    flash_mla = None

NUM_SLOTS = 1 << 20
BYTES_PER_GRAPH = 400e6  # of rows: several times the L2


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

    @property
    def name(self) -> str:
        extra = f"+{self.extra_topk}" if self.extra_topk else ""
        pages = f" p{self.extra_page_size}" if self.extra_page_size != 64 else ""
        s_q = f" s_q{self.s_q}" if self.s_q > 1 else ""
        return f"{self.layout} {self.topk}{extra}{pages}{s_q} h{self.num_q_heads} b{self.batch}"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.s_q

    @property
    def row_bytes(self) -> int:
        return self.num_tokens * (self.topk + self.extra_topk) * KV_LAYOUTS[self.layout].bytes_per_token

    @property
    def flops(self) -> int:
        keys = self.num_tokens * (self.topk + self.extra_topk)
        layout = KV_LAYOUTS[self.layout]
        return 2 * keys * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v)


def shapes() -> Iterator[Shape]:
    for heads, batch in itertools.product((8, 16, 32, 64, 128), (1, 8, 32, 64, 128, 256)):
        yield Shape("dsv32", heads, batch, 2048)
    for topk, heads, batch in itertools.product((512, 1024), (8, 16, 32, 64, 128), (32, 128, 256)):
        yield Shape("dsv4", heads, batch, 128, 256, topk)
    for heads in (8, 16, 32, 64):
        yield Shape("dsv4", heads, 128, 128, 256, 512, s_q=2)
        yield Shape("dsv4", heads, 128, 128, 256, 1024, extra_page_size=2)


_caches: dict = {}


def cache(layout_name: str, page_size: int) -> torch.Tensor:
    """A million random rows, written by quantize_kv."""
    key = layout_name, page_size
    if key not in _caches:
        layout = KV_LAYOUTS[layout_name]
        kv_cache = layout.empty(NUM_SLOTS // page_size, page_size, "cuda").zero_()
        for first in range(0, NUM_SLOTS, 1 << 18):
            latent = torch.randn(1 << 18, layout.head_dim_qk, device="cuda").bfloat16()
            slots = torch.arange(first, first + (1 << 18), device="cuda")
            mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=page_size)
        _caches[key] = kv_cache
    return _caches[key]


class Problem:
    def __init__(self, shape: Shape) -> None:
        self.shape, self.layout = shape, KV_LAYOUTS[shape.layout]
        self.num_sets = max(4, min(48, int(BYTES_PER_GRAPH / shape.row_bytes)))
        tokens, heads = shape.num_tokens, shape.num_q_heads
        self.q = torch.randn(self.num_sets, tokens, heads, self.layout.head_dim_qk, device="cuda").bfloat16()
        self.sm_scale = self.layout.head_dim_qk**-0.5
        self.main = cache(shape.layout, shape.page_size)
        self.indices = self._indices(shape.topk)
        self.sink = torch.randn(heads, device="cuda") if shape.extra_topk else None
        self.extra = cache(shape.layout, shape.extra_page_size) if shape.extra_topk else None
        self.extra_indices = self._indices(shape.extra_topk)

    def _indices(self, topk: int) -> torch.Tensor:
        size = (self.num_sets, self.shape.num_tokens, topk)
        return torch.randint(NUM_SLOTS, size, device="cuda", dtype=torch.int32)

    def native(self, i: int, batch_invariant: bool = False) -> torch.Tensor:
        extra = {}
        if self.extra is not None:
            extra = {
                "extra_kv_cache": self.extra,
                "extra_indices": self.extra_indices[i],
                "extra_page_size": self.shape.extra_page_size,
            }
        return mla_fp8.sparse_decode(
            self.q[i], self.main, self.indices[i], layout=self.layout, page_size=self.shape.page_size,
            sm_scale=self.sm_scale, attn_sink=self.sink, batch_invariant=batch_invariant, **extra,
        )[0]  # fmt: skip

    def prepare_flash_mla(self) -> None:
        self.meta, _ = flash_mla.get_mla_metadata()
        self.padded_heads = 64 if self.shape.num_q_heads <= 64 else 128
        self.padded_q = [self._pad(self.q[i]) for i in range(self.num_sets)]
        sink = self.sink
        if sink is not None and len(sink) < self.padded_heads:
            sink = torch.full((self.padded_heads,), -float("inf"), device="cuda")
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
        if self.extra is not None:
            extra = {
                "extra_k_cache": self.layout.flash_mla_view(self.extra, s.extra_page_size),
                "extra_indices_in_kvcache": self.extra_indices[i].unflatten(0, per_request),
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
        """Of set 0, relative to float64 over the dequantised rows."""
        scopes = []
        for kv_cache, indices, page_size in (
            (self.main, self.indices, self.shape.page_size),
            (self.extra, self.extra_indices, self.shape.extra_page_size),
        ):
            if kv_cache is None:
                continue
            chosen = indices[0, :num_tokens]
            rows = dequantized(self.layout, kv_cache, chosen.flatten(), page_size)
            at = torch.arange(len(rows), device="cuda", dtype=torch.int32).view_as(chosen)
            scopes.append((rows, at, None))
        q = self.q[0, :num_tokens].double()
        exact, _, _ = reference.sparse_attention(q, scopes, sm_scale=self.sm_scale, attn_sink=self.sink)
        return ((out[:num_tokens].double() - exact).norm() / exact.norm()).item()


def dequantized(layout, kv_cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """float64 rows: code times scale, without rounding to bf16."""
    nope, scale, rope = layout.views(kv_cache, page_size)
    page, row = slots.long() // page_size, slots.long() % page_size
    scales = scale[page, row].float().double()[..., None]
    tiles = nope[page, row].double().unflatten(-1, (layout.num_tiles, -1)) * scales
    return torch.cat([tiles.flatten(-2), rope[page, row].double()], -1)


def work(shape: Shape) -> Work:
    problem = Problem(shape)

    def rotating(launch):
        return [functools.partial(launch, i) for i in range(problem.num_sets)]

    baselines = {"batch_invariant": rotating(functools.partial(problem.native, batch_invariant=True))}
    if flash_mla is not None:
        problem.prepare_flash_mla()
        baselines["flash_mla"] = rotating(problem.flash_mla_kernels)
        if shape.num_q_heads not in (64, 128):
            baselines["flash_mla, pad, slice"] = rotating(problem.flash_mla_padded)

    def note() -> str:
        errors = f"error {problem.error(problem.native(0)):.2e}"
        if flash_mla is not None:
            errors += f", flash_mla {problem.error(problem.flash_mla_kernels(0)):.2e}"
        return errors

    return Work(
        shape.name, rotating(problem.native), shape.row_bytes, shape.flops, baselines=baselines, note=note
    )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("bench_sparse_decode needs an NVIDIA GPU; bench_sparse_attention runs on a CPU too")
        raise SystemExit(0)
    torch.manual_seed(0)
    run("sparse_decode", (work(shape) for shape in shapes()))
