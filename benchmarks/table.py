"""The CSV files of results, one row per case: harness.py writes them, plot.py and ci/ read them."""

import csv
import re
from pathlib import Path

COLUMNS = ["op", "case", "us", "gbps", "tflops", "percent_of_ceiling", "baselines"]
RATIO = re.compile(r"([\d.]+)x ([^\d\s](?:\S| (?! ))*)")  # two blanks end the name of a baseline


def ratios(baselines: str) -> dict[str, float]:
    """``"0.85x copy  27.0x torch  error 1e-3"`` as ``{"copy": 0.85, "torch": 27.0}``."""
    return {name: float(ratio) for ratio, name in RATIO.findall(baselines)}


def read_csv(path: Path) -> list[list[str]]:
    """The rows below the header; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row and row != COLUMNS]


def write_csv(path: Path, rows: list[list[str]], whole_op: bool) -> None:
    """Puts the rows in place of all of their op, or of those of the same cases."""
    width = 1 if whole_op else 2
    replaced = {tuple(row[:width]) for row in rows}
    kept = [row for row in read_csv(path) if tuple(row[:width]) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *sorted([*kept, *rows], key=lambda row: row[0])])
