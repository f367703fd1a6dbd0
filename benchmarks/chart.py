"""A line per op and peer of a CSV of results: how many times as long the peer takes, worst, median and best.
Then a line per op: its times, and its share of what this machine's memory or matrix units give.

python benchmarks/chart.py benchmarks/results/nvidia_h200.csv          prints it
python benchmarks/chart.py --png benchmarks/results/nvidia_h200.csv    writes nvidia_h200.png next to it
"""

import argparse
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from table import Row, by_op, percent, read_csv

TICKS = (0.25, 0.5, 1, 2, 4, 8, 16)
COLUMNS = 8  # of the text, from a tick to the next
TITLE = "How many times as long the others take: right of 1 mla_fp8 is faster"


@dataclass(frozen=True)
class Span:
    """The ratios of all cases of an op that have this peer."""

    op: str
    peer: str
    worst: float
    median: float
    best: float
    cases: int
    worst_case: str

    @property
    def says(self) -> str:
        cases = f"{self.cases} cases" if self.cases > 1 else "1 case"
        return f"{self.median:.2f}x, {self.worst:.2f} to {self.best:.2f} in {cases}"


def spans(rows: Iterable[Row]) -> list[Span]:
    found = []
    for op, cases in by_op(rows).items():
        for peer in dict.fromkeys(name for case in cases for name in case.ratios):
            ratios = {case.label: case.ratios[peer] for case in cases if peer in case.ratios}
            worst = min(ratios, key=ratios.__getitem__)
            median, best = statistics.median(ratios.values()), max(ratios.values())
            found.append(Span(op, peer, ratios[worst], median, best, len(ratios), worst))
    return found


@dataclass(frozen=True)
class Times:
    """Our own times in all cases of an op."""

    op: str
    shortest: float  # us
    longest: float
    share: float  # median of the ceiling, in %
    cases: int

    @property
    def says(self) -> str:
        cases = f"{self.cases} cases" if self.cases > 1 else "1 case"
        us = f"{self.shortest:,.0f}" + (f" to {self.longest:,.0f}" if self.cases > 1 else "")
        of_ceiling = f", {percent(self.share)} of the ceiling" if self.share else ""
        return f"{us} us in {cases}{of_ceiling}"


def times(rows: Iterable[Row]) -> list[Times]:
    found = []
    for op, cases in by_op(rows).items():
        us = [case.ours.us for case in cases]
        share = statistics.median(case.percent_of_ceiling for case in cases)
        found.append(Times(op, min(us), max(us), share, len(cases)))
    return found


def column(ratio: float) -> int:
    """Where a ratio stands in the text; what is beyond the ticks, at their ends."""
    clamped = min(max(ratio, TICKS[0]), TICKS[-1])
    return round(COLUMNS * math.log2(clamped / TICKS[0]))


def text(found: list[Span], own: list[Times]) -> str:
    """For a terminal: the peers if there are any, then each op by itself."""
    margin = max(len(each.op) for each in own) + 2
    lines = ["Times of each op; the ceiling is a copy or a matrix product of the same size", ""]
    lines += [f"{each.op:<{margin}}{each.says}" for each in own]
    return "\n".join(([of_peers(found), ""] if found else []) + lines)


def of_peers(found: list[Span]) -> str:
    """Dashes from the worst to the best, o the median, | one."""
    names = [f"{span.op}, {span.peer}" for span in found]
    margin = max(map(len, names)) + 2
    scale = "".join(f"{f'1/{round(1 / x)}' if x < 1 else x:<{COLUMNS}}" for x in TICKS)
    lines = [TITLE, "", " " * margin + scale.rstrip()]
    for name, span in zip(names, found, strict=True):
        marks = [" "] * (column(TICKS[-1]) + 1)
        marks[column(1)] = "|"
        for i in range(column(span.worst), column(span.best) + 1):
            marks[i] = "-"
        marks[column(span.median)] = "o"
        lines.append(f"{name:<{margin}}{''.join(marks)}  {span.says}")
    slowest = min(found, key=lambda span: span.worst)
    lines += ["", f"Worst: {slowest.worst:.2f}x {slowest.peer} in {slowest.op}, {slowest.worst_case}"]
    return "\n".join(lines)


def draw(found: list[Span], title: str, path: Path) -> None:
    """The same as a picture; the ending of ``path`` says in which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 0.32 * len(found) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvline(1, color="grey", linewidth=1)
    places = range(len(found))
    axes.hlines(places, [span.worst for span in found], [span.best for span in found], linewidth=4, alpha=0.4)
    axes.plot([span.median for span in found], places, "o")
    for i, span in enumerate(found):
        axes.annotate(span.says, (span.best, i), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [f"{span.op}, {span.peer}" for span in found])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_xlim(min(span.worst for span in found) / 1.2, max(span.best for span in found) * 16)  # the texts
    axes.set(title=f"{title}\n{TITLE}")
    axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--png", action="store_true", help="write a picture next to each file")
    parser.add_argument("--ops", help="these alone, with commas between them (default: all of a file)")
    options = parser.parse_args()
    for path in options.files:
        rows = read_csv(path)
        if options.ops is not None:
            rows = [row for row in rows if row.op in options.ops.split(",")]
        if not rows:
            print(f"{path}: no results")
            continue
        found = spans(rows)
        print(text(found, times(rows)))
        if options.png and not found:
            print("no picture is drawn, which is of peers: no case has one")
        elif options.png:
            draw(found, path.stem.replace("_", " "), path.with_suffix(".png"))
            print(f"written to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
