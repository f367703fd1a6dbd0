"""The measured results, and what documents make of them: cells and tables."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import table
from table import Case

GPU, CPU = "nvidia_h200", "amd_epyc_2_threads"
H100 = "nvidia_h100_80gb_hbm3"
ON_CPU = re.compile(  # bench_sparse_attention.py: 8 query tokens
    r"(?P<form>decode|prefill_paged|prefill) [\w+]+ h(?P<heads>\d+) topk (?P<topk>\d+)(?:\+(?P<extra>\d+))?"
)
DECODE = re.compile(
    r"(?P<layout>[\w+]+) (?P<keys>\S+)(?: p(?P<page>\d+))?(?: s_q(?P<s_q>\d+))? h(?P<heads>\d+)"
    r" b(?P<batch>\d+)(?:: (?P<kind>.*))?"
)
STRATEGY = re.compile(r"T(?P<tokens>\d+) context (?P<context>\d+) h\d+ topk (?P<topk>\d+)\+(?P<window>\d+)")
GROUPS = re.compile(
    r"(?P<op>\w+) (?P<layout>\w+) (?:(?P<window>\d+)\+)?(?P<topk>\d+) h(?P<heads>\d+)"
    r" (?:s_q(?P<s_q>\d+) b(?P<batch>\d+)|(?P<tokens>\d+) rows): overlap (?P<overlap>[\d.]+)"
)
PREFILL = re.compile(
    r"(?P<layer>layer )?(?P<bf16>bf16 )?(?P<layout>\w+(?:\+\w+)?) (?P<topk>\d+)(?:\+(?P<window>\d+))?"
    r"(?: (?P<rows>\d+)K)? h(?P<heads>\d+) t(?P<tokens>\d+)(?:: (?P<kind>.*))?"
)


def of(device: str, op: str) -> dict[str, Case]:
    """By label."""
    cases = table.by_op(table.read_csv(ROOT / f"benchmarks/results/{device}.csv")).get(op, [])
    return {case.label: case for case in cases}


def matched(device: str, op: str, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Case]]:
    """The cases with what their labels say. ValueError for a label of another form."""
    found = []
    for label, case in of(device, op).items():
        match = pattern.fullmatch(label)
        if match is None:
            raise ValueError(f"{device}, {op}: a label of another form than {pattern.pattern}: {label}")
        found.append((match, case))
    return found


def fixed(ratio: float) -> str:
    """Two decimals below 2, one above: as much as a repeated run confirms."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def cell(case: Case | None, *peers: str) -> str:
    """`us (ratio, ratio)`."""
    if case is None:
        return ""
    ratios = [f"{case.ratios[peer]:.2f}" for peer in peers if peer in case.ratios]
    us = f"{case.ours.us:.1f}" if case.ours.us < 100 else f"{case.ours.us:.0f}"
    return f"{us} ({', '.join(ratios)})" if ratios else us


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    first, *rest = (f"| {' | '.join(row)} |" for row in [head, *map(list, lines)])
    return "\n".join([first, "|---" * len(head) + "|", *rest])
