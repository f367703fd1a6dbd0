"""One layer of a prefill chunk in each of its ways: whole, selected, direct. See docs/guide/prefill.md.

A call builds the chunk's cache and attends once: a layer that finds its tables ready costs less, above all
`direct`. Queries select entries uniformly from their past, the worst case for `selected`. The note is what
the cost table predicts for a layer with tables ready, us.
"""

import functools
from dataclasses import dataclass

import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS, LayerCaches, PagedCache, PrefillWorkspace, SparsePrefillChunkCache

LAYOUT = KV_LAYOUTS["dsv4"]
WINDOW, PAGE_TOKENS, RATIO = 128, 256, 4


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    context: int
    num_q_heads: int
    topk: int

    @property
    def name(self) -> str:
        return f"T{self.num_tokens} context {self.context} h{self.num_q_heads} topk {self.topk}+{WINDOW}"


def shapes(cuda: bool) -> list[Shape]:
    if not cuda:
        return [Shape(n, context, 16, 128) for n in (8, 64) for context in (2048, 16384)]
    tokens, contexts = (64, 512, 2048, 8192), (16384, 131072, 1048576)
    return [Shape(n, context, 64, 512) for n in tokens for context in contexts]


def random_cache(num_pages: int, page_size: int, device: str) -> PagedCache:
    data = LAYOUT.empty(num_pages, page_size, device)
    latent = torch.randn(4096, LAYOUT.head_dim_qk, device=device).bfloat16()
    for first in range(0, num_pages * page_size, len(latent)):
        slots = torch.arange(first, first + len(latent), device=device)  # past the end: skipped
        mla_fp8.quantize_kv(latent, slots, data, layout=LAYOUT, page_size=page_size)
    return PagedCache(data, page_size)


class Layer:
    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        num_pages = -(-shape.context // PAGE_TOKENS)
        entries = random_cache(num_pages, PAGE_TOKENS // RATIO, device)
        swa_slots = shape.num_tokens + WINDOW + PAGE_TOKENS
        window = random_cache(-(-swa_slots // PAGE_TOKENS), PAGE_TOKENS, device)
        self.caches = LayerCaches(LAYOUT, RATIO, entries, window)
        self.seq_lens = torch.tensor([shape.context], dtype=torch.int32, device=device)
        self.query_lens = torch.tensor([shape.num_tokens], dtype=torch.int32, device=device)
        self.page_table = torch.randperm(num_pages, device=device).int()[None]
        self.request = torch.zeros(1, dtype=torch.int64, device=device)
        self.req_to_token = torch.arange(shape.context, device=device).int()[None]
        self.full_to_swa = torch.arange(shape.context, device=device) % swa_slots
        self.q = torch.randn(shape.num_tokens, shape.num_q_heads, 512, device=device).bfloat16()
        past = (shape.context - shape.num_tokens) // RATIO
        self.topk_indices = torch.randint(past, (shape.num_tokens, shape.topk), device=device).int()
        self.workspace = PrefillWorkspace(512, device)

    def attend(self, strategy: str, backend: str = "native") -> torch.Tensor:
        chunk = SparsePrefillChunkCache(
            self.workspace, self.seq_lens, self.query_lens, self.page_table, self.request, self.req_to_token,
            self.full_to_swa, window_size=WINDOW, seq_lens_host=[self.shape.context],
            query_lens_host=[self.shape.num_tokens],
        )  # fmt: skip
        self.predicted = chunk.predict(self.q, self.caches, self.topk_indices)
        options = {"sm_scale": 512**-0.5, "strategy": strategy, "backend": backend}
        return chunk.attend(self.q, self.caches, self.topk_indices, **options)[0]

    def note(self) -> str:
        return "predicted " + ", ".join(f"{name} {ns / 1e3:.0f}" for name, ns in self.predicted.items())


def work(shape: Shape, device: str) -> Work:
    layer = Layer(shape, device)
    layer.attend("whole")  # the workspace has its size before anything is captured
    baselines = {name: functools.partial(layer.attend, name) for name in ("selected", "direct")}
    if device == "cuda" and mla_fp8.dispatch.can_run("sparse_prefill", layer.q, "bf16_512", "flash_mla"):
        baselines["whole, flash_mla"] = functools.partial(layer.attend, "whole", "flash_mla")
    keys = shape.num_tokens * (shape.topk + WINDOW)
    return Work(
        shape.name, functools.partial(layer.attend, "whole"), baselines=baselines, note=layer.note,
        flops=2 * keys * shape.num_q_heads * 1024,
    )  # fmt: skip


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    run("prefill_strategies", (work(shape, device) for shape in shapes(device == "cuda")))
