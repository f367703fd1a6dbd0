"""Sparse prefill against FlashMLA, in one process, and whole layers against Triton kernels around FlashMLA.

    PYTHONPATH=python:.peers python benchmarks/bench_sparse_prefill.py

`sparse_prefill_paged` (V3.2) and `sparse_prefill_window` (V4) read FP8 pages (or bf16 ones: `bf16_512`),
FlashMLA a ready workspace of bf16 rows. It takes 64 or 128 heads: `flash_mla` is its kernel alone, other
numbers of heads padded before the clock starts, `flash_mla, pad, slice` with the copies of Q and output
that a user then pays. Top-k entries are uniform over `rows` entries, windows are the last 128 tokens.
`layer` cases add what leads there: Triton kernels dequantise FlashMLA's workspace and combine its indices,
its heads are padded and sliced; ours reads the caches, or goes through a workspace, too (`layer bf16`).
Errors are relative to float64 over the dequantised rows.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bench_sparse_decode import dequantized

import mla_fp8
from harness import Work, load_triton_baselines, run
from mla_fp8 import KV_LAYOUTS, reference

try:
    import flash_mla
except ImportError:
    flash_mla = None

WINDOW, WINDOW_PAGE, PAGE, RATIO = 128, 256, 64, 4
NUM_SETS = 3


@dataclass(frozen=True)
class Shape:
    layout: str
    num_q_heads: int
    num_tokens: int
    topk: int
    window: int
    rows: int  # that the top-k entries choose among
    bf16: bool = False  # from a workspace instead of pages
    layer: bool = False

    @property
    def name(self) -> str:
        kind = ("layer " if self.layer else "") + ("bf16 " if self.bf16 else "")
        window = f"+{self.window}" if self.window else ""
        size = f" {self.rows >> 10}K" if self.topk else ""
        return f"{kind}{self.layout} {self.topk}{window}{size} h{self.num_q_heads} t{self.num_tokens}"

    @property
    def keys(self) -> int:
        return self.num_tokens * (self.topk + self.window)

    @property
    def flops(self) -> int:
        layout = KV_LAYOUTS[self.layout]
        return 2 * self.keys * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v)

    @property
    def num_bytes(self) -> int:
        """Each byte once: the caches, Q and the output."""
        layout = KV_LAYOUTS[self.layout]
        tokens = self.num_tokens * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v) * 2
        rows = (self.rows if self.topk else 0) + (self.num_tokens + WINDOW - 1 if self.window else 0)
        return tokens + rows * (layout.head_dim_qk * 2 if self.bf16 else layout.bytes_per_token)


def shapes() -> Iterator[Shape]:
    heads = (8, 16, 32, 64)
    for h, rows in itertools.product(heads, (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 4096, 2048, 0, rows)
        yield Shape("dsv4", h, 4096, 512, WINDOW, rows)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows)
        yield Shape("dsv4", h, 4096, 1024, WINDOW, rows)
    for h in heads:
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0)
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0, bf16=True)
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0, bf16=True, layer=True)
    for h in (16, 32, 64, 128):
        yield Shape("dsv32", h, 256, 2048, 0, 128 << 10)
        yield Shape("dsv4", h, 256, 1024, WINDOW, 128 << 10)
    for h in (8, 16, 32, 64):
        yield Shape("dsv4", h, 4096, 512, WINDOW, 64 << 10, bf16=True)
    for h in (16, 32, 64, 128):
        yield Shape("bf16_512", h, 4096, 512, WINDOW, 64 << 10)
    for rows in (8 << 10, 64 << 10):
        yield Shape("dsv4", 64, 4096, 512, 0, rows, bf16=True)
        yield Shape("dsv4", 128, 4096, 1024, 0, rows, bf16=True)
    for rows in (32 << 10, 128 << 10):
        yield Shape("dsv32", 64, 4096, 2048, 0, rows, bf16=True)
        yield Shape("dsv32", 128, 4096, 2048, 0, rows, bf16=True)
    for h, rows in itertools.product((8, 16, 64), (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 8192, 2048, 0, rows, layer=True)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows // 4, layer=True)
    for h, rows in itertools.product((32, 64), (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 8192, 2048, 0, rows, bf16=True, layer=True)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows // 4, bf16=True, layer=True)
    for h, bf16 in itertools.product((16, 32, 64, 128), (False, True)):
        if not (bf16 and h == 16):
            yield Shape("dsv32", h, 256, 2048, 0, 128 << 10, bf16=bf16, layer=True)
            yield Shape("dsv4", h, 256, 1024, WINDOW, 32 << 10, bf16=bf16, layer=True)


@functools.cache
def cache(layout_name: str, page_size: int, rows: int) -> torch.Tensor:
    layout = KV_LAYOUTS[layout_name]
    num_pages = -(-rows // page_size)
    kv_cache = layout.empty(num_pages, page_size, "cuda").zero_()
    latent = torch.randn(num_pages * page_size, layout.head_dim_qk, device="cuda").bfloat16()
    slots = torch.arange(len(latent), device="cuda")
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=page_size)
    return kv_cache


class Problem:
    """One request whose last `num_tokens` tokens are queries."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layout = shape, KV_LAYOUTS[shape.layout]
        tokens, heads, dim = shape.num_tokens, shape.num_q_heads, self.layout.head_dim_qk
        self.q = torch.randn(NUM_SETS, tokens, heads, dim, device="cuda").bfloat16()
        self.sink = torch.randn(heads, device="cuda") if shape.window else None
        self.sm_scale = dim**-0.5
        self.gathered = tokens + WINDOW - 1  # tokens that the windows reach
        size = (NUM_SETS, tokens, shape.topk)
        self.topk_indices = torch.randint(max(shape.rows, 1), size, device="cuda", dtype=torch.int32)
        # The window of token t: tokens t .. t + 127 of those gathered.
        first = torch.arange(tokens, device="cuda", dtype=torch.int32)[:, None]
        self.windows = first + torch.arange(shape.window, device="cuda", dtype=torch.int32)
        pages = torch.arange(-(-self.gathered // WINDOW_PAGE), dtype=torch.int32, device="cuda")[None]
        geometry = ([0, tokens], [self.gathered])  # query_start_loc, seq_lens
        self.window_geometry = (pages, *(torch.tensor(x, dtype=torch.int32, device="cuda") for x in geometry))
        self.row_table = torch.arange(self.gathered, dtype=torch.int32, device="cuda")[None]
        self.window_cache = cache(shape.layout, WINDOW_PAGE, self.gathered) if shape.window else None
        self.topk_cache = cache(shape.layout, PAGE, shape.rows) if shape.topk else None
        self.window_offset = shape.rows if shape.topk else 0  # of the window's rows in the workspace
        self.num_rows = self.window_offset + (self.gathered if shape.window else 0)
        parts = [self.topk_indices]
        if shape.window:
            parts.append((self.windows + self.window_offset).expand(NUM_SETS, -1, -1))
        self.combined = torch.cat(parts, 2)
        self.workspace = torch.empty(self.num_rows, dim, device="cuda", dtype=torch.bfloat16)
        for kv_cache, page_size, rows, out in self._caches():
            slots = torch.arange(rows, device="cuda")
            out.copy_(mla_fp8.dequantize_kv(kv_cache, slots, layout=self.layout, page_size=page_size))
        self.padded_heads = 64 if heads <= 64 else 128
        padded = [mla_fp8.pad_q_heads(q, self.sink, num_heads=self.padded_heads) for q in self.q]
        self.padded_q = [q for q, _ in padded]
        self.padded_sink = padded[0][1] if self.sink is not None else None

    def _caches(self) -> list[tuple[torch.Tensor, int, int, torch.Tensor]]:
        """(cache, page size, rows, their place in the workspace) of each."""
        found = []
        if self.topk_cache is not None:
            found.append((self.topk_cache, PAGE, self.shape.rows, self.workspace[: self.shape.rows]))
        if self.window_cache is not None:
            place = self.workspace[self.window_offset :]
            found.append((self.window_cache, WINDOW_PAGE, self.gathered, place))
        return found

    def window(self, i: int) -> torch.Tensor:
        return mla_fp8.sparse_prefill_window(
            self.q[i], self.window_cache, *self.window_geometry, layout=self.layout, page_size=WINDOW_PAGE,
            window_size=WINDOW, sm_scale=self.sm_scale, attn_sink=self.sink, **self.extra(i),
        )[0]  # fmt: skip

    def extra(self, i: int) -> dict:
        if self.topk_cache is None:
            return {}
        return {
            "extra_kv_cache": self.topk_cache,
            "extra_indices": self.topk_indices[i],
            "extra_page_size": PAGE,
        }

    def paged(self, i: int) -> torch.Tensor:
        main = (self.window_cache, self.windows, WINDOW_PAGE)
        extra = self.extra(i)
        if self.window_cache is None:
            main, extra = (self.topk_cache, self.topk_indices[i], PAGE), {}
        return mla_fp8.sparse_prefill_paged(
            self.q[i], main[0], main[1], layout=self.layout, page_size=main[2], sm_scale=self.sm_scale,
            attn_sink=self.sink, **extra,
        )[0]  # fmt: skip

    def rows(self, i: int) -> torch.Tensor:
        if self.topk_cache is None:
            return self._window_rows(i)
        return mla_fp8.sparse_prefill(
            self.q[i], self.workspace, self.combined[i], sm_scale=self.sm_scale, attn_sink=self.sink
        )[0]

    def _window_rows(self, i: int) -> torch.Tensor:
        """The workspace as a cache of pages of one row."""
        _, query_start_loc, seq_lens = self.window_geometry
        return mla_fp8.sparse_prefill_window(
            self.q[i], self.workspace, self.row_table, query_start_loc, seq_lens, page_size=1,
            layout="bf16" if self.layout.head_dim_qk == 576 else "bf16_512", window_size=WINDOW,
            sm_scale=self.sm_scale, attn_sink=self.sink,
        )[0]  # fmt: skip

    def flash_mla(self, i: int) -> torch.Tensor:
        return self._flash_mla(self.padded_q[i], self.combined[i])

    def flash_mla_padded(self, i: int) -> torch.Tensor:
        return self._pad_flash_mla_slice(self.q[i], self.combined[i])

    def _pad_flash_mla_slice(self, q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        heads = q.shape[1]
        if heads < self.padded_heads:
            padded = q.new_zeros(len(q), self.padded_heads, q.shape[2])
            padded[:, :heads] = q
            q = padded
        return self._flash_mla(q, indices)[:, :heads].contiguous()

    def _flash_mla(self, q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return flash_mla.flash_mla_sparse_fwd(
            q, self.workspace[:, None], indices[:, None], self.sm_scale, 512, attn_sink=self.padded_sink
        )[0]

    def prepare_layer(self) -> None:
        tokens, shape = self.shape.num_tokens, self.shape
        seq_len = max(shape.rows * RATIO, self.gathered) if shape.window else tokens

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        self.geometry = (
            ints(0, tokens), ints(seq_len), ints(min(self.gathered, seq_len)), ints(0),
            ints(self.window_offset),
        )  # fmt: skip
        self.indices_out = torch.empty_like(self.combined[0])
        self.lens_out = torch.empty(tokens, dtype=torch.int32, device="cuda")
        self.slots = [
            torch.arange(rows, device="cuda", dtype=torch.int32) for _, _, rows, _ in self._caches()
        ]
        self.triton = load_triton_baselines("cuda")

    def rows_layer(self, i: int) -> torch.Tensor:
        for (kv_cache, page_size, _, out), slots in zip(self._caches(), self.slots, strict=True):
            mla_fp8.dequantize_kv(kv_cache, slots, layout=self.layout, page_size=page_size, out=out)
        if self.topk_cache is None:
            return self._window_rows(i)
        indices, lens = self.topk_indices[i], None
        if self.shape.window:
            indices, lens = mla_fp8.combine_topk_swa_indices(
                indices, *self.geometry, window_size=WINDOW, compress_ratio=RATIO, topk=self.shape.topk
            )
        return mla_fp8.sparse_prefill(
            self.q[i], self.workspace, indices, sm_scale=self.sm_scale, attn_sink=self.sink, topk_length=lens
        )[0]

    def flash_mla_layer(self, i: int) -> torch.Tensor:
        """What an engine launches for one layer."""
        for (kv_cache, page_size, _, out), slots in zip(self._caches(), self.slots, strict=True):
            self.triton.dequantize_kv(kv_cache, slots, self.layout, page_size, out)
        indices = self.combined[i]
        if self.shape.window:
            inputs = (self.topk_indices[i], *self.geometry)
            self.triton.combine_topk_swa_indices(inputs, WINDOW, RATIO, self.indices_out, self.lens_out)
            indices = self.indices_out
        return self._pad_flash_mla_slice(self.q[i], indices)

    def error(self, out: torch.Tensor, num_tokens: int = 4) -> float:
        chosen = self.combined[0, :num_tokens].long()
        if self.layout.nope_format == "bf16" or (self.shape.bf16 and not self.shape.layer):
            rows = self.workspace.double()[chosen.flatten()]
        else:
            rows = torch.empty(chosen.numel(), self.layout.head_dim_qk, dtype=torch.float64, device="cuda")
            flat, first = chosen.flatten(), 0
            for kv_cache, page_size, count, _ in self._caches():
                mine = (flat >= first) & (flat < first + count)
                rows[mine] = dequantized(self.layout, kv_cache, flat[mine] - first, page_size)
                first += count
        at = torch.arange(chosen.numel(), device="cuda", dtype=torch.int32).view_as(chosen)
        exact, _, _ = reference.sparse_attention(
            self.q[0, :num_tokens].double(), [(rows, at, None)], sm_scale=self.sm_scale, attn_sink=self.sink
        )
        return ((out[:num_tokens, : exact.shape[1]].double() - exact).norm() / exact.norm()).item()


def work(shape: Shape) -> Work:
    problem = Problem(shape)
    native = problem.window if shape.window else problem.paged
    if shape.bf16:
        native = problem.rows_layer if shape.layer else problem.rows

    def rotating(launch):
        return [functools.partial(launch, i) for i in range(NUM_SETS)]

    baselines, peer = {}, None
    if flash_mla is not None:
        peer = problem.flash_mla
        name = "flash_mla"
        if shape.layer:
            problem.prepare_layer()
            peer, name = problem.flash_mla_layer, "triton + flash_mla"
        baselines[name] = rotating(peer)
        if not shape.layer and shape.num_q_heads < problem.padded_heads:
            baselines["flash_mla, pad, slice"] = rotating(problem.flash_mla_padded)

    def note() -> str:
        errors = f"error {problem.error(native(0)):.2e}"
        return errors if peer is None else f"{errors}, flash_mla {problem.error(peer(0)):.2e}"

    return Work(shape.name, rotating(native), shape.num_bytes, shape.flops, baselines=baselines, note=note)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("bench_sparse_prefill needs an NVIDIA GPU; bench_sparse_attention runs on a CPU too")
        raise SystemExit(0)
    torch.manual_seed(0)
    run("sparse_prefill", (work(shape) for shape in shapes()))
