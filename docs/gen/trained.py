"""The small model that was trained: scores and speed in vLLM by who attends over which cache.

Lines of docs/data/trained.csv are what `examples/trained/evaluate.py table --csv` writes: a line for each
engine and length, and one without length for each measurement of its speed.
"""

import csv

import svg
from results import ROOT, markdown

SOURCE = ROOT / "docs/data/trained.csv"
NAMES = {"stock": "FlashMLA", "ours": "mla_fp8", "whole": "whole layer"}
CACHES = {"fp8": "FP8", "bf16": "bf16"}
OPTIONS = {"drafts": "drafts", "chunks": "steps of 1024", "hisparse": "HiSparse"}
LENGTHS = {"2048": "2 K", "4096": "4 K", "16384": "16 K"}
CHARTED = (
    "stock_bf16", "ours_bf16", "whole_bf16", "stock_fp8", "ours_fp8", "whole_fp8", "ours_fp8_hisparse",
)  # fmt: skip
UNIT = 1e-6  # nats
Row = dict[str, str]


def read() -> dict[str, dict[str, list[Row]]]:
    """{engine: {length: rows}}; the length of speeds is empty, and has a row for each run."""
    found: dict[str, dict[str, list[Row]]] = {}
    with SOURCE.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["engine"], {}).setdefault(row["length"], []).append(row)
    return found


def label(kind: str) -> str:
    cache, *more = kind.split("_")
    return ", ".join([CACHES[cache], *(OPTIONS[option] for option in more)])


def chart_label(engine: str) -> str:
    who, _, kind = engine.partition("_")
    return f"{NAMES[who]}, {label(kind)}"


def right(found: dict[str, list[Row]]) -> str:
    scores = [found[length][0] for length in LENGTHS]
    return "/".join(str(sum(int(row[what]) for row in scores)) for what in ("right", "asked"))


def speed(row: Row, stock: Row) -> str:
    """Tokens/s of decode and of prompts; of others than stock as parts of stock's."""
    pairs = [(row.get(what), stock.get(what)) for what in ("tokens_per_s", "prompt_tokens_per_s")]
    if not all(mine and theirs for mine, theirs in pairs):
        return ""
    return "; ".join(
        f"{float(mine):,.0f}" if row is stock else f"{float(mine) / float(theirs):.2f}"
        for mine, theirs in pairs
    )


def table() -> str:
    """A line for each cache with its options, and one more for a second run of it."""
    found, lines = read(), []
    kinds = dict.fromkeys(engine.partition("_")[2] for engine in found if not engine.startswith("exact"))
    for kind in kinds:
        engines = {who: found[f"{who}_{kind}"] for who in NAMES if f"{who}_{kind}" in found}
        scores = ", ".join(dict.fromkeys(map(right, engines.values())))  # one, if all are equal
        name = label(kind)
        for run in range(max(len(engine[""]) for engine in engines.values())):
            rows = {who: engine[""][run] for who, engine in engines.items() if run < len(engine[""])}
            speeds = [speed(rows.get(who, {}), rows.get("stock", {})) for who in NAMES]
            lines.append([f"{name}, again" if run else name, scores, *speeds])
    return markdown(["cache", "right", *NAMES.values()], lines)


def chart() -> str:
    """How far answers' logprobs are away: scores are equal everywhere."""
    found = read()
    groups = {
        f"{name} tokens": {
            chart_label(engine): float(found[engine][length][0]["exact_away"]) / UNIT for engine in CHARTED
        }
        for length, name in LENGTHS.items()
    }
    note = "difference of an answer's logprob, mean, in millionths"
    return svg.bars("How far from exact attention", note, groups, "{:.0f}")


def parts() -> dict[str, str]:
    return {"trained": table()}


def images() -> dict[str, str]:
    return {"trained.svg": chart()}
