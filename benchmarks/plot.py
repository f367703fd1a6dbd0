"""Draws a CSV of results: each case's share of the ceiling, and how many times as long the baselines take.

python benchmarks/plot.py benchmarks/results/nvidia_h200.csv      writes nvidia_h200.png next to it
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from table import Case, Row, by_op, read_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES_PER_CASE = 0.19


def draw(rows: Iterable[Row], title: str, path: Path) -> None:
    """Writes the chart of rows to ``path``; its ending says in which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    ops = by_op(rows)
    heights = [len(cases) + 3 for cases in ops.values()]
    figure = Figure(figsize=(12, INCHES_PER_CASE * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(len(ops), 2, squeeze=False, height_ratios=heights)
    for (shares, against), (op, cases) in zip(panels, ops.items(), strict=True):
        draw_shares(shares, op, cases)
        draw_ratios(against, cases)
        against.set_ylim(shares.get_ylim())
        for axes in (shares, against):
            axes.invert_yaxis()
            axes.tick_params(labelsize=7)
            axes.grid(axis="x", linewidth=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_shares(axes: "Axes", op: str, cases: list[Case]) -> None:
    bars = axes.barh([case.label for case in cases], [case.percent_of_ceiling for case in cases])
    axes.bar_label(bars, [f"{case.ours.us:,.3g} us" for case in cases], padding=3, fontsize=7)
    axes.set(title=op, xlabel="% of the ceiling")
    axes.margins(x=0.15)


def draw_ratios(axes: "Axes", cases: list[Case]) -> None:
    points: dict[str, list[tuple[float, int]]] = {}
    for i, case in enumerate(cases):
        for name, ratio in case.ratios.items():
            points.setdefault(name, []).append((ratio, i))
    axes.axvline(1, color="grey", linewidth=0.8)
    for name, at in points.items():
        axes.plot(*zip(*at, strict=True), "o", label=name, markersize=4)
    axes.set(xscale="log", xlabel="time of the baseline / ours")
    axes.set_yticks(range(len(cases)), [""] * len(cases))
    if points:
        axes.legend(fontsize=7)


def main(paths: list[Path]) -> None:
    for path in paths:
        rows = read_csv(path)
        if not rows:
            raise SystemExit(f"{path} has no rows")
        draw(rows, path.stem.replace("_", " "), path.with_suffix(".png"))
        print(f"written to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
