"""Sparse prefill against FlashMLA, in one process, and whole layers against Triton kernels around FlashMLA.

    PYTHONPATH=python:.peers python benchmarks/bench_sparse_prefill.py [--real-rows]

`sparse_prefill_paged` (V3.2) and `sparse_prefill_window` (V4) read FP8 pages (or bf16 ones: `bf16_512`),
FlashMLA a ready workspace of bf16 rows. It takes 64 or 128 heads: `flash_mla` is its kernel alone, other
numbers of heads padded before the clock starts, `flash_mla, pad, slice` with the copies of Q and output
that a user then pays. Top-k entries are uniform over `rows` entries, windows are the last 128 tokens.
`layer` cases add what leads there: Triton kernels dequantise FlashMLA's workspace and combine its indices,
its heads are padded and sliced; ours reads the caches, or goes through a workspace, too (`layer bf16`).
Entries of another layout than the window's (`dsv41+dsv41_fp4`) go against `dsv4`, too.
Errors are relative to float64 over the dequantised rows.

`--real-rows` runs only what engines send (row_kinds.py), and compares every result with FlashMLA's, as
bench_sparse_decode.py does. `flash_mla, pages` is its decode kernel over the same FP8 pages.
"""

import functools
from dataclasses import replace

import torch
from bench_sparse_decode import CUDA, DEVICE, RATIO, REAL_ROUNDS, dequantized
from flashmla import find_flash_mla
from row_kinds import RowKind, selected, windows
from sparse_prefill_shapes import WINDOW, Shape, cpu_shapes, real_shapes, shapes
from summary import markdown
from table import OURS

import mla_fp8
from harness import Work, arguments, load_triton_baselines, relative_difference, run
from mla_fp8 import KV_LAYOUTS, KVLayout, reference
from mla_fp8.backends.convert import packed

flash_mla = find_flash_mla()

WINDOW_PAGE, PAGE = 256, 64
NUM_SETS, REAL_SETS = 3, 2 if CUDA else 1


@functools.cache
def cache(layout_name: str, page_size: int, rows: int) -> torch.Tensor:
    layout = KV_LAYOUTS[layout_name]
    num_pages = -(-rows // page_size)
    kv_cache = layout.empty(num_pages, page_size, DEVICE).zero_()
    latent = torch.randn(num_pages * page_size, layout.head_dim_qk, device=DEVICE).bfloat16()
    slots = torch.arange(len(latent), device=DEVICE)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=page_size)
    return kv_cache


