"""Worst and best of real rows against FlashMLA: a line per kind of rows, a column per number of heads.

python benchmarks/summary.py benchmarks/results/nvidia_h200.csv
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from table import Case, cases, read_csv

CASE = re.compile(r"(?P<shape>.*) h(?P<heads>\d+) [bt]\d+: (?P<kind>.*)")
PEERS = ("flash_mla, pages", "flash_mla")  # the first that a case has: it reads the same bytes
Kinds = dict[str, dict[int, list[float]]]  # ratios by kind of rows and number of heads


def ratios(measured: Iterable[Case]) -> dict[tuple[str, str], Kinds]:
    """By (op, peer); `OP, bf16`: over rows of a workspace. Empty without FlashMLA."""
    found: dict[tuple[str, str], Kinds] = defaultdict(lambda: defaultdict(dict))
    for case in measured:
        match = CASE.fullmatch(case.label)
        peer = next((name for name in PEERS if name in case.peers), None)
        if match is None or peer is None:
            continue
        form = f"{case.op}, bf16" if match["shape"].startswith("bf16 ") else case.op
        kind = found[form, peer][match["kind"]]
        kind.setdefault(int(match["heads"]), []).append(case.ratios[peer])
    return found


def markdown(measured: Iterable[Case]) -> str:
    """A table for each op and form of it."""
    tables = ratios(measured).items()
    return "\n".join(table(f"`{op}` against `{peer}`", kinds) for (op, peer), kinds in tables)


def table(title: str, kinds: Kinds) -> str:
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
        print(markdown(cases(read_csv(Path(path)))), end="")
