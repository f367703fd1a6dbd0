#!/usr/bin/env python3
"""Measures docs/data/accuracy.csv: errors of every layout and every backend on the activations of the demo.

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

import svg

if TYPE_CHECKING:
    from mla_fp8.tools.recording import Call

TARGET = Path(__file__).resolve().parents[2] / "docs/data/accuracy.csv"
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

    from mla_fp8.tools import replay  # noqa: PLC0415
    from mla_fp8.tools.demo import run  # noqa: PLC0415
    from mla_fp8.tools.recording import Recorder  # noqa: PLC0415
    from mla_fp8.tools.timing import device_name  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    workload = run.make_workload(parser.parse_args(["--all", "--model", model, "--device", device]))
    with Recorder(max_calls=10_000) as recorder:
        results = run.compute(workload)
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
        layout = call.layout_name or "bf16 workspace"
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
        groups[call.op, call.layout_name].append(call)
    for group in groups.values():
        for call in group[:: -(-len(group) // CALLS)]:
            few = {name: call.tensors[name][:TOKENS] for name in PER_TOKEN if name in call.tensors}
            yield replace(call, tensors=call.tensors | few)


def by_layout() -> dict[str, list[float]]:
    """Errors of the layers' outputs in percent, of all devices."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in read():
        if row["what"] == "layer":
            found[row["layout"]].append(100 * float(row["rms_error"]))
    return {layout: sorted(errors) for layout, errors in found.items()}


def chart() -> str:
    groups: dict[str, list[svg.Range]] = {"rows of 576 values": [], "rows of 512 values": []}
    for name, e in by_layout().items():
        if not name.endswith("_fnuz"):  # as the layout without it
            title = "rows of 576 values" if name in ("dsv32", "fp8_e4m3", "bf16") else "rows of 512 values"
            groups[title].append(svg.Range(name, e[0], e[len(e) // 2], e[-1]))
    note = "root mean square, from the best to the worst layer of the demo"
    return svg.ranges("What a layout costs a layer's output", note, groups, unit=" %")


def images() -> dict[str, str]:
    return {"accuracy.svg": chart()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = [row for model in ("v4", "v41", "v32") for row in measure(model, options.device)]
    kept = [row for row in read() if row["device"] != rows[0]["device"]] if TARGET.exists() else []
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    print(f"written to {TARGET}")


if __name__ == "__main__":
    main()
