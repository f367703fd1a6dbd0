"""index_topk against what engines run, DeepGEMM's logits with torch's or FlashInfer's top-k, where they are
installed, and against our own logits with torch's.

Bytes and FLOP are those of live work: a request's entries once, two per element of each visible (row, entry).
Pages differ from call to call, so that no key is in the L2 cache. DeepGEMM takes a prompt's keys gathered:
those differ, too.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

import mla_fp8
from harness import Work, gpu_rotation, run
from mla_fp8 import INDEX_LAYOUTS

PAGE = 64
HAS_DEEP_GEMM = importlib.util.find_spec("deep_gemm") is not None
LOGITS_BYTES = 512 << 20  # of a chunk of a prompt
Logits = Callable[[int, slice], torch.Tensor]  # of keys i, of some rows


class Case(NamedTuple):
    kind: str  # decode: next_n rows a request; prefill: the last rows of one request
    batch: int  # requests, or rows
    context: int
    next_n: int = 1
    heads: int = 64
    topk: int = 2048
    scores: str = "random"
    layout: str = "index_fp8"
    lengths: str = "equal"  # mixed: requests from half of the context on
    table: int = 0  # entries that the page table has room for, as engines' have; 0: of the context

    @property
    def width(self) -> int:
        return max(self.table, self.context)

    @property
    def label(self) -> str:
        name = f"{self.kind} {self.batch} x {self.context // 1024}K"
        extra = [f"n={self.next_n}"] * (self.next_n > 1) + [self.scores] * (self.scores != "random")
        extra += [self.layout] * (self.layout != "index_fp8")
        extra += [f"{self.lengths} lengths"] * (self.lengths != "equal")
        extra += [f"table {self.table // 1024}K"] * (self.table > 0)
        return " ".join([name, f"H={self.heads} k={self.topk}", *extra])


CPU_CASES = [
    Case("decode", 8, 32768),
    Case("decode", 1, 32768, 8),
    Case("decode", 1, 131072),
    Case("decode", 8, 32768, heads=32, topk=512),
    Case("prefill", 256, 8192),
    Case("decode", 8, 32768, scores="ascending"),
    Case("decode", 8, 32768, scores="all equal"),
]
GPU_CASES = [
    *(Case("decode", b, c, n) for c in (8192, 32768, 131072) for b in (1, 8, 32, 128) for n in (1, 2, 6)),
    *(Case("decode", 32, 131072, n, heads, k) for n in (1, 6) for heads, k in ((32, 2048), (64, 512))),
    *(Case("decode", 32, 131072, scores=s) for s in ("ascending", "all equal")),
    *(Case("decode", b, 131072, n, layout="index_fp4") for b in (1, 32) for n in (1, 6)),
    *(Case("prefill", rows, c) for c in (32768, 131072) for rows in (256, 2048, 8192)),
    Case("prefill", 2048, 32768, heads=32),
    # What engines send most: contexts of little more than topk.
    *(Case("decode", b, c) for c in (2048, 4096) for b in (8, 32, 128)),
    *(Case("prefill", rows, rows) for rows in (2048, 4096, 8192)),
    *(
        Case("decode", b, c, n, lengths="mixed")
        for b, c, n in (
            (8, 8192, 1),
            (32, 4096, 1),
            (32, 8192, 1),
            (128, 4096, 1),
            (8, 32768, 1),
            (8, 8192, 6),
        )
    ),
    *(Case("decode", b, c, n) for b, c in ((8, 8192), (32, 8192), (32, 32768)) for n in (3, 5, 8)),
    # An engine's page table is as wide as the longest context that it allows.
    *(Case("decode", b, c) for b in (1, 4) for c in (2048, 4096)),
    *(Case("decode", 4, c) for c in (8192, 32768)),
    *(
        Case("decode", b, c, table=table)
        for table in (131072, 1 << 20)
        for b in (1, 4, 8, 32, 128)
        for c in (2048, 4096, 8192, 32768)
    ),
]


def fill(case: Case, pool: torch.Tensor, tables: torch.Tensor) -> None:
    """Keys of every page; for ordered scores all keys are one vector, and scales alone differ."""
    values, scales = INDEX_LAYOUTS[case.layout].views(pool, PAGE)
    if case.layout == "index_fp4":
        values.random_(0, 256)
        scales.random_(118, 128)
        return
    for part in values.view(torch.uint8).split(1 << 14):
        part.random_(0, 112)  # finite, of one sign
        part.bitwise_or_(torch.randint_like(part, 2) << 7)
    scales.uniform_(0.5, 1.5)
    if case.scores != "random":
        values.view(torch.uint8)[:] = values.view(torch.uint8)[0, 0]
        scales.fill_(1.0)
    if case.scores == "ascending":
        steps = torch.arange(1, tables.shape[2] * PAGE + 1, device=pool.device).float()
        for table in tables.flatten(0, 1):
            scales[table.long()] = steps.view(-1, PAGE, 1) * 1e-6


def logits_of_pages(case: Case, inputs: dict, pool: torch.Tensor, tables: torch.Tensor) -> Logits:
    """DeepGEMM's logits of requests; its rows hold one query or two, more are flattened."""
    import deep_gemm  # noqa: PLC0415

    atom = 2 if case.next_n % 2 == 0 else 1
    q, weights, lens = inputs["q"], inputs["weights"], inputs["row_lens"]
    rows = len(q) // atom
    lens = lens.view(rows, atom)
    flat = [table.repeat_interleave(rows // len(table), 0) for table in tables]
    cache = pool.view(-1, PAGE, 1, INDEX_LAYOUTS[case.layout].bytes_per_entry)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, sms)
    q = q.view(rows, atom, case.heads, 128)

    def logits(i: int, of: slice) -> torch.Tensor:
        return deep_gemm.fp8_paged_mqa_logits(
            q, cache, weights, lens, flat[i], plan, case.width, clean_logits=False
        )

    return logits


def logits_of_gathered(case: Case, inputs: dict, pool: torch.Tensor, tables: torch.Tensor) -> Logits:
    """DeepGEMM's logits of some queries of a prompt, whose keys were gathered before."""
    import deep_gemm  # noqa: PLC0415

    values, scales = INDEX_LAYOUTS[case.layout].views(pool, PAGE)
    keys = [
        (values[table].flatten(0, 1).contiguous(), scales[table].flatten().contiguous())
        for table in tables[:, 0].long()
    ]
    lens = inputs["row_lens"]
    starts = torch.zeros_like(lens)

    def logits(i: int, of: slice) -> torch.Tensor:
        return deep_gemm.fp8_mqa_logits(
            inputs["q"][of], keys[i], inputs["weights"][of], starts[of], lens[of], clean_logits=False
        )

    return logits


def peers(case: Case, inputs: dict, outputs: dict, pool: torch.Tensor, tables: torch.Tensor) -> dict:
    """Logits of DeepGEMM, then the top-k of their rows, in chunks as engines do it."""
    if not torch.cuda.is_available() or case.layout != "index_fp8" or not HAS_DEEP_GEMM:
        return {}
    rows, lens = len(inputs["q"]), inputs["row_lens"]
    make_logits = logits_of_gathered if case.kind == "prefill" else logits_of_pages
    logits = make_logits(case, inputs, pool, tables)
    step = LOGITS_BYTES // (4 * case.context) if case.kind == "prefill" else rows
    chunks = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def timed(use: Callable[[torch.Tensor, int, slice], object]) -> list[Callable[[], None]]:
        def call(i: int) -> None:
            for of in chunks:
                use(logits(i, of), i, of)

        return [lambda i=i: call(i) for i in range(len(tables))]

    found = {"deep_gemm logits": timed(lambda scores, i, of: None)}
    if not case.table:  # it would look at all columns, whatever they are
        found["deep_gemm + torch.topk"] = timed(
            lambda scores, i, of: torch.topk(scores, case.topk, dim=-1, sorted=False)
        )
    if importlib.util.find_spec("flashinfer") is not None:
        import flashinfer  # noqa: PLC0415

        requests = torch.arange(rows, device="cuda", dtype=torch.int32) // (rows // tables.shape[1])
        positions, slots = (torch.empty_like(outputs[name]) for name in ("out_positions", "out_slots"))
        found["deep_gemm + flashinfer"] = timed(
            lambda scores, i, of: flashinfer.top_k_page_table_transform(
                scores,
                tables[i],
                lens[of],
                case.topk,
                requests[of],
                page_size=PAGE,
                out=slots[of],
                out_raw_indices=positions[of],
            )
        )
    return found


def torch_on_cpu(
    case: Case, inputs: dict[str, torch.Tensor], pool: torch.Tensor, table: torch.Tensor
) -> dict:
    """A product in bf16 over keys that are widened already, relu, weights, top-k: logits in memory."""
    values, scales = (x[table.long()].flatten(1, 2) for x in INDEX_LAYOUTS[case.layout].views(pool, PAGE))
    k, q = values.to(torch.bfloat16), inputs["q"].to(torch.bfloat16)
    weights, rows = inputs["weights"], len(q) // len(table)

    def call() -> None:
        for r in range(len(table)):
            own = slice(r * rows, (r + 1) * rows)
            products = (q[own].flatten(0, 1) @ k[r].T).view(rows, case.heads, -1).relu_().float()
            torch.topk(torch.einsum("rhn,rh->rn", products, weights[own]) * scales[r, :, 0], case.topk)

    return {"torch": call} if case.kind == "decode" else {}


def work(case: Case, device: str) -> Work:
    layout = INDEX_LAYOUTS[case.layout]
    requests = case.batch if case.kind == "decode" else 1
    rows = case.batch * case.next_n
    per_request = rows // requests
    contexts = torch.full((requests,), case.context)
    if case.lengths == "mixed":
        contexts = (torch.linspace(0.5, 1, requests) * case.context).long()[torch.randperm(requests)]
    entries = int(contexts.sum())
    num_bytes = entries * layout.bytes_per_entry
    rounds = gpu_rotation(num_bytes)
    pages = case.context // PAGE
    order = torch.randperm(rounds * requests * pages, device=device).int()
    tables = order.view(rounds, requests, pages)
    pool = layout.empty(rounds * requests * pages, PAGE, device)
    fill(case, pool, tables)
    tables = torch.nn.functional.pad(tables, (0, case.width // PAGE - pages))
    seen = (contexts[:, None] - per_request + 1 + torch.arange(per_request)).flatten()
    q = torch.randn(rows, case.heads, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, case.heads, device=device)
    inputs = {"q": q, "weights": weights.abs() if case.scores != "random" else weights}
    inputs["row_lens"] = seen.int().to(device)
    seq_lens = contexts.int().to(device)
    shape = (rows, case.topk)
    positions, slots = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    lens = torch.empty(rows, dtype=torch.int32, device=device)
    size = mla_fp8.index_topk_workspace(rows, topk=case.topk, device=device)
    out = {"out_positions": positions, "out_slots": slots, "out_lens": lens}
    out["workspace"] = torch.empty(size, dtype=torch.uint8, device=device)
    keywords = {"layout": layout, "page_size": PAGE, "next_n": per_request}

    def call(i: int) -> None:
        tensors = (inputs["q"], inputs["weights"], pool, tables[i], seq_lens)
        mla_fp8.index_topk(*tensors, **keywords, topk=case.topk, **out)

    def logits(i: int) -> torch.Tensor:
        tensors = (inputs["q"], inputs["weights"], pool, tables[i], seq_lens)
        return mla_fp8.index_logits(*tensors, **keywords, width=case.context)

    baselines = peers(case, inputs, out, pool, tables)
    if device == "cpu":
        baselines = torch_on_cpu(case, inputs, pool, tables[0])
    if rows * case.context <= 1 << 28 and not case.table:
        baselines["index_logits alone"] = [lambda i=i: logits(i) for i in range(rounds)]
        if device == "cuda":
            baselines["index_logits + torch.topk"] = [
                lambda i=i: torch.topk(logits(i), case.topk, dim=-1, sorted=False) for i in range(rounds)
            ]
    flops = 2 * 128 * case.heads * int(seen.sum())
    functions = [lambda i=i: call(i) for i in range(rounds)]
    return Work(case.label, functions, num_bytes + 2 * 4 * rows * case.topk, flops, baselines)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = GPU_CASES if device == "cuda" else CPU_CASES
    run("index_topk", cases, lambda case: work(case, device))
