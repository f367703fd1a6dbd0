"""What the engines of matrix.py found, as tables, and what is wrong with it."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable

# Kernels of attention by their names: the first that fits. Fills and copies are everybody's: they are a line
# of their own, as the padding of query heads is among them.
PARTS = (
    ("indices", r"convert_req_index|remap|combine_topk|global_topk"),
    (
        "indexer",
        r"mqa_logits|index_scan|index_merge|cp_gather_indexer"
        r"|TopKUnified|topKPerRow|(persistent|sampled|cooperative)_topk",
    ),
    ("gather", r"gather_and_upconvert|gather_k_cache|dequantize"),
    ("cache writes", r"concat_and_cache|concat_mla|fused_deepseek|fused_store"),
    ("attention", r"mla_fp8|flash_mla|flash_fwd|_mla_|mla_|sparse_attn|sparse_decode|sparse_prefill|smxx::"),
    ("fills, copies", r"FillFunctor|direct_copy|isneginf|masked_fill|CatArray|Memset|Memcpy DtoD"),
)
NOT_ATTENTION = r"mqa_logits|indexer|compress"
MOST_OF_STOCK = 1.1  # mean difference of logprobs to exact attention
# Error of V4's layer where prompts are rows of bf16: docs/guide/engines.md has the reason.
MOST_OF_STOCK_ROWS, ROWS_FROM_HEADS = 1.15, 64


def part_of(kernel: str) -> str:
    for part, pattern in PARTS:
        unrelated = part == "attention" and re.search(NOT_ATTENTION, kernel)
        if re.search(pattern, kernel) and not unrelated:
            return part
    return "other"


def parts(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds by part."""
    total = dict.fromkeys([*(part for part, _ in PARTS), "other"], 0.0)
    for name, us in kernels.items():
        total[part_of(name)] += us
    return total


def of_attention(kernels: dict[str, float]) -> float:
    return sum(us for part, us in parts(kernels).items() if part in ("attention", "indices", "gather"))


def summary(result: dict) -> str:
    if not result["ok"]:
        return f"FAILED {result['error']}"
    if "v4" in result:
        return "ok"
    words = [f"init {result['init_s']:.0f} s", f"all {result['wall_s']:.0f} s", str(result["calls"])]
    return ", ".join([*words, *result.get("selected", [])])


def difference(a: dict, b: dict) -> float | None:
    """Mean |difference| of the logprobs of the prompts."""
    return _difference(a.get("prompt_logprobs"), b.get("prompt_logprobs"))


def decode_to_prompts(result: dict) -> float | None:
    """The same of what an engine generated: as it was generated, and as the end of a cached prompt."""
    return _difference(result.get("logprobs"), result.get("logprobs_as_prompts"))


def _difference(a: list[list[float]] | None, b: list[list[float]] | None) -> float | None:
    if not (a and b):
        return None
    pairs = zip(a, b, strict=True)
    return statistics.mean(abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))


def exact_of(name: str, found: dict[str, dict]) -> dict:
    """The result of exact attention with the heads and the cache of an engine."""
    _, _, engine = _without_options(name).partition("-")
    return found.get(f"exact-{engine}-eager", {})


def each_once(spans: Iterable[tuple[str, float, float]]) -> Counter:
    """The time of each kernel, of (name, begin, end). Where two run at once, the one that began first has it:
    a dependent launch may begin early and wait, which takes nobody's time.
    """
    times, last_end = Counter(), 0.0
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        times[name] += max(end - max(begin, last_end), 0.0)
        last_end = max(last_end, end)
    return times


def stock_of(engine: str) -> str:
    """The name of the engine as it is; of V4.1 that with V4's rows, as FlashMLA reads no others on Hopper."""
    return f"stock-{engine}".replace("_v41_rows", "_v41")


def _without_options(name: str) -> str:
    return "-".join(name.split("-")[:3])


def calls(result: dict, whose: str) -> int:
    return sum(n for name, n in result.get("calls", {}).items() if name.startswith(whose))


