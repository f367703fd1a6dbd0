"""The CSV files of results: one row per case and implementation.

Ratios, rates and shares are computed from the rows, never stored.

=============== ==========================================================================================
op, case        what was measured
implementation  `mla_fp8`; a peer; `ceiling`: a copy of `bytes`, or a matrix product of `flops`, whichever
                takes longer at the rates of a large one in the same run
us              median microseconds
error           of the result, relative to float64 over the dequantised rows
difference      of the worst row of ours from that of a peer, relative (rows as engines send them)
bytes, flops    of the case, in the row of `mla_fp8`
commit          whose kernels ran; of FlashMLA its build (flashmla.py)
=============== ==========================================================================================
"""

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

OURS, CEILING = "mla_fp8", "ceiling"
US = "{:.7g}"  # as the files have it


@dataclass(frozen=True)
class Row:
    op: str
    case: str
    implementation: str
    us: float
    error: float | None = None
    difference: float | None = None
    bytes: int = 0
    flops: int = 0
    commit: str = ""


COLUMNS = [column.name for column in fields(Row)]


@dataclass
class Case:
    """All rows of one case."""

    op: str
    label: str
    rows: dict[str, Row] = field(default_factory=dict)  # by implementation

    @property
    def ours(self) -> Row:
        return self.rows[OURS]

    @property
    def peers(self) -> dict[str, Row]:
        return {name: row for name, row in self.rows.items() if name not in (OURS, CEILING)}

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long each peer takes."""
        return {name: row.us / self.ours.us for name, row in self.peers.items()}

    @property
    def gbps(self) -> float:
        return self.ours.bytes / self.ours.us / 1e3

    @property
    def tflops(self) -> float:
        return self.ours.flops / self.ours.us / 1e6

    @property
    def percent_of_ceiling(self) -> float:
        return 100 * self.rows[CEILING].us / self.ours.us if CEILING in self.rows else 0.0


def percent(share: float) -> str:
    """Of a ceiling. Above it are what lies in a cache, and what ran while the machine was less busy."""
    return f"{share:.0f}%" if share < 100.5 else ">100%"


def cases(rows: Iterable[Row]) -> list[Case]:
    """In the order of their first rows."""
    found: dict[tuple[str, str], Case] = {}
    for row in rows:
        case = found.setdefault((row.op, row.case), Case(row.op, row.case))
        case.rows[row.implementation] = row
    return list(found.values())


def by_op(rows: Iterable[Row]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases(rows):
        found.setdefault(case.op, []).append(case)
    return found


def read_csv(path: Path) -> list[Row]:
    """None if there is no such file. ValueError if its columns are others."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    if head != COLUMNS:
        raise ValueError(f"{path}: the columns must be {', '.join(COLUMNS)}, got {', '.join(head)}")
    return [_parse(dict(zip(COLUMNS, line, strict=True))) for line in lines]


def _parse(cells: dict[str, str]) -> Row:
    def number(name: str) -> float | None:
        return float(cells[name]) if cells[name] else None

    return Row(
        cells["op"], cells["case"], cells["implementation"], float(cells["us"]), number("error"),
        number("difference"), int(cells["bytes"] or 0), int(cells["flops"] or 0), cells["commit"],
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    def text(name: str, value: object) -> str:
        if name == "us":
            return US.format(value)
        if name in ("error", "difference"):
            return "" if value is None else f"{value:.2e}"
        return str(value or "")

    return [text(*pair) for pair in zip(COLUMNS, astuple(row), strict=True)]


def merged(old: Iterable[Row], new: Iterable[Row], whole_op: bool) -> list[Row]:
    """The new rows in place of all of their op, or of those of the same cases; ops in alphabetical order."""
    new = list(new)

    def key(row: Row) -> tuple[str, ...]:
        return (row.op,) if whole_op else (row.op, row.case)

    replaced = {key(row) for row in new}
    places: dict[tuple[str, str], list[Row]] = {}
    for row in (*(row for row in old if key(row) not in replaced), *new):
        places.setdefault((row.op, row.case), []).append(row)
    return sorted((row for case in places.values() for row in case), key=lambda row: row.op)


def write_csv(path: Path, rows: Iterable[Row], whole_op: bool) -> None:
    """Merges the rows into the file."""
    every = merged(read_csv(path), rows, whole_op)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *map(_cells, every)])
