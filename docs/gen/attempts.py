"""docs/notebook/attempts.md from attempts.csv: every change of a kernel that was tried, by kernel."""

import csv
from collections import Counter

from results import ROOT, markdown

SOURCE = ROOT / "docs/notebook/attempts.csv"
COLUMNS = [
    "date", "commit", "device", "kernel", "change", "predicted", "case", "before", "after", "verdict", "note",
]  # fmt: skip
KERNELS = (
    "valid keys", "gather", "few_heads", "many_heads", "bf16_tiles", "portable", "cache ops", "quantize_kv",
    "dequantize_kv", "combine_topk_swa_indices", "combine_topk_swa_indices_ragged", "paged_attention_ragged",
    "sparse attention", "sparse attention, HIP", "indexer",
    "norm_rope_insert", "inverse_rope", "compress_kv", "host rows", "emulators",
)  # fmt: skip
VERDICTS = ("baseline", "kept", "dropped", "no effect", "bound", "not built")
INTRODUCTION = """\
<!-- written by docs/gen/attempts.py from docs/notebook/attempts.csv -->
# What was tried

Every change of a kernel that was tried: what was predicted before, and what was measured after. The source
is `docs/notebook/attempts.csv`, which a spreadsheet or a script can sort. A new attempt is a new line there,
whether it was kept or not.

| verdict | means |
|---|---|
| baseline | the point that the lines after it start from |
| kept | in the code, or was until a later line replaced it |
| dropped | measured, and taken back |
| no effect | measured, and within the noise |
| bound | wrong on purpose, to see what a cost is worth |
| not built | refused on paper, or by the compiler |

Us are of one launch, unless a line says otherwise. `h64` is 64 query heads, `b128` a batch of 128 rows.
`V3.2` is the layout `dsv32` with top-k 2048, `V4` the layout `dsv4` with 512 (or 1024) entries and a window
of 128. The commit is the one that brought the line. Names of kernels: [overview](../kernels/overview.md).

Launches are in a graph over rotating inputs. Decode reads rows from HBM, a million of them. Prefill has 4096
queries, unless a line says otherwise, with entries uniform over 32 K. Lists of numbers are in the order of
the case.

The seven ratios to FlashMLA are, in this order: head_dim 512, 64 heads, top-k 512, of 8 K and 64 K rows; 128
heads, top-k 1024, the same; head_dim 576, 128 heads, top-k 2048, of 8 K, 32 K and 128 K rows.
"""


def read() -> list[dict[str, str]]:
    """ValueError for a line of another form."""
    with SOURCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, 2):
        for column, known in (("kernel", KERNELS), ("verdict", VERDICTS)):
            if row.get(column) not in known:
                wanted = ", ".join(known)
                raise ValueError(f"{SOURCE.name}:{number}: {column} of {wanted}; got {row.get(column)!r}")
        if list(row) != COLUMNS or None in row.values():
            raise ValueError(f"{SOURCE.name}:{number}: columns {', '.join(COLUMNS)}; got {list(row)}")
    return rows


def cells(row: dict[str, str]) -> list[str]:
    change = row["change"] if not row["predicted"] else f"{row['change']} (predicted: {row['predicted']})"
    arrow = " -> ".join(filter(None, (row["before"], row["after"])))
    measured = ": ".join(filter(None, (row["case"], arrow)))
    commit = f"`{row['commit']}`" if row["commit"] else ""
    return [text.replace("|", "\\|") for text in (change, measured, row["verdict"], row["note"], commit)]


def document() -> str:
    rows, sections = read(), []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        counts = Counter(row["verdict"] for row in mine)
        tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        table = markdown(["change", "measured", "verdict", "what it said", "commit"], map(cells, mine))
        dates = sorted({row["date"] for row in mine if row["date"]})
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        sections.append(f"## {kernel}\n\n{tally}; {when}, {mine[0]['device']}\n\n{table}\n")
    return "\n".join([INTRODUCTION, *sections])


def files() -> dict[str, str]:
    return {"docs/notebook/attempts.md": document()}
