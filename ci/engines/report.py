"""What the engines of matrix.py found, as tables, and what is wrong with it."""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable

import parts

WRITES_ROWS = ("layer", "whole", "ranks")  # who of engine.py
TOPK = 2047  # tokens behind which an indexer has a choice
MOST_OF_STOCK = 1.1  # mean difference of logprobs to exact attention
OF_EXACT_ROWS = {  # by a cache: the same model over bf16 rows
    "fp8_ds_mla": "bfloat16", "glm52": "glm52_bf16", "sglang": "sglang_bf16", "sglang_pages": "sglang_bf16",
    "two": "two_bf16",
}  # fmt: skip
# Error of V4's layer where prompts are rows of bf16: docs/notebook/engines.md has the reason.
MOST_OF_STOCK_ROWS, ROWS_FROM_HEADS = 1.15, 64


def summary(result: dict) -> str:
    if not result["ok"]:
        return f"FAILED {result['error']}"
    if "v4" in result:
        return "ok"
    words = [f"init {result['init_s']:.0f} s", f"all {result['wall_s']:.0f} s", str(result["calls"])]
    return ", ".join([*words, *result.get("selected", [])])


def difference(a: dict, b: dict, most: int | None = None) -> float | None:
    """Mean |difference| of the logprobs of the prompts, of their first ``most`` tokens."""
    both = [[one[:most] for one in x.get("prompt_logprobs", ())] for x in (a, b)]
    return _difference(*both)


def decode_to_prompts(result: dict) -> float | None:
    """The same of what an engine generated: as it was generated, and as the end of a cached prompt."""
    return _difference(result.get("logprobs"), result.get("logprobs_as_prompts"))


def _difference(a: list[list[float]] | None, b: list[list[float]] | None) -> float | None:
    if not (a and b):
        return None
    pairs = zip(a, b, strict=True)
    return statistics.mean(abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))


def exact_of(name: str, found: dict[str, dict]) -> tuple[dict, int | None]:
    """Exact attention with the heads and the cache of an engine, and how many tokens of a prompt to compare.

    Who writes rows of its own has other bytes than the engine: it is compared with attention over bf16 rows.
    Who rounds the indexer's keys otherwise chooses others, but not among the first TOPK tokens.
    """
    who, heads, cache = _without_options(name).split("-")
    if who in WRITES_ROWS:
        return found.get(f"exact-{heads}-{OF_EXACT_ROWS.get(cache, cache)}-eager", {}), TOPK
    return found.get(f"exact-{heads}-{cache}-eager", {}), None


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
        _engines(ran, shown), _steps(ran, shown), _whole_steps(ran, shown), _first_tokens(ran, shown),
        _v4(layers),
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
        distance = difference(result, *exact_of(name, ran))
        if distance is None and name.startswith("stock-"):  # beside who writes rows
            distance = difference(result, *exact_of(name.replace("stock", WRITES_ROWS[0], 1), ran))
        distances = [distance, decode_to_prompts(result)]
        shown_distances = " | ".join("" if x is None else f"{x:.4f}" for x in distances)
        selected = ", ".join(result.get("selected", []))
        counts = f"{calls(result, 'FlashMLA')} | {calls(result, 'mla_fp8')}"
        lines.append(f"| {name} | {selected} | {counts} | {shown_distances} | {result['init_s']:.0f} |")
    return "\n".join(lines)


ORDER = (
    "stock", "ours", "same", "calls", "groups", "index", "layer", "whole", "ranks", "theirs", "direct",
    "hisparse", "exact",
)  # fmt: skip


