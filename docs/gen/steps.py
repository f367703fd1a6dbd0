"""Where the time of an engine's step goes: tables and charts from docs/data/step_parts.csv.

A line is a part of a layer in one step: all kernels that belong to it by ci/engines/parts.py, in microseconds
(`us`) and `launches`. `who` is `stock` for the engine as it is; the others name what of this package ran.
"""

import csv
import re
from collections import defaultdict

import svg
from results import ROOT, markdown

SOURCE = ROOT / "docs/data/step_parts.csv"
# What a reader sees of the parts; the rest is no layer's.
SHOWN = {
    "attention": ("attention",),
    "indexer": ("indexer",),
    "queries": ("queries",),
    "keys, caches": ("keys and caches", "rows of pages", "indices"),
    "copies": ("copies, fills",),
    "norms": ("norms, activation",),
    "GEMMs": ("GEMMs",),
    "hyper-connections": ("hyper-connections",),
}
WHO = {
    "stock": "FlashMLA",
    "ours": "mla_fp8",
    "calls": "mla_fp8",
    "index": "+ index_topk",
    "layer": "+ layer ops",
    "whole": "+ index_topk",
}
Bar = dict[str, float]
Case = tuple[str, str, str, str, str]  # engine, model, heads, phase, requests


def read() -> dict[Case, dict[str, dict[str, tuple[float, float]]]]:
    """By case and by whose kernels: (microseconds, launches) of each part of a layer."""
    found: dict[Case, dict[str, dict[str, tuple[float, float]]]] = defaultdict(lambda: defaultdict(dict))
    with SOURCE.open(newline="") as file:
        for line in csv.DictReader(file):
            case = tuple(line[name] for name in ("engine", "model", "heads", "phase", "requests"))
            found[case][line["who"]][line["part"]] = float(line["us"]), float(line["launches"])
    return found


def bar(parts: dict[str, tuple[float, float]]) -> Bar:
    shown = {name: sum(parts.get(p, (0.0, 0.0))[0] for p in of) for name, of in SHOWN.items()}
    return {name: us for name, us in shown.items() if us > 0}


def named(case: Case) -> str:
    _, _, heads, phase, requests = case
    what = "prefill of 4096 tokens" if phase == "prefill" else f"decode, {requests} requests"
    return f"{what}, {heads} heads"


def models() -> dict[tuple[str, str], list[Case]]:
    found = defaultdict(list)
    for case in read():
        found[case[:2]].append(case)
    return found


def stem(engine: str, model: str) -> str:
    return re.sub("[.,-]", "", f"step_{engine.partition(' ')[0]}_{model}".lower()).replace(" ", "_")


def images() -> dict[str, str]:
    cases, made = read(), {}
    for (engine, model), of in models().items():
        groups = {
            named(case): {WHO[who]: bar(parts) for who, parts in cases[case].items()}
            for case in of
            if case[4] != "32"
        }
        title, note = f"A layer of {model} in {engine.split()[0]}", "microseconds of a layer on the whole GPU"
        made[f"{stem(engine, model)}.svg"] = svg.stacked(title, note, groups)
    return made


def table() -> str:
    """What is no GEMM and no hyper-connection, with FlashMLA and with most of what this package has for a
    layer but its indexer."""
    steps = {("prefill", "8"): "prefill", ("decode", "8"): "decode of 8", ("decode", "128"): "decode of 128"}
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for (engine, model, heads, *step), sides in read().items():
        if tuple(step) not in steps:
            continue
        mine = {
            who: sum(us for p, us in bar(parts).items() if p not in NOT_OURS) for who, parts in sides.items()
        }
        who = next(who for who in ("layer", "ours", "calls") if who in mine)
        row = f"{model.partition(',')[0]}, {engine.partition(' ')[0]}", heads, WHO[who].removeprefix("+ ")
        cell = f"{mine['stock']:.0f} → {mine[who]:.0f} ({mine[who] / mine['stock']:.2f})"
        rows.setdefault(row, {})[steps[tuple(step)]] = cell
    names = list(steps.values())
    lines = [[*row, *(cells.get(name, "") for name in names)] for row, cells in rows.items()]
    return markdown(["model", "heads", "with", *names], lines)


NOT_OURS = ("GEMMs", "hyper-connections")


def parts() -> dict[str, str]:
    return {"step parts": table()}
