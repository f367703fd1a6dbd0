#!/usr/bin/env python3
"""Measures docs/accuracy.csv: the errors of every layout and every backend on the activations of the demo.

  python docs/gen/accuracy.py [--device cuda]          replaces the rows of this device

The demo's layers run over its text (`python -m mla_fp8 demo`). Error of a layout: the layer's output against
float64 over the latents before they were stored. Error of a backend: the very calls of the ops, recorded and
replayed through it, against float64 over what the cache holds. Both are rms errors relative to the rms of the
exact result.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_fp8.recording import Call

TARGET = Path(__file__).resolve().parents[2] / "docs/accuracy.csv"
COLUMNS = ["device", "model", "what", "layout", "backend", "layer", "rms_error"]
Row = dict[str, str]
CALLS, TOKENS = 12, 16
PER_TOKEN = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


def read() -> list[Row]:
    with TARGET.open(newline="") as file:
        return list(csv.DictReader(file))


def measure(model: str, device: str) -> list[Row]:
    """One row per layer and layout, and one per op, layout and backend (mean over the recorded calls)."""
    import torch  # noqa: PLC0415

    from mla_fp8 import replay  # noqa: PLC0415
    from mla_fp8.demo import run  # noqa: PLC0415
    from mla_fp8.recording import Recorder  # noqa: PLC0415
    from mla_fp8.timing import device_name  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    workload = run.make_workload(parser.parse_args(["--model", model, "--device", device]))
    with Recorder(max_calls=10_000) as recorder:
        results = run.compute(workload, lambda what: print(what, flush=True))
    name = device_name()
    common = {"device": name, "model": model}
    rows = [
        common
        | {
            "what": "layer",
            "layout": layout,
            "backend": "native",
            "layer": str(i),
            "rms_error": f"{e.rms_error:.3e}",
        }
        for (i, layout), e in results.errors.items()
    ]
    errors = defaultdict(list)
    for call in some_of(recorder.calls):
        want = replay.exact(call, device)[0]
        layout = call.layout.name if call.layout else "bf16 workspace"
        for backend, attend in replay.runnable(call, device)[0].items():
            error = (attend()[0].double() - want).norm() / want.norm()
            errors[call.op, layout, backend].append(float(error))
    for (op, layout, backend), found in errors.items():
        mean = torch.tensor(found).mean().item()
        rows.append(
            common
            | {"what": op, "layout": layout, "backend": backend, "layer": "", "rms_error": f"{mean:.3e}"}
        )
    return rows


def some_of(calls: "list[Call]") -> "Iterator[Call]":
    """The first tokens of calls spread over the run, a few of each op and layout: float64 is slow."""
    groups = defaultdict(list)
    for call in calls:
        groups[call.op, call.options.get("layout")].append(call)
    for group in groups.values():
        for call in group[:: -(-len(group) // CALLS)]:
            few = {name: call.tensors[name][:TOKENS] for name in PER_TOKEN if name in call.tensors}
            yield replace(call, tensors=call.tensors | few)


def tables(rows: list[Row]) -> str:
    """Markdown: errors by layer and layout, then by op, layout and backend, for each device and model."""
    parts = []
    for device, model in dict.fromkeys((row["device"], row["model"]) for row in rows):
        here = [row for row in rows if (row["device"], row["model"]) == (device, model)]
        layers = sorted({row["layer"] for row in here if row["layer"]})
        parts.append(f"## Shapes of {model}, {device}")
        lines = [
            "| layout | " + " | ".join(f"layer {i}" for i in layers) + " |",
            "|---" * (len(layers) + 1) + "|",
        ]
        for layout in dict.fromkeys(row["layout"] for row in here if row["what"] == "layer"):
            by_layer = {
                r["layer"]: float(r["rms_error"]) for r in here if r["layout"] == layout and r["layer"]
            }
            lines.append(f"| `{layout}` | " + " | ".join(f"{by_layer[i]:.2%}" for i in layers) + " |")
        parts.append("\n".join(lines))
        lines = ["| op | layout | backend | rms error |", "|---|---|---|---|"]
        for row in here:
            if row["what"] != "layer":
                error = f"{float(row['rms_error']):.2%}"
                lines.append(f"| `{row['what']}` | {row['layout']} | `{row['backend']}` | {error} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw(rows: list[Row], path: Path) -> None:
    """Per device and model: the errors of the layouts by layer, and of the backends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    groups = list(dict.fromkeys((row["device"], row["model"]) for row in rows))
    figure = Figure(figsize=(11, 3.8 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    for (layers, backends), group in zip(figure.subplots(len(groups), 2, squeeze=False), groups, strict=True):
        here = [row for row in rows if (row["device"], row["model"]) == group]
        for layout in dict.fromkeys(row["layout"] for row in here if row["what"] == "layer"):
            by_layer = [row for row in here if row["layout"] == layout and row["layer"]]
            points = [(row["layer"], 100 * float(row["rms_error"])) for row in by_layer]
            layers.plot(*zip(*points, strict=True), "o-", label=layout, markersize=4)
        layers.set(
            yscale="log",
            xlabel="layer",
            ylabel="rms error, %",
            title="Layouts, against no cache",
        )
        layers.legend(fontsize=7)
        ops = [row for row in here if row["what"] != "layer"]
        names = [f"{row['what']} {row['layout']} {row['backend']}" for row in ops]
        backends.barh(names, [100 * float(row["rms_error"]) for row in ops])
        backends.set(xlabel="rms error, %", title=f"Backends, shapes of {group[1]}, against the cache")
        backends.tick_params(labelsize=6)
        backends.invert_yaxis()
        for axes in (layers, backends):
            axes.grid(linewidth=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.suptitle("; ".join(dict.fromkeys(device for device, _ in groups)))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = [row for model in ("v4", "v32") for row in measure(model, options.device)]
    kept = [row for row in read() if row["device"] != rows[0]["device"]] if TARGET.exists() else []
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    print(f"written to {TARGET}")


if __name__ == "__main__":
    main()