def runs(ran: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """Of each engine that was timed, such as "16-fp8_ds_mla-speed", the results by whose kernels it ran."""
    engines: dict[str, dict[str, dict]] = {}
    for name, result in ran.items():
        who, _, label = name.partition("-")
        if "timed" in result:
            engines.setdefault(label, {})[who] = result
    for label, sides in engines.items():
        stock = engines.get(stock_of(label).removeprefix("stock-"), {}).get("stock")
        if stock:
            sides.setdefault("stock", stock)
    return engines


def steps(ran: dict[str, dict]) -> Iterable[tuple[str, dict, dict[str, parts.Step]]]:
    """(engine, {phase, requests, context}, by whose kernels: the step) of every step that was timed."""
    for label, sides in runs(ran).items():
        first = next(iter(sides.values()))
        for batch, one in first["timed"].items():
            for phase in one:
                requests, _, context = batch.partition(" x ")
                what = {
                    "phase": phase, "requests": requests, "context": context or first.get("context", 4096)
                }  # fmt: skip
                found = {
                    who: parts.Step(sides[who]["timed"][batch][phase], sides[who]["layers"])
                    for who in sorted(sides, key=ORDER.index)
                    if phase in sides[who].get("timed", {}).get(batch, {})
                }
                yield label, what, found


def _steps(ran: dict[str, dict], shown: set[str]) -> str:
    tables, named = [], set()
    for label, what, found in steps(ran):
        if not any(f"{who}-{label}" in shown for who in found):
            continue
        title = f"{label}, {what['phase']}, {what['requests']} x {what['context']}"
        tables.append(parts.table(title, found))
        if what["phase"] == "decode" and label not in named:  # of one batch: they are the same in others
            named.add(label)
            tables += ["\n".join([f"{who}-{title}:", *step.named()]) for who, step in found.items()]
    return "\n\n".join(tables)


def _whole_steps(ran: dict[str, dict], shown: set[str]) -> str:
    lines = ["| microseconds of a decode step, from kernel to kernel | requests and contexts |", "|---|---|"]
    for name in sorted(shown & set(ran)):
        if each := ran[name].get("step_us"):
            lines.append(f"| {name} | {', '.join(f'{what}: {us:.0f}' for what, us in each.items())} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _first_tokens(ran: dict[str, dict], shown: set[str]) -> str:
    lines = ["| milliseconds to the first token | median | rounds | least |", "|---|---|---|---|"]
    for name in sorted(shown & set(ran)):
        if ms := ran[name].get("first_token_ms"):
            rounds = ", ".join(f"{x:.2f}" for x in ms["rounds"])
            lines.append(f"| {name} | {ms['median']:.2f} | {rounds} | {ms['least']:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


# The models of engine.py's and sglang_engine.py's ``--kv``.
MODELS = {
    "fp8_ds_mla": "V3.2",
    "glm52": "GLM-5.2",
    "glm53": "GLM-5.3-Flash",
    "two": "V3.2, two GPUs",
    "dsv4": "V4",
    "sglang": "V3.2",
    "sglang_pages": "V3.2, FP8 pages",
    "sglang_v4": "V4",
    "sglang_v41": "V4.1",
    "sglang_v41_levels": "V4.1, two levels",
    "sglang_v41_rows": "V4.1, own rows",
}
COLUMNS = ["gpu", "engine", "model", "heads", "phase", "requests", "context", "who", "part", "us", "launches"]


def csv_of_steps(found: dict[str, dict], gpu: str) -> str:
    """Microseconds and launches of a layer by part, a line each: docs/data/step_parts.csv."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(COLUMNS)
    ran = {name: result for name, result in found.items() if result["ok"]}
    for label, what, sides in steps(ran):
        heads, kv, *_ = label.split("-")
        for who, step in sides.items():
            result = ran.get(f"{who}-{label}") or ran[stock_of(label)]
            engine = f"vLLM {result['vllm']}" if "vllm" in result else f"SGLang {result['sglang']}"
            of = gpu, engine, MODELS[kv], heads, what["phase"], what["requests"], what["context"], who
            lines.writerows([*of, part, f"{us:.2f}", f"{n:.2f}"] for part, (us, n) in step.parts.items() if n)
    return file.getvalue()


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


def _wrong_with_indexer(name: str, result: dict) -> list[str]:
    logits, chosen = calls(result, "DeepGEMM"), calls(result, "mla_fp8.index_topk")
    wrong = [f"{name}: DeepGEMM's logits were made {logits} times, expected 0"] if logits else []
    if result.get("calls") and not chosen:
        wrong.append(f"{name}: index_topk was not called")
    if "_levels" in name and result.get("calls") and not calls(result, "mla_fp8.index_topk_blocks"):
        wrong.append(f"{name}: no blocks were published")
    return wrong


def _wrong_with_hot_rows(name: str, result: dict, found: dict[str, dict]) -> list[str]:
    """Tokens are those of the same engine with all rows on the GPU, and some rows were loaded."""
    wrong, other = [], f"ours-{name.partition('-')[2].removesuffix('-hot')}"
    wanted = found.get(other, {}).get("tokens", [])
    lists = [*result.get("tokens", []), *([[]] * len(wanted))]
    for i, (got, want) in enumerate(zip(lists, wanted, strict=False)):
        first = next((at for at, token in enumerate(want) if got[at : at + 1] != [token]), None)
        if first is not None:
            wrong.append(f"{name}: from token {first} on, prompt {i} has others than in {other}")
    if not result.get("found_and_loaded", (0, 1))[1]:
        wrong.append(f"{name}: no row was loaded")
    if bool(calls(result, "mla_fp8.resolve_hot_rows")) != name.startswith("hisparse-"):
        wrong.append(f"{name}: resolve_hot_rows was called {calls(result, 'mla_fp8.resolve_hot_rows')} times")
    return wrong


def _wrong_with_ranks(name: str, result: dict) -> list[str]:
    """Each of the three launches of an exchange once a layer."""
    wrong = []
    for batch, phases in result.get("timed", {}).items():
        for launch in ("gather_queries", "exchange_states", "exchange_scores"):
            number = sum(n for kernel, (_, n, _) in phases["decode"].items() if launch in kernel)
            if round(number) != result["layers"]:
                wrong.append(f"{name}, {batch}: {launch} ran {number:g} times, expected {result['layers']}")
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
        if name.startswith("groups-") and name.endswith("-uneven") and not calls(result, "in uneven groups"):
            wrong.append(f"{name}: no drafts of unequal number went as a group")
        if name.endswith("-hot"):
            wrong += _wrong_with_hot_rows(name, result, found)
        if "_v41_rows" in name and not calls(result, "rows of 288 bytes"):
            wrong.append(f"{name}: no rows of 288 bytes")
        if name.startswith(("index-", "whole-", "same-")):
            wrong += _wrong_with_indexer(name, result)
        if name.startswith("ranks-"):
            wrong += _wrong_with_ranks(name, result)
        if not name.startswith(("stock-", "exact-")):
            exact = exact_of(name, found)
            _, _, engine = name.partition("-")
            other = f"whole-{engine}" if name.startswith("ranks-") else stock_of(engine)
            stock = found.get(other) or found.get(_without_options(other), {})
            of_stock = exact if name.startswith(WRITES_ROWS) else exact_of(other, found)
            distances = difference(result, *exact), difference(stock, *of_stock)
            if None not in distances and distances[0] > MOST_OF_STOCK * distances[1]:
                whose = other.partition("-")[0]
                wrong.append(
                    f"{name}: {distances[0]:.4f} to exact attention, {whose} is at {distances[1]:.4f}"
                )
    ran = {name: result for name, result in found.items() if result["ok"]}
    wrong += [
        f"{who}-{label}, {what['phase']}, {what['requests']} x {what['context']}: {problem}"
        for label, what, sides in steps(ran)
        for who, step in sides.items()
        if (problem := step.problem())
    ]
    layers = {name: result["v4"] for name, result in found.items() if "v4" in result}
    wrong += [
        f"V4's layer, {ours}: error of stock {stock['error']:.2e}"
        for stock, ours in _v4_pairs(layers)
        if not ours["error"] <= _most_of_stock(ours) * stock["error"]
    ]
    return wrong