class Problem:
    """One request whose last `num_tokens` tokens are queries."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layout = shape, KV_LAYOUTS[shape.layout]
        self.entries_layout = KV_LAYOUTS[shape.entries_layout or shape.layout]
        tokens, heads, dim = shape.num_tokens, shape.num_q_heads, self.layout.head_dim_qk
        self.num_sets = NUM_SETS if shape.kind is None else REAL_SETS
        self.q = torch.randn(self.num_sets, tokens, heads, dim, device=DEVICE).bfloat16()
        self.sink = torch.randn(heads, device=DEVICE) if shape.window else None
        self.sm_scale = dim**-0.5
        self.gathered = tokens + shape.before  # tokens that the windows reach
        size = (self.num_sets, tokens, shape.topk)
        self.topk_indices, topk_valid = selected(
            shape.kind or RowKind(""), size, max(shape.rows, 1), shape.ratio, DEVICE
        )
        of_prompt = RowKind("", prompt_from=shape.before)
        self.windows, window_valid = windows(of_prompt, (1, tokens, shape.window), self.gathered, DEVICE)
        lengths = shape.kind is not None and shape.kind.lengths
        self.topk_length, self.window_length = (topk_valid, window_valid) if lengths else (None, None)
        pages = torch.arange(-(-self.gathered // WINDOW_PAGE), dtype=torch.int32, device=DEVICE)[None]
        geometry = ([0, tokens], [self.gathered])  # query_start_loc, seq_lens
        self.window_geometry = (pages, *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in geometry))
        self.row_table = torch.arange(self.gathered, dtype=torch.int32, device=DEVICE)[None]
        self.window_cache = cache(shape.layout, WINDOW_PAGE, self.gathered) if shape.window else None
        self.topk_cache = cache(self.entries_layout.name, PAGE, shape.rows) if shape.topk else None
        self.window_offset = shape.rows if shape.topk else 0  # of the window's rows in the workspace
        self.num_rows = self.window_offset + (self.gathered if shape.window else 0)
        self.combined, self.combined_length = self._combined()
        self.workspace = torch.empty(self.num_rows, dim, device=DEVICE, dtype=torch.bfloat16)
        for layout, kv_cache, page_size, rows, out in self._caches():
            slots = torch.arange(rows, device=DEVICE)
            out.copy_(mla_fp8.dequantize_kv(kv_cache, slots, layout=layout, page_size=page_size))
        self.padded_heads = 64 if heads <= 64 else 128
        padded = [mla_fp8.pad_q_heads(q, self.sink, num_heads=self.padded_heads) for q in self.q]
        self.padded_q = [q for q, _ in padded]
        self.padded_sink = padded[0][1] if self.sink is not None else None

    def _combined(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows of the workspace, lengths or None): entries, then windows, without gaps between the two."""
        shape = self.shape
        if not shape.window:
            return self.topk_indices, self.topk_length
        in_workspace = torch.where(self.windows < 0, -1, self.windows + self.window_offset)
        both = torch.cat([self.topk_indices, in_workspace.expand(self.num_sets, -1, -1)], 2)
        if shape.kind is None or shape.kind.holes:
            return both, None
        combined, valid = packed(both.flatten(0, 1))
        return combined.view_as(both), valid[: shape.num_tokens] if shape.kind.lengths else None

    def _caches(self) -> list[tuple[KVLayout, torch.Tensor, int, int, torch.Tensor]]:
        """(layout, cache, page size, rows, their place in the workspace) of each."""
        found = []
        if self.topk_cache is not None:
            place = self.workspace[: self.shape.rows]
            found.append((self.entries_layout, self.topk_cache, PAGE, self.shape.rows, place))
        if self.window_cache is not None:
            place = self.workspace[self.window_offset :]
            found.append((self.layout, self.window_cache, WINDOW_PAGE, self.gathered, place))
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
            "extra_topk_length": self.topk_length,
            "extra_page_size": PAGE,
            "extra_layout": self.entries_layout,
        }

    def paged(self, i: int) -> torch.Tensor:
        """Of layers without a window."""
        return mla_fp8.sparse_prefill_paged(
            self.q[i], self.topk_cache, self.topk_indices[i], layout=self.layout, page_size=PAGE,
            sm_scale=self.sm_scale, topk_length=self.topk_length, attn_sink=self.sink,
        )[0]  # fmt: skip

    def rows(self, i: int) -> torch.Tensor:
        if self.topk_cache is None:
            return self._window_rows(i)
        return mla_fp8.sparse_prefill(
            self.q[i], self.workspace, self.combined[i], sm_scale=self.sm_scale, attn_sink=self.sink,
            topk_length=self.combined_length,
        )[0]  # fmt: skip

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
            q, self.workspace[:, None], indices[:, None], self.sm_scale, 512, attn_sink=self.padded_sink,
            topk_length=self.combined_length,
        )[0]  # fmt: skip

    def prepare_pages(self) -> None:
        self.meta, _ = flash_mla.get_mla_metadata()

    def flash_mla_pages(self, i: int) -> torch.Tensor:
        """Its decode kernel, a request per token."""
        indices, rows = self.topk_indices[i][:, None], {}
        kv_cache, page_size = self.topk_cache, PAGE
        if self.window_cache is not None:  # it knows lengths in V4 only
            rows = {
                "extra_k_cache": self.layout.flash_mla_view(kv_cache, PAGE),
                "extra_indices_in_kvcache": indices,
                "topk_length": self.window_length,
                "extra_topk_length": self.topk_length,
            }
            indices, kv_cache, page_size = self.windows[0][:, None], self.window_cache, WINDOW_PAGE
        return flash_mla.flash_mla_with_kvcache(
            self.padded_q[i][:, None], self.layout.flash_mla_view(kv_cache, page_size), None, None, 512,
            self.meta, softmax_scale=self.sm_scale, is_fp8_kvcache=True, indices=indices,
            attn_sink=self.padded_sink, **rows,
        )[0][:, 0]  # fmt: skip

    def prepare_layer(self) -> None:
        tokens, shape = self.shape.num_tokens, self.shape
        seq_len = max(shape.rows * RATIO, self.gathered) if shape.window else tokens

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.geometry = (
            ints(0, tokens), ints(seq_len), ints(min(self.gathered, seq_len)), ints(0),
            ints(self.window_offset),
        )  # fmt: skip
        self.indices_out = torch.empty_like(self.combined[0])
        self.lens_out = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
        self.slots = [torch.arange(rows, device=DEVICE, dtype=torch.int32) for *_, rows, _ in self._caches()]
        self.triton = load_triton_baselines(DEVICE)

    def rows_layer(self, i: int) -> torch.Tensor:
        for (layout, kv_cache, page_size, _, out), slots in zip(self._caches(), self.slots, strict=True):
            mla_fp8.dequantize_kv(kv_cache, slots, layout=layout, page_size=page_size, out=out)
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
        for (layout, kv_cache, page_size, _, out), slots in zip(self._caches(), self.slots, strict=True):
            self.triton.dequantize_kv(kv_cache, slots, layout, page_size, out)
        indices = self.combined[i]
        if self.shape.window:
            inputs = (self.topk_indices[i], *self.geometry)
            self.triton.combine_topk_swa_indices(inputs, WINDOW, RATIO, self.indices_out, self.lens_out)
            indices = self.indices_out
        return self._pad_flash_mla_slice(self.q[i], indices)

    def error(self, out: torch.Tensor, num_tokens: int = 4) -> float:
        valid = self.combined[0, :num_tokens] >= 0
        chosen = self.combined[0, :num_tokens].clamp_min(0).long()
        if self.layout.nope_format == "bf16" or (self.shape.bf16 and not self.shape.layer):
            rows = self.workspace[chosen.flatten()].double()
        else:
            rows = torch.empty(chosen.numel(), self.layout.head_dim_qk, dtype=torch.float64, device=DEVICE)
            flat, first = chosen.flatten(), 0
            for layout, kv_cache, page_size, count, _ in self._caches():
                mine = (flat >= first) & (flat < first + count)
                rows[mine] = dequantized(layout, kv_cache, flat[mine] - first, page_size)
                first += count
        at = torch.arange(chosen.numel(), device=DEVICE, dtype=torch.int32).view_as(chosen).where(valid, -1)
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
        return [functools.partial(launch, i) for i in range(problem.num_sets)]

    baselines, peer, name = {}, None, "flash_mla"
    if shape.entries_layout:  # by our kernels over the rows that engines on Hopper keep
        v4 = Problem(replace(shape, layout="dsv4", entries_layout=""))
        baselines["native, dsv4"] = [functools.partial(v4.window, i) for i in range(v4.num_sets)]
    if flash_mla is not None:
        peer = problem.flash_mla
        if shape.layer:
            problem.prepare_layer()
            peer, name = problem.flash_mla_layer, "triton + flash_mla"
        baselines[name] = rotating(peer)
        if shape.kind is None and not shape.layer and shape.num_q_heads < problem.padded_heads:
            baselines["flash_mla, pad, slice"] = rotating(problem.flash_mla_padded)
        if shape.kind is not None and not shape.bf16:
            problem.prepare_pages()
            peer = problem.flash_mla_pages
            baselines["flash_mla, pages"] = rotating(peer)

    def errors() -> dict[str, float]:
        found = {OURS: problem.error(native(0))}
        return found if peer is None else found | {name: problem.error(peer(0))}

    def difference() -> float:
        if peer is None:
            return problem.error(native(0))
        return relative_difference(native(0), peer(0)[:, : shape.num_q_heads])

    made = Work(shape.label, rotating(native), shape.num_bytes, shape.flops, baselines=baselines)
    if shape.kind is None:
        made.errors = errors
    else:
        made.difference = difference
    return made


if __name__ == "__main__":
    torch.manual_seed(0)
    options = arguments("sparse_prefill", real_rows=True)
    if not options.real_rows:
        run("sparse_prefill", shapes() if CUDA else cpu_shapes(), work, options=options)
    if CUDA or options.real_rows:
        title = "sparse_prefill_real_rows"
        run(title, real_shapes(), work, rounds=REAL_ROUNDS, options=options, summary=markdown)
