#!/usr/bin/env python3
"""Compares benchmark results with the committed ones: a Markdown report, exit code 1 if anything got slower.

  python -m mla_fp8 bench --out new && ci/bench_regression.py new/nvidia_h200.csv [--base results.csv]

The base is the file of the same name in benchmarks/results. A case is slower if it takes over 5 % longer, and
over 1 us longer: below that a clock cannot tell. Machines of one name differ; what a case is compared with in
its own run (copies, other kernels) says whether it is the machine: shown where both runs have it. Cases that
only one of them has are listed, and never fail.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import table

HEAD = "| op | case | before us | now us | change | against the same peers |\n|---|---|---|---|---|---|"
PERCENT, MICROSECONDS = 5.0, 1.0
Case = tuple[str, str]  # op, label


def read(path: Path) -> dict[Case, tuple[float, dict[str, float]]]:
    """(microseconds, times that each baseline takes as long) by case."""
    return {(case.op, case.label): (case.ours.us, case.ratios) for case in table.cases(table.read_csv(path))}


@dataclass
class Report:
    slower: list[str] = field(default_factory=list)
    faster: list[str] = field(default_factory=list)
    missing: list[Case] = field(default_factory=list)
    added: list[Case] = field(default_factory=list)
    num_cases: int = 0

    def markdown(self, percent: float) -> str:
        counts = f"{len(self.slower)} slower and {len(self.faster)} faster by over {percent:g} %"
        parts = [f"{self.num_cases} cases, {counts}"]
        for title, lines in (("Slower", self.slower), ("Faster", self.faster)):
            if lines:
                parts.append(f"### {title}\n\n" + "\n".join([HEAD, *lines]))
        for title, cases in (("Not measured now", self.missing), ("New", self.added)):
            if cases:
                parts.append(f"{title}: " + "; ".join(" ".join(case) for case in cases))
        return "\n\n".join(parts) + "\n"


def compare(base: Path, now: Path, percent: float = PERCENT) -> Report:
    old, new = read(base), read(now)
    ops = {op for op, _ in new}  # an op that was not run at all is not missing
    report = Report(num_cases=len(old.keys() & new.keys()))
    report.missing = sorted(case for case in old.keys() - new.keys() if case[0] in ops)
    report.added = sorted(new.keys() - old.keys())
    for case in sorted(old.keys() & new.keys()):
        (before, peers_before), (after, peers_now) = old[case], new[case]
        change = 100 * (after / before - 1)
        if abs(change) <= percent or abs(after - before) <= MICROSECONDS:
            continue
        both = sorted(peers_before.keys() & peers_now.keys())
        peers = ", ".join(f"{name} {peers_before[name]:.2f}x -> {peers_now[name]:.2f}x" for name in both)
        line = f"| {case[0]} | {case[1]} | {before:.2f} | {after:.2f} | {change:+.1f} % | {peers} |"
        (report.slower if change > 0 else report.faster).append(line)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("now", type=Path)
    parser.add_argument("--base", type=Path, help="default: the file of that name in benchmarks/results")
    parser.add_argument("--percent", type=float, default=PERCENT)
    options = parser.parse_args()
    base = options.base or BENCHMARKS / "results" / options.now.name
    if not base.exists():
        print(f"No committed results for this device ({base.name}): nothing to compare with.")
        return 0
    report = compare(base, options.now, options.percent)
    print(report.markdown(options.percent), end="")
    return int(bool(report.slower))


if __name__ == "__main__":
    sys.exit(main())
