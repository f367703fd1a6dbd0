"""Fits rows of csrc/cuda/sparse_attention/prices.h to the times of forced plans, and writes them.

  python benchmarks/fit_prices.py --measure times.csv   on a GPU: times forced plans
  python benchmarks/fit_prices.py times.csv             without one: fits, and writes the header

The model of time is C++'s alone: the tests' module says what a plan is made of (`work`), and each price is a
coefficient. A row of prices is fitted by least squares of relative errors, without negative prices.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "csrc/cuda/sparse_attention/prices.h"
ROW = re.compile(r"( *\{Kernel::k(\w+), Schedule::k(\w+), (\d+), Reads::k(\w+), )\{([^}]*)\}(.*)")
READS = {"Fp8": "dsv32", "Bf16": "bf16", "Pair": "dsv41+dsv41_fp4"}  # what is timed for which rows
SCHEDULES = ("split", "parts", "segments", "runs")  # whose plans a test can force for any problem
QUERIES, KEYS, HEADS = (1, 2, 4, 8, 16, 32, 44, 64, 96, 128), (640, 1152, 2048), (8, 16, 32, 64, 128)
DIGITS, SMS = 3, 132  # of a price; of an H100 and an H200


@dataclass(frozen=True)
class Forced:
    """A forced plan of a problem, and its time."""

    kernel: str
    schedule: str
    cta_heads: int
    splits: int
    layout: str
    heads: int
    queries: int
    keys: int
    us: float

    @property
    def row(self) -> tuple[str, str, int, str]:
        """Of prices.h."""
        reads = "Pair" if "+" in self.layout else "Bf16" if self.layout.startswith("bf16") else "Fp8"
        return camel(self.kernel), camel(self.schedule), self.cta_heads, reads


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def read(path: Path) -> list[Forced]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Forced(**{f.name: f.type(row[f.name]) for f in fields(Forced)}) for row in rows]  # type: ignore[operator]


def write(path: Path, measured: Iterable[Forced]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(f.name for f in fields(Forced))
        rows.writerows(map(astuple, measured))


def layouts(core: ModuleType, name: str) -> dict[str, int]:
    names = [layout.name for layout in core.KV_LAYOUTS]
    first, _, extra = name.partition("+")
    return {"layout": names.index(first), "extra_layout": names.index(extra) if extra else -1}


def problem(core: ModuleType, x: Forced) -> dict[str, int]:
    """For the tests' module. Of two caches the first has a window's keys."""
    window = 128 if "+" in x.layout else 0
    keys = {"keys": window or x.keys, "extra_keys": x.keys - window if window else 0}
    return layouts(core, x.layout) | {"heads": x.heads, "queries": x.queries} | keys


def fitted(core: ModuleType, measured: list[Forced]) -> np.ndarray:
    """The prices of one row; those of work that no plan has are 0."""
    work = np.array(
        [core.work(x.kernel, x.schedule, x.cta_heads, x.splits, **problem(core, x)) for x in measured]
    ).T
    us = np.array([x.us for x in measured])
    prices, used = np.zeros(len(work)), [i for i, column in enumerate(work) if column.any()]
    while used:
        matrix = np.stack([work[i] for i in used], 1) / us[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(us)), rcond=None)[0]
        if (found >= 0).all():
            prices[used] = found
            break
        used.remove(used[int(found.argmin())])
    return prices


def rewritten(core: ModuleType, header: str, measured: list[Forced]) -> Iterator[str]:
    """Lines of the header. What few plans were timed of keeps its prices."""
    for line in header.splitlines():
        found = ROW.fullmatch(line)
        if not found:
            yield line
            continue
        start, kernel, schedule, heads, reads, old, end = found.groups()
        of_row = [x for x in measured if x.row == (kernel, schedule, int(heads), reads)]
        if len(of_row) < 2 * len(old.split(",")):
            yield line
            continue
        texts = [f"{price:.{DIGITS}g}" for price in fitted(core, of_row)]
        while len(texts) > 2 and texts[-1] == "0":
            texts.pop()
        yield f"{start}{{{', '.join(texts)}}}{end}"


def plans(core: ModuleType) -> Iterator[Forced]:
    """Of each kernel that a price is of, without times."""
    for kernel, schedule, cta_heads, _, names in core.VARIANTS:
        layouts = [name for name in READS.values() if name in names]
        if schedule not in SCHEDULES or kernel not in ("few_heads", "many_heads"):
            continue
        for layout, heads, queries, keys in product(layouts, HEADS, QUERIES, KEYS):
            if cta_heads >= 2 * heads or (heads > 16 and kernel == "few_heads" and schedule == "segments"):
                continue
            clusters = (1, 2, 4, 8) if schedule == "segments" else (1, 2, 4, 6, 8, 16)
            many = (1,) if schedule in ("split", "segments") else range(2, 9)
            for splits in clusters if kernel == "few_heads" else many:
                if queries * splits * -(-heads // cta_heads) <= 4 * SMS:
                    yield Forced(kernel, schedule, cta_heads, splits, layout, heads, queries, keys, 0.0)


def measure(core: ModuleType) -> Iterator[Forced]:
    """Alone, with full rows from memory."""
    import torch  # noqa: PLC0415 - no fit needs it

    from mla_fp8 import KV_LAYOUTS  # noqa: PLC0415
    from mla_fp8.tools.timing import time_us  # noqa: PLC0415

    page, pages, device = 64, 1 << 11, "cuda"
    caches = {}
    for name, layout in KV_LAYOUTS.items():
        caches[name] = layout.empty(pages, page, device)
        caches[name].view(torch.uint8).zero_()
    for x in plans(core):
        of, names = problem(core, x), x.layout.split("+")
        first = KV_LAYOUTS[names[0]]
        q = torch.randn(x.queries, x.heads, first.head_dim_qk, device=device).bfloat16()
        slots = [
            torch.randint(page * pages, (x.queries, of[which]), dtype=torch.int32, device=device)
            for which in ("keys", "extra_keys")
        ]
        options = {"layout": first.id, "page_size": page, "sm_scale": first.head_dim_qk**-0.5}
        if len(names) > 1:
            second = KV_LAYOUTS[names[1]]
            options |= {"extra_kv_cache": caches[names[1]], "extra_indices": slots[1]}
            options |= {"extra_page_size": page, "extra_layout": second.id}
        by = {"kernel": x.kernel, "schedule": x.schedule, "heads": x.cta_heads, "splits": x.splits}
        arguments = q, caches[names[0]], slots[0]

        def run(arguments: tuple = arguments, options: dict = options | by) -> None:
            torch.ops.mla_fp8._sparse_attention(*arguments, **options, max_logits=False)

        yield replace(x, us=time_us({"": run})[""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "build/tests"))
    import _mla_fp8_core as core  # noqa: PLC0415 - a test gives its own

    if arguments.measure:
        write(arguments.times, measure(core))
        return 0
    lines = list(rewritten(core, HEADER.read_text(), read(arguments.times)))
    HEADER.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
