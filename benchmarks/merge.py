"""Brings new results into the committed ones, and writes everything again that is made from them.

    python benchmarks/bench_sparse_decode.py --csv new && python benchmarks/merge.py new

New rows take the place of those of the same cases. Rows that were measured where there is no git get the
commit given, or the one that is checked out.
"""

import argparse
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from table import cases, read_csv, write_csv

ROOT = Path(__file__).resolve().parents[1]
RESULTS, GENERATE = ROOT / "benchmarks/results", ROOT / "docs/gen/generate.py"


def head() -> str:
    return subprocess.check_output(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], text=True
    ).strip()


def main(arguments: list[str]) -> list[str]:
    """Returns the names of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="of <device>.csv")
    parser.add_argument("--commit", help="of rows that name none; default: HEAD")
    options = parser.parse_args(arguments)
    commit, files = options.commit or head(), sorted(options.folder.glob("*.csv"))
    if not files:
        raise SystemExit(f"{options.folder}: no CSV")
    for path in files:
        new = [replace(row, commit=row.commit or commit) for row in read_csv(path)]
        target = RESULTS / path.name
        old = {(case.op, case.label): case for case in cases(read_csv(target))}
        gone: Counter[str] = Counter()
        for case in cases(new):
            if before := old.get((case.op, case.label)):
                gone.update(before.rows.keys() - case.rows.keys())
        write_csv(target, new, whole_op=False)
        ops, measured = {row.op for row in new}, {(row.op, row.case) for row in new}
        older = {(row.op, row.case) for row in read_csv(target) if row.op in ops} - measured
        print(f"{target}: {len(measured)} new, {len(older)} of the same ops keep older rows")
        for name, count in gone.items():
            print(f"  {name} was not measured again in {count}: is it installed there?")
    subprocess.run([sys.executable, str(GENERATE)], check=True)
    return [path.name for path in files]


if __name__ == "__main__":
    main(sys.argv[1:])
