"""What the ways through a prefill layer cost on Hopper, for python/mla_fp8/prefill/costs.py.

Every price is fitted to the results, by least squares of relative errors. docs/notebook/guide.md says which
cases each is from, and has the tables of what follows from them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from results import CPU, GPU, GROUPS, ON_CPU, PREFILL, STRATEGY, markdown, matched, of

from mla_fp8.prefill.costs import COSTS, LayerShape, predict

HEADS = (8, 16, 32, 64)
CONTEXTS = [1 << i for i in range(12, 25)]
MODELS = (("V4-Flash, ratio 4", 512, 128, 4), ("V3.2", 2048, 0, 1))


@dataclass(frozen=True)
class Measured:
    """A case of bench_sparse_prefill.py."""

    layer: bool
    bf16: bool
    topk: int
    window: int
    rows: int
    heads: int
    tokens: int
    ns: float

    @property
    def keys(self) -> int:
        return self.tokens * (self.topk + self.window)

    @property
    def shape(self) -> LayerShape:
        """Of the layer; entries and queries of the benchmark are all valid."""
        window_rows = self.tokens + self.window - 1 if self.window else 0
        return LayerShape(
            num_tokens=self.tokens, num_q_heads=self.heads, topk=self.topk, window_size=self.window,
            num_entries=self.rows, num_window_rows=window_rows, num_keys=self.keys,
        )  # fmt: skip


def measured() -> Iterator[Measured]:
    for found, case in matched(GPU, "sparse_prefill", PREFILL):
        numbers = (int(found[name] or 0) for name in ("topk", "window", "rows", "heads", "tokens"))
        topk, window, rows, heads, tokens = numbers
        bf16 = bool(found["bf16"]) or found["layout"].startswith("bf16")
        yield Measured(
            bool(found["layer"]), bf16, topk, window, rows << 10, heads, tokens, 1e3 * case.ours.us
        )


def fit(columns: list[list[float]], ns: list[float]) -> list[float]:
    """The factors of the columns whose sums are nearest to the times, relative to each; none below 0."""
    a = np.array(columns) / np.array(ns)[:, None]
    found, *_ = np.linalg.lstsq(a, np.ones(len(ns)), rcond=None)
    if (found < 0).any():  # a column that only takes away
        keep = int(found.argmax())
        alone = float(a[:, keep].sum() / (a[:, keep] ** 2).sum())
        return [alone if i == keep else 0.0 for i in range(len(found))]
    return [float(x) for x in found]


def row_ns(device: str = GPU) -> float:
    """`dequantize_kv` of 32 K random slots and more, of both packed layouts."""
    slots, ns = [], []
    for label, case in of(device, "dequantize_kv").items():
        found = re.fullmatch(r"(?:dsv4|dsv32) slots=(\d+) random", label)
        if found and int(found[1]) >= 32768:
            slots.append([float(found[1])])
            ns.append(1e3 * case.ours.us)
    return fit(slots, ns)[0]


def per_heads(wanted: Callable[[Measured], bool], heads: tuple[int, ...]) -> list[tuple[int, list[float]]]:
    """(heads, [per key, per query token]) of FP8 pages, straight."""
    found = []
    for h in heads:
        cases = [m for m in measured() if m.heads == h and wanted(m)]
        if cases:
            found.append((h, fit([[m.keys, m.tokens] for m in cases], [m.ns for m in cases])))
    return found


def mean_key(wanted: Callable[[Measured], bool]) -> list[tuple[int, float]]:
    """Per key of bf16 rows, without what the rows of a layer cost."""
    row, found = row_ns(), []
    for h in HEADS:
        cases = [m for m in measured() if m.heads == h and wanted(m)]
        rows = [row * (m.rows + m.shape.num_window_rows) if m.layer else 0.0 for m in cases]
        if cases:
            rest = [(m.ns - r) / m.keys for m, r in zip(cases, rows, strict=True)]
            found.append((h, fit([[1.0]] * len(rest), rest)[0]))
    return found


def select() -> list[float]:
    """[per layer, per index and row of the region]: what `selected` costs besides rows and keys."""
    columns, ns, row = [], [], row_ns()
    for m, case in matched(GPU, "prefill_strategies", STRATEGY):
        tokens, context, topk, window = (int(m[name]) for name in ("tokens", "context", "topk", "window"))
        entries = context // 4
        more_rows = min(entries, tokens * topk) - entries
        ns.append(1e3 * (case.peers["selected"].us - case.ours.us) - more_rows * row)
        columns.append([1.0, entries + tokens * (topk + window)])
    return fit(columns, ns)


def grouped_key() -> list[tuple[int, float]]:
    """Per key of prompts whose neighbours go in groups, with an overlap of 0.9, less what a layer costs."""
    found: dict[int, list[float]] = {}
    for m, case in matched(GPU, "query_groups", GROUPS):
        if m["op"] == "prefill" and m["overlap"] == "0.9":
            keys = int(m["tokens"]) * (int(m["topk"]) + int(m["window"] or 0))
            ns = 1e3 * case.ours.us - COSTS["sm90"].grouped
            found.setdefault(int(m["heads"]), []).append(ns / keys)
    return [(heads, fit([[1.0]] * len(ns), ns)[0]) for heads, ns in sorted(found.items())]


def rounded(value: float) -> str:
    number = float(f"{value:.3g}")
    return f"{number:_.0f}" if number >= 1000 else f"{number:g}"


def table(prices: list[tuple[int, float]]) -> str:
    return "(" + "".join(f"({heads}, {rounded(price)}), " for heads, price in prices).rstrip() + ")"


def source() -> str:
    """Keyword arguments of Costs, as lines of Python."""
    pages = per_heads(lambda m: not m.layer and not m.bf16, (*HEADS, 128))
    per_layer, reference = select()
    lines = [
        f"row={rounded(row_ns())}, reference={rounded(reference)}, select={rounded(per_layer)},",
        f"workspace_key={table(mean_key(lambda m: m.bf16 and m.topk > 0))},",
        f"window_key={table(mean_key(lambda m: m.bf16 and not m.topk))},",
        f"paged_key={table([(h, key) for h, (key, _) in pages])},",
        f"paged_token={table([(h, token) for h, (_, token) in pages])},",
        f"grouped_key={table(grouped_key())},",
    ]
    return "\n".join(" " * 8 + line for line in lines)


def cpu_keys(*forms: str) -> list[tuple[int, float]]:
    """Per key, by heads."""
    keys: dict[int, list[list[float]]] = {}
    ns: dict[int, list[float]] = {}
    for m, case in matched(CPU, "sparse_attention", ON_CPU):
        if m["form"] in forms:
            heads, tokens = int(m["heads"]), 8
            keys.setdefault(heads, []).append([float(tokens * (int(m["topk"]) + int(m["extra"] or 0)))])
            ns.setdefault(heads, []).append(1e3 * case.ours.us)
    return [(heads, fit(keys[heads], ns[heads])[0]) for heads in sorted(keys)]


def cpu_source() -> str:
    """The same for the CPU, where a window costs what other rows do."""
    rows, pages = table(cpu_keys("prefill")), table(cpu_keys("decode", "prefill_paged"))
    lines = [
        f"row={rounded(row_ns(CPU))}, paged_key={pages},",
        f"workspace_key={rows}, window_key={rows},",
    ]
    return "\n".join(" " * 8 + line for line in lines)


def prices() -> str:
    """As a table of the document."""
    c, heads = COSTS["sm90"], (*HEADS, 128)
    lines = []
    for name in ("workspace_key", "window_key", "paged_key", "paged_token", "grouped_key"):
        values = dict(getattr(c, name))
        lines.append([f"`{name}`", *(f"{values[h]:g}" if h in values else "" for h in heads)])
    single = ", ".join(
        f"`{n}` {getattr(c, n):g}" for n in ("row", "reference", "select", "look_up", "grouped")
    )
    return (
        f"{markdown(['ns', *(f'{h} heads' for h in heads)], lines)}\n\nPer row, index or layer: {single} ns."
    )


def crossings() -> str:
    """From which context on `direct` is the cheapest."""
    tokens, lines = (64, 512, 2048, 8192), []
    for name, topk, window, ratio in MODELS:
        for heads in HEADS:
            cells = []
            for n in tokens:
                first = None
                for context in reversed(CONTEXTS):
                    rows = n + window - 1 if window else 0
                    shape = LayerShape(
                        num_tokens=n, num_q_heads=heads, topk=topk, window_size=window,
                        num_entries=context // ratio, num_window_rows=rows, num_keys=n * (topk + window),
                    )  # fmt: skip
                    costs = predict(shape, "sm90")
                    if min(costs, key=costs.__getitem__) != "direct":
                        break
                    first = context
                text = (
                    "never"
                    if first is None
                    else f"{first >> 10} K"
                    if first < 1 << 20
                    else f"{first >> 20} M"
                )
                cells.append("any" if first == CONTEXTS[0] else text)
            lines.append([f"{name}, {heads} heads", *cells])
    return markdown(["", *(f"{n} tokens" for n in tokens)], lines)


def pairs() -> Iterator[tuple[Measured, Measured]]:
    """(through the workspace, straight from the pages): layers that were measured in both ways.

    `direct` is its kernel, whether the benchmark calls it a layer or not.
    """
    every = list(measured())
    for whole in every:
        if whole.layer and whole.bf16 and whole.topk:
            same = (whole.topk, whole.window, whole.rows, whole.heads, whole.tokens)
            for direct in every:
                if not direct.bf16 and same == (
                    direct.topk, direct.window, direct.rows, direct.heads, direct.tokens
                ):  # fmt: skip
                    yield whole, direct
                    break


def compared() -> str:
    """Measured and by the formula, for layers that were measured in both ways."""
    lines = []
    for whole, direct in pairs():
        by = predict(whole.shape, "sm90")
        window = f" + {whole.window}" if whole.window else ""
        name = f"{whole.tokens} tokens, {whole.topk}{window} of {whole.rows >> 10} K, {whole.heads} heads"
        both = [whole.ns, by["whole"], direct.ns, by["direct"]]
        texts = [f"{x / 1e3:.0f}" for x in both]
        best = 0 if whole.ns < direct.ns else 2
        texts[best] = f"**{texts[best]}**"
        lines.append([name, *texts])
    return markdown(["us", "`whole`", "formula", "`direct`", "formula"], lines)


def parts() -> dict[str, str]:
    return {"prices": prices(), "crossings": crossings(), "compared": compared()}
