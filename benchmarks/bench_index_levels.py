"""V4.1's two levels: blocks published, and the choice among their entries, against plain index_topk, and
against DeepGEMM's logits of all entries, masked as engines do it, where that is installed.

V4.1's numbers: 32 heads, top-512, 2048 blocks of 8. Lists of a request's drafts, and of neighbouring rows of
a prompt, share nine tenths of their blocks. Pages differ from call to call: no key is in the L2 cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from bench_index_topk import HAS_DEEP_GEMM, PAGE

import mla_fp8
from harness import Work, gpu_rotation, run
from mla_fp8 import INDEX_LAYOUTS

HEADS, TOPK, BLOCKS, BLOCK = 32, 512, 2048, 8
SHARED = 0.9  # of the blocks of neighbouring lists
MOST_LOGITS = 2 << 30  # bytes of what is masked


class Case(NamedTuple):
    what: str  # consume, publish, plain; layers: the eight index layers of V4.1
    rows: int  # requests of decode, or rows of a prompt
    context: int
    next_n: int = 1
    layout: str = "index_fp8"
    prompt: bool = False

    @property
    def label(self) -> str:
        kind = "prompt" if self.prompt else "decode"
        extra = [f"n={self.next_n}"] * (self.next_n > 1) + [self.layout] * (self.layout != "index_fp8")
        return " ".join([f"{self.what} {kind} {self.rows} x {self.context // 1024}K", *extra])


GPU_CASES = [
    *(Case("consume", 32, n * 1024, layout=x) for n in (8, 16, 32, 128) for x in INDEX_LAYOUTS),
    Case("consume", 32, 1 << 20),
    *(Case("consume", 32, 131072, 6, layout=x) for x in INDEX_LAYOUTS),
    *(Case("publish", 32, n * 1024) for n in (16, 128)),
    Case("publish", 32, 131072, 6),
    Case("layers", 32, 131072),
    *(Case(what, 8192, 131072, prompt=True) for what in ("consume", "publish", "layers")),
]
CPU_CASES = [Case("consume", 8, 65536), Case("publish", 8, 65536), Case("consume", 64, 65536, prompt=True)]


def lists(rows: int, together: int, num_blocks: int, device: str) -> torch.Tensor:
    """[rows, BLOCKS] ascending: of `together` neighbours most are the same; the last block is in all."""
    n = min(BLOCKS, num_blocks)
    if num_blocks <= BLOCKS:
        return torch.arange(n, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    found = []
    for first in range(0, rows, together):
        own = min(together, rows - first)
        base = torch.rand(1, num_blocks, device=device)
        noise = torch.rand(own, num_blocks, device=device)
        score = torch.where(torch.rand(own, num_blocks, device=device) < SHARED, base, noise)
        score[:, -1] = 2
        found.append(score.topk(n, dim=1).indices.sort(dim=1).values.int())
    return torch.cat(found)


class Layer:
    """Inputs of one index layer, with keys in rotation, and what is called on them."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.layout = INDEX_LAYOUTS[case.layout]
        self.requests = 1 if case.prompt else case.rows
        rows = case.rows * case.next_n
        per_request = rows // self.requests
        entries = self.requests * case.context
        self.num_bytes = entries * self.layout.bytes_per_entry
        self.rounds = min(gpu_rotation(self.num_bytes), 8)
        values = torch.randint(0, 112, (self.rounds, entries, self.layout.value_bytes), dtype=torch.uint8,
                               device=device)  # fmt: skip
        values |= torch.randint_like(values, 2) << 7
        if case.layout == "index_fp8":
            scales = torch.rand(self.rounds, entries, 1, device=device) + 0.5
        else:
            scales = torch.randint(120, 128, (self.rounds, entries, 4), dtype=torch.uint8, device=device)
        self.gathered = (values, scales)
        self.q = torch.randn(rows, HEADS, 128, device=device).to(torch.float8_e4m3fn)
        self.weights = torch.randn(rows, HEADS, device=device)
        seen = case.context - per_request + 1 + torch.arange(per_request, device=device)
        self.lens = seen.repeat(self.requests).int()
        self.blocks = lists(rows, 8 if case.prompt else case.next_n, case.context // BLOCK, device)
        if not case.prompt:
            self.pages()
        ints = {"dtype": torch.int32, "device": device}
        self.out = {
            "out_positions": torch.empty(rows, TOPK, **ints), "out_slots": torch.empty(rows, TOPK, **ints),
            "out_lens": torch.empty(rows, **ints),
        }  # fmt: skip
        self.out_blocks = torch.empty(rows, BLOCKS, **ints)
        self.workspaces = {
            name: torch.empty(
                mla_fp8.index_topk_workspace(rows, topk=TOPK, device=device, **sizes), dtype=torch.uint8,
                device=device,
            )
            for name, sizes in {
                "plain": {}, "consume": {"num_candidates": self.blocks.shape[1]},
                "publish": {"num_positions": case.context},
            }.items()
        }  # fmt: skip
        self.counters = torch.zeros(mla_fp8.index_topk_counters(device), **ints)

    def pages(self) -> None:
        pages = self.case.context // PAGE
        order = torch.randperm(self.rounds * self.requests * pages, device=self.device)
        self.tables = order.view(self.rounds, self.requests, pages).int()
        self.pool = self.layout.empty(order.numel(), PAGE, self.device)
        values, scales = self.layout.views(self.pool, PAGE)
        values.view(torch.uint8)[order] = self.gathered[0].view(-1, *values.shape[1:])
        scales[order] = self.gathered[1].view(-1, *scales.shape[1:])
        del self.gathered

    def call(self, what: str, i: int) -> None:
        """The op on the keys of round i: plain, consume or publish."""
        more: dict = {"topk": TOPK, "workspace": self.workspaces[what], "counters": self.counters} | self.out
        if what == "consume":
            more["candidate_blocks"] = self.blocks
        elif what == "publish":
            more |= {"num_blocks": BLOCKS, "out_blocks": self.out_blocks}
        if self.case.prompt:
            starts = torch.zeros_like(self.lens)
            values, scales = self.gathered
            k = values[i].view(torch.float8_e4m3fn) if self.case.layout == "index_fp8" else values[i]
            scale = scales[i].flatten() if self.case.layout == "index_fp8" else scales[i]
            op = mla_fp8.index_topk_ragged_blocks if what == "publish" else mla_fp8.index_topk_ragged
            op(self.q, self.weights, k, scale, starts, self.lens, **more)
            return
        op = mla_fp8.index_topk_blocks if what == "publish" else mla_fp8.index_topk
        op(self.q, self.weights, self.pool, self.tables[i], None, layout=self.layout, page_size=PAGE,
           row_lens=self.lens, next_n=self.case.next_n, **more)  # fmt: skip

    def calls(self, what: str) -> list[Callable[[], None]]:
        return [lambda i=i: self.call(what, i) for i in range(self.rounds)]

    def masked(self, what: str) -> list[Callable[[], None]] | None:
        """As vLLM does on Hopper: all logits, then flags of candidates and a mask, or block maxima; top-k."""
        if not HAS_DEEP_GEMM or self.case.layout != "index_fp8":
            return None
        import deep_gemm  # noqa: PLC0415

        rows, context = len(self.q), self.case.context
        step = min(rows, max(MOST_LOGITS // (4 * context), 1))
        starts = torch.zeros_like(self.lens)
        if not self.case.prompt:
            atom = 2 if self.case.next_n % 2 == 0 else 1
            lens = self.lens.view(-1, atom)
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            plan = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, sms)
            flat = [table.repeat_interleave(len(lens) // len(table), 0) for table in self.tables]
            cache = self.pool.view(-1, PAGE, 1, self.layout.bytes_per_entry)
            q, step = self.q.view(len(lens), atom, HEADS, 128), rows

        def call(i: int) -> None:
            for first in range(0, rows, step):
                of = slice(first, first + step)
                if self.case.prompt:
                    keys = self.gathered[0][i].view(torch.float8_e4m3fn), self.gathered[1][i].flatten()
                    scores = deep_gemm.fp8_mqa_logits(
                        self.q[of], keys, self.weights[of], starts[of], self.lens[of], clean_logits=True
                    )[:, :context]
                else:
                    scores = deep_gemm.fp8_paged_mqa_logits(
                        q, cache, self.weights, lens, flat[i], plan, context, clean_logits=True
                    )
                if what == "consume":
                    flags = torch.zeros(len(scores), context // BLOCK, dtype=torch.bool, device=self.device)
                    flags.scatter_(1, self.blocks[of].long(), True)
                    scores.unflatten(1, (-1, BLOCK)).masked_fill_(~flags[:, :, None], -torch.inf)
                elif what == "publish":
                    torch.topk(scores.unflatten(1, (-1, BLOCK)).amax(-1), BLOCKS, dim=-1, sorted=False)
                torch.topk(scores, TOPK, dim=-1, sorted=False)

        return [lambda i=i: call(i) for i in range(self.rounds)]


def all_layers(case: Case, device: str) -> Work:
    """Three of ratio 2, then one that publishes and four that consume; the same with plain calls."""
    full = Layer(case._replace(what="consume"), device)
    half = Layer(case._replace(what="plain", context=case.context // 2), device)
    rounds = min(full.rounds, half.rounds)
    masked = {what: full.masked(what) for what in ("publish", "consume")}
    halves = half.masked("plain")

    def ours(i: int) -> None:
        for _ in range(3):
            half.call("plain", i)
        full.call("publish", i)
        for _ in range(4):
            full.call("consume", i)

    def plain(i: int) -> None:
        for _ in range(3):
            half.call("plain", i)
        for _ in range(5):
            full.call("plain", i)

    def theirs(i: int) -> None:
        assert halves is not None and masked["publish"] is not None and masked["consume"] is not None
        for _ in range(3):
            halves[i]()
        masked["publish"][i]()
        for _ in range(4):
            masked["consume"][i]()

    baselines = {"plain index_topk": [lambda i=i: plain(i) for i in range(rounds)]}
    if halves is not None:
        baselines["deep_gemm masked"] = [lambda i=i: theirs(i) for i in range(rounds)]
    return Work(case.label, [lambda i=i: ours(i) for i in range(rounds)], baselines=baselines)


def work(case: Case, device: str) -> Work:
    if case.what == "layers":
        return all_layers(case, device)
    layer = Layer(case, device)
    baselines = {"plain index_topk": layer.calls("plain")}
    if (masked := layer.masked(case.what)) is not None:
        baselines["deep_gemm masked"] = masked
    entries = min(BLOCKS * BLOCK, case.context) if case.what == "consume" else case.context
    num_bytes = (1 if case.prompt else case.rows) * entries * layer.layout.bytes_per_entry
    flops = 2 * 128 * HEADS * len(layer.q) * entries
    return Work(case.label, layer.calls(case.what), num_bytes, flops, baselines)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = GPU_CASES if device == "cuda" else CPU_CASES
    run("index_levels", cases, lambda case: work(case, device))
