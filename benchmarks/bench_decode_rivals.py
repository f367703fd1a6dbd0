"""Sparse decode beside what vLLM and SGLang call on Hopper, few tokens to many, in one process.

    PYTHONPATH=python:.peers python benchmarks/bench_decode_rivals.py [--memory]

==============  ==========================================================================================
`triton`        vLLM's decode of 8 and 16 heads over V4's rows, newer than 0.33 (vllm#59418): its file
                models/deepseek_v41/nvidia/ops/small_head_sparse_decode.py in the package. vLLM calls it
                for up to 12 tokens, 16 without entries
`flash_attn_3`  vLLM's FLASH_ATTN_MLA_SPARSE, its default for bf16 caches: a row is a page
`flash_mla`     its kernels, queries padded before
==============  ==========================================================================================

A rival that is not on the path, or refuses a shape, has no column. Rows are uniform over a million, as in
bench_sparse_decode.py.

`--memory`: bytes and time of a step's attention, its queries as a projection leaves them, for V4 with 16
heads. Where a kernel takes 64 heads, an engine pads the queries and gets as many outputs.
"""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_sparse_decode import DEVICE, Problem, Shape, flash_mla
from table import OURS, Case

from harness import Work, arguments, relative_difference, run
from mla_fp8.tools.timing import time_us

TOKENS, SOME, FEW = (1, 2, 4, 8, 12, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 128), (1, 8, 32, 128)
RIVALS = ("triton", "flash_attn_3", "flash_mla")
TOPK, WINDOW, ENTRIES, PAGE, WINDOW_PAGE = 2048, 128, 512, 64, 256
FA3_ROPE = 64  # of a query beside its latent part; zeros for models without rope
BATCHED_TOKENS, PADDED = (8192, 16384, 24576), 64


def find_triton() -> Callable[..., None] | None:
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, "models/deepseek_v41/nvidia/ops/small_head_sparse_decode.py")
        if path.exists():
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.small_head_sparse_decode
    return None


def find_flash_attn() -> Callable[..., torch.Tensor] | None:
    try:
        interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ImportError:
        return None
    return interface.flash_attn_varlen_func if interface.is_fa_version_supported(3) else None


triton_decode, flash_attn = find_triton(), find_flash_attn()


def shapes() -> Iterator[Shape]:
    for entries, heads, tokens in itertools.product((0, ENTRIES), (8, 16), TOKENS):
        yield Shape("dsv4", heads, tokens, WINDOW, WINDOW_PAGE, entries, PAGE)
    for heads, tokens in itertools.product((8, 16, 64), SOME):
        yield Shape("dsv32_nope", heads, tokens, TOPK)
    for layout, heads, tokens in itertools.product(("bf16", "bf16_512"), (8, 16, 64, 128), FEW):
        yield Shape(layout, heads, tokens, TOPK)