def table(found: dict[str, dict], shown: set[str]) -> str:
    """``shown``: engines that have lines; the others are compared with."""
    ran = {name: result for name, result in found.items() if result["ok"]}
    layers = {name: result["v4"] for name, result in ran.items() if "v4" in result}
    ran = {name: result for name, result in ran.items() if name not in layers}
    parts_of_it = [
        _engines(ran, shown), _speed(ran, shown), _indexer(ran, shown), _v4(layers), _kernels(ran, shown)
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts_of_it))


def _engines(ran: dict[str, dict], shown: set[str]) -> str:
    lines = [
        "| engine | attends | FlashMLA called | mla_fp8 called | to exact attention | decode to prompts "
        "| start, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in ran.items():
        if name not in shown:
            continue
        distance = difference(result, exact_of(name, ran))
        distances = [distance, decode_to_prompts(result)]
        shown_distances = " | ".join("" if x is None else f"{x:.4f}" for x in distances)
        selected = ", ".join(result.get("selected", []))
        counts = f"{calls(result, 'FlashMLA')} | {calls(result, 'mla_fp8')}"
        lines.append(f"| {name} | {selected} | {counts} | {shown_distances} | {result['init_s']:.0f} |")
    return "\n".join(lines)


def _speed(ran: dict[str, dict], shown: set[str]) -> str:
    lines = [
        "| us of a step | attention, a layer: stock | mla_fp8 | of stock "
        "| fills, copies, a layer: stock | mla_fp8 | whole GPU: stock | mla_fp8 | of stock |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, ours in ran.items():
        who, _, label = name.partition("-")
        stock = ran.get(stock_of(label))
        compared = who in ("ours", "calls") and name in shown and stock is not None
        if not compared or "timed" not in ours or "timed" not in stock:
            continue
        for batch, one in ours["timed"].items():
            other = stock["timed"][batch]
            layers = ours["layers"]
            for phase in ("prefill", "decode"):
                if phase in one:
                    what = f"{label}, {phase}, {batch} x {ours.get('context', 4096)}"
                    lines.append(_line(what, other[phase], one[phase], layers))
    return "\n".join(lines) if len(lines) > 2 else ""


def _indexer(ran: dict[str, dict], shown: set[str]) -> str:
    """Our indexer beside vLLM's, with the same attention."""
    lines = [
        "| us of a step | indexer, a layer: logits and top-k | index_topk | of theirs "
        "| whole GPU: with theirs | with index_topk | of theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ours in ran.items():
        who, _, label = name.partition("-")
        theirs = ran.get(f"ours-{label}") or ran.get(f"calls-{label}")
        if who != "index" or name not in shown or "timed" not in ours or theirs is None:
            continue
        for batch, one in ours["timed"].items():
            for phase, kernels in one.items():
                both = theirs["timed"][batch][phase], kernels
                a, b = (parts(each)["indexer"] / ours["layers"] for each in both)
                c, d = (sum(each.values()) for each in both)
                lines.append(
                    f"| {label}, {phase}, {batch} x {ours.get('context', 4096)} | {a:.0f} | {b:.0f} "
                    f"| {b / max(a, 1e-9):.2f} | {c:.0f} | {d:.0f} | {d / max(c, 1e-9):.2f} |"
                )
    return "\n".join(lines) if len(lines) > 2 else ""


def _line(label: str, stock: dict, ours: dict, layers: int) -> str:
    a, b = of_attention(stock) / layers, of_attention(ours) / layers
    whole = sum(stock.values()), sum(ours.values())
    copies = [parts(kernels)["fills, copies"] / layers for kernels in (stock, ours)]
    return (
        f"| {label} | {a:.0f} | {b:.0f} | {b / max(a, 1e-9):.2f} | {copies[0]:.0f} | {copies[1]:.0f} "
        f"| {whole[0]:.0f} | {whole[1]:.0f} | {whole[1] / max(whole[0], 1e-9):.2f} |"
    )


def _v4(layers: dict[str, list[dict]]) -> str:
    lines = [
        "| layer | heads | padded: stock | ours | error: stock | ours | graph, us: stock | ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stock, ours in _v4_pairs(layers):
        label = f"{ours['model']}, ratio {ours['ratio']}, {ours['batch']} | {ours['heads']}"
        times = f"{stock.get('graph_us', '')} | {ours.get('graph_us', '')}"
        errors = f"{stock['error']:.2e} | {ours['error']:.2e}"
        lines.append(f"| {label} | {stock['padded']} | {ours['padded']} | {errors} | {times} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _v4_pairs(layers: dict[str, list[dict]]) -> list[tuple[dict, dict]]:
    stock, ours = (layers.get(f"{who}-0-dsv4", []) for who in ("stock", "calls"))
    return list(zip(stock, ours, strict=False))


def _most_of_stock(layer: dict) -> float:
    """The kernel for rows of bf16 moves the base of its softmax only when a logit exceeds it by 8 (log2). Its
    largest weight is then not exactly 1, as FlashMLA's is, and is rounded to bf16 like the others.
    """
    rows = layer["batch"] != "decode" and layer["heads"] >= ROWS_FROM_HEADS
    return MOST_OF_STOCK_ROWS if rows else MOST_OF_STOCK


def _kernels(ran: dict[str, dict], shown: set[str], most: int = 7) -> str:
    """The longest kernels of attention, so that a wrong pattern above shows."""
    lines = []
    for name in sorted(shown & set(ran)):
        for batch, one in ran[name].get("timed", {}).items():
            for phase in ("prefill", "decode"):
                named = {n: us for n, us in one.get(phase, {}).items() if part_of(n) != "other"}
                longest = sorted(named.items(), key=lambda item: -item[1])[:most]
                lines += [f"{name} {phase} {batch}: {us:8.1f} us {part_of(n)}: {n[:90]}" for n, us in longest]
    return "\n".join(["```", *lines, "```"]) if lines else ""


def _wrong_with_indexer(name: str, result: dict) -> list[str]:
    logits, chosen = calls(result, "DeepGEMM"), calls(result, "mla_fp8.index_topk")
    wrong = [f"{name}: DeepGEMM's logits were made {logits} times, expected 0"] if logits else []
    if result.get("calls") and not chosen:
        wrong.append(f"{name}: index_topk was not called")
    return wrong


def problems(found: dict[str, dict]) -> list[str]:
    wrong = []
    for name, result in found.items():
        if not result["ok"]:
            wrong.append(f"{name}: {result['error']}")
            continue
        if not name.startswith("stock-") and calls(result, "FlashMLA"):
            wrong.append(f"{name}: FlashMLA was called {calls(result, 'FlashMLA')} times, expected 0")
        if "cached_tokens" in result and not any(result["cached_tokens"]):
            wrong.append(f"{name}: no prompt was cached")
        if name.startswith("groups-") and not calls(result, "in groups"):
            wrong.append(f"{name}: no drafts went as a group")
        if "_v41_rows" in name and not calls(result, "rows of 288 bytes"):
            wrong.append(f"{name}: no rows of 288 bytes")
        if name.startswith("index-"):
            wrong += _wrong_with_indexer(name, result)
        if name.startswith(("ours-", "calls-", "groups-", "index-")):
            exact = exact_of(name, found)
            _, _, engine = name.partition("-")
            other = stock_of(engine)
            stock = found.get(other) or found.get(_without_options(other), {})
            distances = difference(result, exact), difference(stock, exact_of(other, found))
            if None not in distances and distances[0] > MOST_OF_STOCK * distances[1]:
                wrong.append(f"{name}: {distances[0]:.4f} to exact attention, stock is at {distances[1]:.4f}")
    layers = {name: result["v4"] for name, result in found.items() if "v4" in result}
    wrong += [
        f"V4's layer, {ours}: error of stock {stock['error']:.2e}"
        for stock, ours in _v4_pairs(layers)
        if not ours["error"] <= _most_of_stock(ours) * stock["error"]
    ]
    return wrong
