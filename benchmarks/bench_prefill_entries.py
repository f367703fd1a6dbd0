"""Layers that attend to every compressed entry of their past (V4's of ratio 128): prompts of one request,
and decode steps of 32 with drafts, straight from the FP8 pages.

    PYTHONPATH=python:.peers python benchmarks/bench_prefill_entries.py

The queries are the last tokens of the context; window and entries lie in a ready workspace of bf16 rows.
`sparse_prefill_window` finds both by page tables. Baselines: `index rows`, our `sparse_prefill` over the same
workspace with an index for every key; `flash_mla`, over these rows, heads padded before;
`fp8, index rows` and `fp8, pages`, our `sparse_prefill_window` straight from the FP8 pages, without
max_logits, as the plug-ins call it; so are decode steps. What it takes to write index rows or the workspace
is in none of them.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from flashmla import find_flash_mla
from table import OURS

import mla_fp8
from harness import Work, arguments, run
from mla_fp8 import KV_LAYOUTS, reference

flash_mla = find_flash_mla()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LAYOUT, ROWS = KV_LAYOUTS["dsv4"], KV_LAYOUTS["bf16_512"]
WINDOW, WINDOW_PAGE, RATIO, PAGE = 128, 256, 128, 2
DECODED = 32  # requests of a decode step
LARGE = 1 << 33  # heads times indices: FP8 pages alone would take most of the run


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    context: int
    num_q_heads: int
    num_requests: int = 1

    @property
    def label(self) -> str:
        requests = f" r{self.num_requests}" if self.num_requests > 1 else ""
        return f"entries of {self.context >> 10}K h{self.num_q_heads} t{self.num_tokens}{requests}"

    @property
    def num_entries(self) -> int:
        return self.context // RATIO


def shapes() -> Iterator[Shape]:
    tokens, contexts = ((8192, 256), (128 << 10, 1 << 20)) if CUDA else ((16,), (128 << 10,))
    for t, context, heads in itertools.product(tokens, contexts, (8, 16, 32, 64) if CUDA else (8,)):
        yield Shape(t, context, heads)
    for context, drafts, heads in itertools.product(contexts, (2, 6), (8, 16, 32)):
        yield Shape(drafts * DECODED, context, heads, DECODED)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def numbers(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.int32, device=DEVICE)


def filled(num_rows: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache, and its rows in bf16."""
    kv_cache = LAYOUT.empty(-(-num_rows // page_size), page_size, DEVICE).zero_()
    latent, slots = torch.randn(num_rows, LAYOUT.head_dim_qk, device=DEVICE).bfloat16(), numbers(0, num_rows)
    mla_fp8.quantize_kv(latent, slots.long(), kv_cache, layout=LAYOUT, page_size=page_size)
    return kv_cache, mla_fp8.dequantize_kv(kv_cache, slots, layout=LAYOUT, page_size=page_size)


def without_max_logits(q: torch.Tensor, *tensors: torch.Tensor, **options: object) -> torch.Tensor:
    """:func:`mla_fp8.sparse_prefill_window` from FP8 pages, the form that the plug-ins call."""
    return mla_fp8.sparse_prefill_window(
        q, *tensors, layout=LAYOUT, window_size=WINDOW, page_size=WINDOW_PAGE, extra_page_size=PAGE,
        **options, return_max_logits=False, backend="native",
    )[0]  # fmt: skip


class Problem:
    def __init__(self, shape: Shape) -> None:
        tokens, heads, entries = shape.num_tokens, shape.num_q_heads, shape.num_entries
        self.shape = shape
        gathered = min(tokens + WINDOW - 1, shape.context)
        self.q = torch.randn(tokens, heads, 512, device=DEVICE).bfloat16()
        self.common = {"sm_scale": 512**-0.5, "attn_sink": torch.randn(heads, device=DEVICE)}
        self.entries, entry_rows = filled(entries, PAGE)
        self.window, window_rows = filled(gathered, WINDOW_PAGE)
        self.rows = torch.cat([entry_rows, window_rows])
        self.lens = (numbers(shape.context - tokens, shape.context) + 1) // RATIO
        self.requests = int32(0, tokens), int32(gathered)
        self.tables = numbers(0, entries)[None], numbers(entries, len(self.rows))[None]
        self.pages = numbers(0, len(self.entries))[None], numbers(0, len(self.window))[None]
        self.every = numbers(0, entries).expand(tokens, -1).contiguous()
        self.indices, self.lengths = mla_fp8.combine_topk_swa_indices(
            self.every, self.requests[0], int32(shape.context), self.requests[1], int32(0), int32(entries),
            window_size=WINDOW, compress_ratio=RATIO, topk=entries,
        )  # fmt: skip
        padded = 64 if heads <= 64 else 128
        self.padded = mla_fp8.pad_q_heads(self.q, self.common["attn_sink"], num_heads=padded)

    def by_pages(self) -> torch.Tensor:
        entries, window = self.tables
        return mla_fp8.sparse_prefill_window(
            self.q, self.rows, window, *self.requests, layout=ROWS, page_size=1, window_size=WINDOW,
            extra_kv_cache=self.rows, extra_page_size=1, extra_page_table=entries,
            extra_topk_length=self.lens, **self.common,
        )[0]  # fmt: skip

    def by_index(self) -> torch.Tensor:
        return mla_fp8.sparse_prefill(
            self.q, self.rows, self.indices, topk_length=self.lengths, **self.common
        )[0]

    def from_fp8(self, **entries: torch.Tensor) -> torch.Tensor:
        return without_max_logits(
            self.q, self.window, self.pages[1], *self.requests, extra_kv_cache=self.entries,
            extra_topk_length=self.lens, **entries, **self.common,
        )  # fmt: skip

    def flash_mla(self) -> torch.Tensor:
        q, sink = self.padded
        return flash_mla.flash_mla_sparse_fwd(
            q, self.rows[:, None], self.indices[:, None], 512**-0.5, 512, attn_sink=sink,
            topk_length=self.lengths,
        )[0]  # fmt: skip

    def error(self, out: torch.Tensor) -> float:
        some = torch.tensor([0, -1], device=DEVICE)
        exact, _, _ = reference.sparse_attention(
            self.q[some].double(), [(self.rows.double(), self.indices[some], self.lengths[some])],
            **self.common,
        )  # fmt: skip
        got = out[some, : self.shape.num_q_heads].double()
        return ((got - exact).norm() / exact.norm()).item()


class Drafts:
    """A decode step: the last tokens of each of several requests of the same length."""

    def __init__(self, shape: Shape) -> None:
        each, requests = shape.num_tokens // shape.num_requests, shape.num_requests
        self.q = torch.randn(shape.num_tokens, shape.num_q_heads, 512, device=DEVICE).bfloat16()
        self.common = {
            "sm_scale": 512**-0.5, "attn_sink": torch.randn(shape.num_q_heads, device=DEVICE),
        }  # fmt: skip
        self.entries, self.entry_rows = filled(requests * shape.num_entries, PAGE)
        self.window, self.window_rows = filled(requests * WINDOW_PAGE, WINDOW_PAGE)
        self.geometry = (
            numbers(0, requests)[:, None], numbers(0, requests + 1) * each,
            numbers(0, requests).fill_(WINDOW_PAGE),
        )  # fmt: skip
        self.lens = ((numbers(shape.context - each, shape.context) + 1) // RATIO).repeat(requests)
        pages = torch.randperm(len(self.entries), device=DEVICE).int()
        self.pages = pages.view(requests, -1)
        self.slots = (self.pages[..., None] * PAGE + numbers(0, PAGE)).flatten(1)
        self.every = self.slots.repeat_interleave(each, 0)

    def run(self, **entries: torch.Tensor) -> torch.Tensor:
        return without_max_logits(
            self.q, self.window, *self.geometry, extra_kv_cache=self.entries, extra_topk_length=self.lens,
            **entries, **self.common,
        )  # fmt: skip

    def by_pages(self) -> torch.Tensor:
        return self.run(extra_page_table=self.pages)

    def by_index(self) -> torch.Tensor:
        return self.run(extra_indices=self.every)

    def errors(self) -> dict[str, float]:
        """Of the first request's last token and the last request's first."""
        each = len(self.q) // len(self.pages)
        exact = {}
        for token in (each - 1, len(self.q) - each):
            request = token // each
            end = (request + 1) * WINDOW_PAGE - (each - 1 - token % each)
            rows = [self.window_rows[end - WINDOW : end], self.entry_rows[self.slots[request]]]
            rows[1] = rows[1][: int(self.lens[token])]
            scope = torch.cat(rows).double(), numbers(0, sum(map(len, rows)))[None], None
            sink = self.common["attn_sink"]
            q = self.q[token][None].double()
            exact[token] = reference.sparse_attention(q, [scope], sm_scale=512**-0.5, attn_sink=sink)[0][0]
        want = torch.stack(list(exact.values()))

        def error(out: torch.Tensor) -> float:
            return ((out[list(exact)].double() - want).norm() / want.norm()).item()

        return {OURS: error(self.by_pages()), "fp8, index rows": error(self.by_index())}


def work_of_drafts(shape: Shape) -> Work:
    problem = Drafts(shape)
    keys = int(problem.lens.sum()) + shape.num_tokens * WINDOW
    row_bytes = shape.num_requests * (shape.num_entries + WINDOW) * LAYOUT.bytes_per_token
    return Work(
        shape.label, problem.by_pages, problem.q.numel() * 4 + row_bytes,
        2 * keys * shape.num_q_heads * 1024, baselines={"fp8, index rows": problem.by_index},
        errors=problem.errors,
    )  # fmt: skip


def work(shape: Shape) -> Work:
    if shape.num_requests > 1:
        return work_of_drafts(shape)
    problem = Problem(shape)
    baselines = {"index rows": problem.by_index}
    if flash_mla is not None:
        baselines["flash_mla"] = problem.flash_mla
    if shape.num_tokens * shape.num_entries * shape.num_q_heads < LARGE:
        baselines["fp8, index rows"] = functools.partial(problem.from_fp8, extra_indices=problem.every)
        baselines["fp8, pages"] = functools.partial(problem.from_fp8, extra_page_table=problem.pages[0])

    def errors() -> dict[str, float]:
        found = {"index rows": problem.error(problem.by_index())}
        return {OURS: problem.error(problem.by_pages())} | found

    keys = int(problem.lengths.sum())
    tensors = (problem.q, problem.q, problem.rows)
    return Work(
        shape.label, problem.by_pages, sum(x.numel() * 2 for x in tensors),
        2 * keys * shape.num_q_heads * 1024, baselines=baselines, errors=errors,
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    run("prefill_entries", shapes(), work, options=arguments("sparse_prefill_window over all entries"))
