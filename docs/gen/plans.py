"""Which kernel runs, from the plans that tests/core freezes."""

import csv
from collections import defaultdict

from results import ROOT

PLANS = ROOT / "tests/core/plans.csv"
H200 = {"compute_major": "9", "sms": "132"}


def cell(plan: str) -> str:
    """`few_heads 16 x 4`: 16 heads in a CTA, 4 CTAs of a query; `many_heads 32 + 8`, without a cluster;
    `few_heads 16, walks`."""
    name, *rest = plan.split(", ")
    kernel, *schedule = name.split()
    if not schedule:
        return kernel
    heads = rest[0].split()[0]
    if schedule == ["walk"]:
        return f"{kernel} {heads}, walks"
    return f"{kernel} {heads} {'+' if schedule == ['parts'] else 'x'} {rest[1].split()[0]}"


def keys(row: dict[str, str]) -> str:
    first = f"window of {row['keys']}" if row["window"] == "1" else f"{row['keys']} keys"
    return f"`{row['layout']}`, {first}" + (f" + {row['extra_keys']}" if row["extra_keys"] != "0" else "")


def table(op: str) -> str:
    with PLANS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] == op and row.items() >= H200.items()]
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        if int(row["queries"]) <= 4096:  # not where a kernel ends
            cells[keys(row), row["heads"]][row["queries"]] = cell(row["plan"])
    columns = sorted(max(cells.values(), key=len), key=int)
    lines = [
        f"| cache | heads | {' | '.join(f'{n} queries' if n != '1' else '1 query' for n in columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for (cache, heads), plans in cells.items():
        if all(n in plans for n in columns):
            lines.append(f"| {cache} | {heads} | {' | '.join(plans[n] for n in columns)} |")
    return "\n".join(lines)


def parts() -> dict[str, str]:
    return {"decode plans": table("decode"), "prefill plans": table("prefill")}
