"""What `make docs` adds to the pages: tables and charts of measured results, made from their CSV files.

The Markdown holds a comment where they go; so results are committed once, as numbers, and no picture is.
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/gen")]
import accuracy
import plot
import summary
import table

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.csv"))
PERFORMANCE = "<!-- tables and charts of benchmarks/results: docs/gen/hooks.py -->"
ACCURACY = "<!-- tables and charts of docs/accuracy.csv: docs/gen/hooks.py -->"
HEADER = "| case | us | GB/s | TFLOP/s | % of the ceiling | peers | commit |\n|---|---|---|---|---|---|---|"
REAL_ROWS = "_real_rows"  # hundreds of cases: worst and best of each kind say it
IMAGES = Path(tempfile.mkdtemp())


def device(path: Path) -> str:
    names = {"nvidia": "NVIDIA", "amd": "AMD", "epyc": "EPYC"}
    return " ".join(names.get(w, w.upper() if any(map(str.isdigit, w)) else w) for w in path.stem.split("_"))


def number(value: float, form: str) -> str:
    """Empty where an op moves no bytes worth counting, or computes nothing."""
    return format(value, form) if value else ""


def line(case: table.Case) -> str:
    errors = {name: row.error for name, row in case.rows.items() if row.error is not None}
    against = [f"{ratio:.2f}x {name}" for name, ratio in case.ratios.items()]
    against += [f"error of {name} {error:.2e}" for name, error in errors.items()]
    numbers = [
        f"{case.ours.us:.4g}", number(case.gbps, ".4g"), number(case.tflops, ".3g"),
        number(case.percent_of_ceiling, ".0f"),
    ]  # fmt: skip
    return f"| {' | '.join([case.label, *numbers, '; '.join(against), case.ours.commit])} |"


def performance() -> str:
    parts = []
    for path in RESULTS:
        parts.append(f"## {device(path)}")
        for op, cases in table.by_op(table.read_csv(path)).items():
            if op.endswith(REAL_ROWS):
                parts.append(f"### {op}, {device(path)}\n\n{summary.markdown(cases)}")
                continue
            parts.append(f"### {op}, {device(path)}\n\n![{op}](img/{path.stem}_{op}.png)")
            parts.append("\n".join([HEADER, *map(line, cases)]))
    return "\n\n".join(parts)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    from mkdocs.structure.files import File  # noqa: PLC0415

    for path in RESULTS:
        rows = table.read_csv(path)
        for op in table.by_op(rows):
            if op.endswith(REAL_ROWS):
                continue
            plot.draw([row for row in rows if row.op == op], device(path), IMAGES / f"{path.stem}_{op}.png")
    accuracy.draw(accuracy.read(), IMAGES / "accuracy.png")
    for image in sorted(IMAGES.iterdir()):
        files.append(File.generated(config, f"img/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    if PERFORMANCE in markdown:
        markdown = markdown.replace(PERFORMANCE, performance())
    if ACCURACY in markdown:
        tables = accuracy.tables(accuracy.read())
        markdown = markdown.replace(ACCURACY, f"![errors](img/accuracy.png)\n\n{tables}")
    return markdown
