"""Steps of vLLM and SGLang with FlashMLA and with this package: tables and a chart.

A line of docs/data/engine_steps.csv is one step: all kernels of the GPU (`step_us`), attention in one layer
(`attention_us`), fills and copies of one layer (`copies_us`); `flashmla_...` of the engine as it is.
`counted_as`: `union` counts each microsecond once, `sum` adds kernels up, though some run at once.
"""

import csv

import svg
from results import ROOT, markdown

SOURCE = ROOT / "docs/data/engine_steps.csv"
STEPS = {"decode, 8 requests": "8", "32 requests": "32", "128 requests": "128", "prefill": ""}
Step = dict[str, str]


def read() -> list[Step]:
    with SOURCE.open(newline="") as file:
        return list(csv.DictReader(file))


def of(engine: str, model: str = "") -> list[Step]:
    return [s for s in read() if s["engine"].startswith(engine) and s["model"].startswith(model)]


def cell(step: Step) -> str:
    return f"{step['step_ratio']} ({float(step['step_us']) / 1e3:.2f})"


def table(engine: str, heads: tuple[str, ...] = ("16", "128"), gpu: str = "") -> str:
    """A line per model, layout and number of heads: the time of a step, of FlashMLA's."""
    lines: dict[tuple[str, str, str], Step | dict[str, str]] = {}
    for step in of(engine):
        if step["heads"] in heads and step["gpu"].startswith(gpu):
            line = lines.setdefault((step["model"], step["layout"], step["heads"]), {})
            line[step["requests"]] = cell(step)
    several = {model for model, *_ in lines if len({layout for m, layout, _ in lines if m == model}) > 1}
    rows = [
        [
            f"{model}{f', `{layout}`' if model in several else ''}",
            n,
            *(found.get(r, "") for r in STEPS.values()),
        ]
        for (model, layout, n), found in lines.items()
    ]
    return markdown(["model", "heads", *STEPS], rows)


def attention() -> list[list[str]]:
    """README.md: how many times as fast a layer's attention is in vLLM, from the worst to the best step."""
    rows = []
    for name, wanted in (("decode", True), ("prefill", False)):
        ratios = sorted(
            float(s["flashmla_attention_us"]) / float(s["attention_us"])
            for s in of("vLLM")
            if bool(s["requests"]) == wanted
        )
        ends = [f"{ratios[i]:.1f}x" for i in (0, len(ratios) // 2, -1)]
        rows.append([f"a layer in vLLM, {name}, {len(ratios)} steps", "H200", "vLLM 0.33.0", *ends])
    return rows


def chart() -> str:
    groups = {}
    for model in ("V3.2", "V4"):
        for heads in ("16", "128"):
            found = {
                s["requests"]: s for s in of("vLLM", model) if s["heads"] == heads and s["model"] == model
            }
            groups[f"DeepSeek {model}, {heads} heads on the GPU"] = {
                name if not r or r == "8" else f"decode, {name}": float(found[r]["step_ratio"])
                for name, r in STEPS.items()
            }
    note = "vLLM 0.33 on an H200, contexts of 4096; FlashMLA's time is 1.00"
    return svg.bars("Time of a whole step in vLLM", note, groups, "{:.2f}", 1)


def parts() -> dict[str, str]:
    return {
        "vllm steps": table("vLLM"),
        "sglang steps": table("SGLang"),
    }


def images() -> dict[str, str]:
    return {"engine_steps.svg": chart()}