class Rivals(Problem):
    """A problem and what each rival makes of its set i; padded heads are cut off."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        tokens, heads, device = shape.num_tokens, shape.num_q_heads, DEVICE
        self.sink = torch.randn(heads, device=device) if shape.layout == "dsv4" else None
        if flash_mla is not None:
            self.prepare_flash_mla()
        self.lens = torch.full((tokens,), shape.topk, dtype=torch.int32, device=device)
        self.entry_lens = torch.full((tokens,), shape.extra_topk, dtype=torch.int32, device=device)
        self.starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self.out = torch.empty(tokens, heads, self.layout.head_dim_v, dtype=torch.bfloat16, device=device)
        if shape.layout.startswith("bf16"):
            self.rows = self.main.view(torch.bfloat16).view(-1, self.layout.head_dim_qk)
            rope = self.q[..., 512:] if self.layout.rope_dim else self.q[..., :FA3_ROPE].mul(0)
            self.q_rope, self.q_latent = rope.contiguous(), self.q[..., :512].contiguous()

    def triton(self, i: int) -> torch.Tensor:
        shape, extra = self.shape, (None, None, None)
        if shape.extra_topk:
            cache = self.layout.flash_mla_view(self.extra, shape.extra_page_size).squeeze(2)
            extra = (cache, self.extra_indices[i], self.entry_lens)
        triton_decode(
            self.q[i], self.layout.flash_mla_view(self.main, shape.page_size).squeeze(2), self.indices[i],
            self.lens, *extra, self.sink, self.sm_scale, self.out, shape.num_q_heads,
        )  # fmt: skip
        return self.out

    def flash_attn_3(self, i: int) -> torch.Tensor:
        latent = self.rows[:, None, None, :512]
        rope = self.rows[:, None, None, 512:] if self.layout.rope_dim else latent[..., :FA3_ROPE]
        return flash_attn(
            q=self.q_rope[i], k=rope, v=latent, q_v=self.q_latent[i], max_seqlen_q=1, causal=True,
            cu_seqlens_q=self.starts, max_seqlen_k=self.shape.topk, seqused_k=self.lens, fa_version=3,
            block_table=self.indices[i], softmax_scale=self.sm_scale,
        )  # fmt: skip

    def flash_mla_rows(self, i: int) -> torch.Tensor:
        out, *_ = flash_mla.flash_mla_sparse_fwd(
            self.padded_q[i], self.rows[:, None], self.indices[i][:, None], self.sm_scale
        )
        return out[:, : self.shape.num_q_heads]

    def flash_mla_nope(self, i: int) -> torch.Tensor:
        """Rows of 528 bytes, which SGLang's build reads."""
        out, _ = flash_mla.flash_mla_with_kvcache(
            self.padded_q[i][:, None], self.layout.flash_mla_view(self.main, PAGE), None, None, 512,
            self.meta, softmax_scale=self.sm_scale, is_fp8_kvcache=True, kv_format="V32_NO_ROPE",
            indices=self.indices[i][:, None],
        )  # fmt: skip
        return out[:, 0, : self.shape.num_q_heads]

    def rivals(self) -> dict[str, Callable[[int], torch.Tensor]]:
        layout, found = self.shape.layout, {}
        if layout == "dsv4" and triton_decode is not None:
            found["triton"] = self.triton
        if layout.startswith("bf16") and flash_attn is not None:
            found["flash_attn_3"] = self.flash_attn_3
        if flash_mla is not None:
            found["flash_mla"] = (
                self.flash_mla_kernels if layout == "dsv4"
                else self.flash_mla_nope if layout == "dsv32_nope" else self.flash_mla_rows
            )  # fmt: skip
        return {name: launch for name, launch in found.items() if self.serves(name, launch)}

    def serves(self, name: str, launch: Callable[[int], torch.Tensor]) -> bool:
        try:
            launch(0)
        except RuntimeError as error:
            print(f"{self.shape.label}: {name} refuses: {str(error).splitlines()[0]}", flush=True)
            return False
        return True


def work(shape: Shape) -> Work:
    problem = Rivals(shape)
    rivals = problem.rivals()

    def rotating(launch):
        return [functools.partial(launch, i) for i in range(problem.num_sets)]

    def difference() -> float:
        own = problem.native(0)
        return max((relative_difference(own, rival(0)) for rival in rivals.values()), default=0.0)

    made = Work(shape.label, rotating(problem.native), shape.row_bytes, shape.flops)
    made.baselines = {name: rotating(launch) for name, launch in rivals.items()}
    made.difference = difference
    return made


def table(measured: list[Case]) -> str:
    """Of each cache and number of heads: us, and how many times as long each rival takes."""
    lines: dict[str, dict[str, str]] = {}
    for case in measured:
        cache, tokens = case.label.rsplit(" b", 1)
        ratios = [f"{case.ratios[name]:.2f}" for name in RIVALS if name in case.ratios]
        lines.setdefault(cache, {})[tokens] = f"{case.ours.us:.1f} ({' / '.join(ratios)})"
    shown = [t for t in map(str, TOKENS) if any(t in cells for cells in lines.values())]
    rows = [["cache, keys, heads", *shown], ["---"] * (len(shown) + 1)]
    rows += [[cache, *(cells.get(t, "") for t in shown)] for cache, cells in lines.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def step_memory(tokens: int, heads: int = 16) -> list[tuple[str, float, float]]:
    """(whose, MiB beside caches, queries and indices, us) of a step of so many tokens."""
    problem = Problem(Shape("dsv4", heads, tokens, WINDOW, WINDOW_PAGE, ENTRIES, PAGE))
    problem.num_sets, found = 1, []

    def ours() -> torch.Tensor:
        return problem.native(0)

    def padded() -> torch.Tensor:
        q = problem.q.new_zeros(tokens, PADDED, problem.q.shape[-1])
        q[:, :heads] = problem.q[0]
        return problem._flash_mla(q, 0).contiguous()

    launches = {OURS: ours}
    if flash_mla is not None:
        problem.prepare_flash_mla()
        problem.padded_q = []
        launches["flash_mla, pad, slice"] = padded
    for name, launch in launches.items():
        launch()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        launch()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found.append((name, peak / 2**20, time_us({name: launch}, rounds=5)[name]))
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    parsed = arguments("sparse_decode_rivals", memory=True)
    if parsed.memory:
        for tokens in BATCHED_TOKENS:
            for name, mib, us in step_memory(tokens):
                print(f"{tokens} tokens, 16 heads, {name:<24}{mib:>8.0f} MiB{us:>10.0f} us", flush=True)
    else:
        run("sparse_decode_rivals", shapes(), work, rounds=15, options=parsed, summary=table)
