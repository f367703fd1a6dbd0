"""`query_groups`: consecutive queries that choose mostly the same keys, against the same queries alone.

    PYTHONPATH=python:.peers python benchmarks/bench_query_groups.py

Each query keeps `overlap` of the keys of the one before it, with new ones in place of the others; no slot
is twice in a row. `alone` is the call without `query_groups`; `lists made before` has what plan_shared_keys
made for it, as later layers with the same indices have; `plan_shared_keys` is that alone; `flash_mla` pads to
64 heads. Launches rotate over several sets of indices.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bench_sparse_decode import CUDA, DEVICE, NUM_SLOTS, cache, dequantized
from flashmla import find_flash_mla

import mla_fp8
from harness import Work, arguments, relative_difference, run
from mla_fp8 import KV_LAYOUTS, reference

flash_mla = find_flash_mla()

PAGE = 64
ROWS_PER_GRAPH, MAX_SETS = 600_000, 12


@dataclass(frozen=True)
class Shape:
    op: str  # decode or prefill
    layout: str
    window: int
    topk: int
    num_q_heads: int
    group: int
    num_groups: int
    overlap: float

    @property
    def num_tokens(self) -> int:
        return self.group * self.num_groups

    @property
    def label(self) -> str:
        keys = f"{self.window}+{self.topk}" if self.window else f"{self.topk}"
        batch = f"s_q{self.group} b{self.num_groups}" if self.op == "decode" else f"{self.num_tokens} rows"
        return f"{self.op} {self.layout} {keys} h{self.num_q_heads} {batch}: overlap {self.overlap:g}"


V4, V32 = ("dsv4", 128, 512), ("dsv32", 0, 2048)


def shapes() -> Iterator[Shape]:
    for overlap, (layout, heads, group, batch) in itertools.product(
        (0.9, 0.6, 0.0, 1.0),
        (
            (V4, 8, 6, 128), (V4, 8, 4, 128), (V4, 8, 2, 128), (V4, 8, 8, 128), (V4, 16, 4, 128),
            (V4, 16, 2, 128), (V4, 32, 2, 128), (V32, 8, 6, 32), (V32, 8, 6, 128), (V32, 16, 4, 128),
            (V4, 8, 6, 8),
        ),
    ):  # fmt: skip
        yield Shape("decode", *layout, heads, group, batch, overlap)
    for overlap, (layout, heads, group) in itertools.product(
        (0.9, 0.6, 0.0), ((V4, 8, 8), (V4, 16, 4), (V4, 32, 2), (V32, 8, 8))
    ):
        yield Shape("prefill", *layout, heads, group, 8192 // group, overlap)


def chosen(shape: Shape, num_sets: int) -> torch.Tensor:
    """[num_sets, num_tokens, topk]: a slot of each of topk stretches of the cache, so that none is twice."""
    stretch = NUM_SLOTS // shape.topk
    size = (num_sets, shape.num_groups, 1, shape.topk)
    rows = [torch.randint(stretch, size, device=DEVICE)]
    for _ in range(shape.group - 1):
        fresh = torch.randint(stretch, size, device=DEVICE)
        rows.append(torch.where(torch.rand(size, device=DEVICE) < shape.overlap, rows[-1], fresh))
    places = torch.cat(rows, 2) + torch.arange(shape.topk, device=DEVICE) * stretch
    return places.flatten(1, 2).int()


def windows(shape: Shape, num_sets: int) -> torch.Tensor:
    last = torch.randint(
        shape.window, NUM_SLOTS - shape.group, (num_sets, shape.num_groups, 1, 1), device=DEVICE
    )
    token = torch.arange(shape.group, device=DEVICE)[:, None]
    column = torch.arange(1 - shape.window, 1, device=DEVICE)
    return (last + token + column).flatten(1, 2).int()


class Problem:
    def __init__(self, shape: Shape) -> None:
        self.shape, self.layout = shape, KV_LAYOUTS[shape.layout]
        rows = shape.num_tokens * (shape.window + shape.topk)
        self.num_sets = max(2, min(MAX_SETS, ROWS_PER_GRAPH // rows)) if CUDA else 1
        size = (self.num_sets, shape.num_tokens, shape.num_q_heads, self.layout.head_dim_qk)
        self.q = torch.randn(size, device=DEVICE).bfloat16()
        self.cache = cache(shape.layout, PAGE)
        self.topk = chosen(shape, self.num_sets)
        self.windows = windows(shape, self.num_sets) if shape.window else None
        self.lists = [self.plan(i) for i in range(self.num_sets)]

    def plan(self, i: int) -> torch.Tensor:
        first, extra = self.topk[i], {}
        if self.windows is not None:
            first, extra = self.windows[i], {"extra_indices": self.topk[i], "extra_num_slots": NUM_SLOTS}
        return mla_fp8.plan_shared_keys(
            first, query_groups=self.shape.group, num_q_heads=self.shape.num_q_heads, layout=self.layout,
            num_slots=NUM_SLOTS, **extra,
        )  # fmt: skip

    def run(self, i: int, **options) -> torch.Tensor:
        first = self.topk[i]
        if self.windows is not None:
            first = self.windows[i]
            options |= {
                "extra_kv_cache": self.cache, "extra_indices": self.topk[i], "extra_page_size": PAGE,
            }  # fmt: skip
        op = mla_fp8.sparse_decode if self.shape.op == "decode" else mla_fp8.sparse_prefill_paged
        return op(
            self.q[i], self.cache, first, layout=self.layout, page_size=PAGE,
            sm_scale=self.layout.head_dim_qk**-0.5, backend="native", **options,
        )[0]  # fmt: skip

    def shared(self, i: int) -> torch.Tensor:
        return self.run(i, query_groups=self.shape.group)

    def with_lists(self, i: int) -> torch.Tensor:
        return self.run(i, query_groups=self.shape.group, shared_keys=self.lists[i])

    def prepare_flash_mla(self) -> None:
        self.meta, _ = flash_mla.get_mla_metadata()
        self.padded = [torch.nn.functional.pad(q, (0, 0, 0, 64 - q.shape[1])) for q in self.q]

    def flash_mla(self, i: int) -> torch.Tensor:
        view = self.layout.flash_mla_view(self.cache, PAGE)
        requests, extra = (self.shape.num_groups, self.shape.group), {}
        first = self.topk[i]
        if self.windows is not None:
            first = self.windows[i]
            extra = {"extra_k_cache": view, "extra_indices_in_kvcache": self.topk[i].unflatten(0, requests)}
        out, _ = flash_mla.flash_mla_with_kvcache(
            self.padded[i].unflatten(0, requests), view, None, None, 512, self.meta,
            softmax_scale=self.layout.head_dim_qk**-0.5, is_fp8_kvcache=True,
            indices=first.unflatten(0, requests), **extra,
        )  # fmt: skip
        return out.flatten(0, 1)[:, : self.shape.num_q_heads]

    def error(self, out: torch.Tensor, num_tokens: int = 8) -> float:
        """Of set 0's first tokens, relative to float64 over the dequantised rows."""
        scopes = []
        for indices in (self.windows, self.topk):
            if indices is None:
                continue
            slots = indices[0, :num_tokens]
            rows = dequantized(self.layout, self.cache, slots.flatten(), PAGE)
            at = torch.arange(len(rows), device=DEVICE, dtype=torch.int32).view_as(slots)
            scopes.append((rows, at, None))
        q = self.q[0, :num_tokens].double()
        exact, _, _ = reference.sparse_attention(q, scopes, sm_scale=self.layout.head_dim_qk**-0.5)
        return ((out[:num_tokens].double() - exact).norm() / exact.norm()).item()


def work(shape: Shape) -> Work:
    problem = Problem(shape)

    def rotating(launch):
        return [functools.partial(launch, i) for i in range(problem.num_sets)]

    keys = shape.num_tokens * (shape.window + shape.topk)
    flops = 2 * keys * shape.num_q_heads * (problem.layout.head_dim_qk + problem.layout.head_dim_v)
    made = Work(shape.label, rotating(problem.shared), keys * problem.layout.bytes_per_token, flops)
    made.baselines = {
        "alone": rotating(problem.run),
        "lists made before": rotating(problem.with_lists),
        "plan_shared_keys": rotating(problem.plan),
    }
    if flash_mla is not None and shape.op == "decode":
        problem.prepare_flash_mla()
        made.baselines["flash_mla"] = rotating(problem.flash_mla)
    made.difference = lambda: relative_difference(problem.shared(0), problem.run(0))
    made.errors = lambda: {"mla_fp8": problem.error(problem.shared(0))}
    return made


if __name__ == "__main__":
    torch.manual_seed(0)
    options = arguments("query_groups")
    if not CUDA:
        print("bench_query_groups: needs an NVIDIA GPU; on a CPU each query goes alone")
    else:
        run("query_groups", shapes(), work, options=options)
