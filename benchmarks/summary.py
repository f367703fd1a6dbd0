"""Worst and best of real rows against FlashMLA: a line per kind of rows, a column per number of heads.

python benchmarks/summary.py benchmarks/results/nvidia_h200.csv
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from table import ratios, read_csv

CASE = re.compile(r"(?P<shape>.*) h(?P<heads>\d+) [bt]\d+: (?P<kind>.*)")
PEERS = ("flash_mla, pages", "flash_mla")  # the first that a case has: it reads the same bytes


def markdown(rows: Iterable[list[str]]) -> str:
    """A table for each op and form of it (`bf16`: rows of a workspace); empty without FlashMLA."""
    cells: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for op, case, *_, baselines in rows:
        found, measured = CASE.fullmatch(case), ratios(baselines)
        peer = next((name for name in PEERS if name in measured), None)
        if found is None or peer is None:
            continue
        form = f"{op}, bf16" if found["shape"].startswith("bf16 ") else op
        kind = cells[f"`{form}` against `{peer}`"][found["kind"]]
        kind.setdefault(int(found["heads"]), []).append(measured[peer])
    return "\n".join(_table(title, kinds) for title, kinds in cells.items())


def _table(title: str, kinds: dict[str, dict[int, list[float]]]) -> str:
    heads = sorted({h for columns in kinds.values() for h in columns})
    every = {h: [r for columns in kinds.values() for r in columns.get(h, [])] for h in heads}
    lines = [[title, *(f"{h} heads" for h in heads)], ["---"] * (len(heads) + 1)]
    for kind, columns in [*kinds.items(), ("all", every)]:
        lines.append([kind, *(_range(columns.get(h, [])) for h in heads)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _range(measured: list[float]) -> str:
    return f"{min(measured):.2f} to {max(measured):.2f}x" if measured else ""


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(markdown(read_csv(Path(path))), end="")
