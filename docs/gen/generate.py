#!/usr/bin/env python3
"""Writes everything that is made from code and measured results: `python docs/gen/generate.py`.

Whole files (reference, notebook, charts), and parts of files between lines with `begin NAME` and `end NAME`.
``--check`` writes nothing, and fails if anything is not up to date.
"""

import re
import subprocess
import sys
from pathlib import Path

import accuracy
import attempts
import dispatch
import drawings
import engines
import layouts
import ops
import performance
import prices
import roles
import steps
import support
import tiles
import trained
from results import ROOT

COSTS = "python/mla_fp8/prefill/costs.py"
PART = re.compile(
    r"(?P<begin>^[^\n]*\bbegin (?P<name>[\w ]+): written by [^\n]*\n).*?(?P<end>^[^\n]*\bend (?P=name)\b)",
    re.DOTALL | re.MULTILINE,
)

BEGIN = re.compile(r"\bbegin ([\w ]+): written by ")


def filled(text: str, parts: dict[str, str]) -> str:
    """KeyError for a part that nobody writes, ValueError for one without its end."""
    if len(PART.findall(text)) != len(BEGIN.findall(text)):
        raise ValueError(f"a part without its end: {BEGIN.findall(text)}")
    return PART.sub(lambda m: f"{m['begin']}{parts[m['name']]}\n{m['end']}", text)


def outputs() -> dict[Path, str]:
    """Every generated file, as it should be."""
    made = ops.files() | layouts.files() | attempts.files()
    for module in (accuracy, drawings, engines, layouts, performance, roles, steps, trained):
        made |= {f"docs/img/{name}": chart for name, chart in module.images().items()}
    parts = dict[str, str]()
    for module in (dispatch, engines, performance, prices, steps, support, tiles, trained):
        parts |= module.parts()
    found = {ROOT / name: text for name, text in made.items()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if path not in found and BEGIN.search(text := path.read_text()):
            found[path] = filled(text, parts)
    return found


def changed(wanted: dict[Path, str]) -> list[Path]:
    return [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    check = "--check" in sys.argv
    source = (ROOT / COSTS).read_text()
    costs = {ROOT / COSTS: filled(source, {"prices": prices.source(), "cpu prices": prices.cpu_source()})}
    wanted = costs if changed(costs) and not check else costs | outputs()
    stale = changed(wanted)
    for path in stale:
        print(
            f"{path.relative_to(ROOT)}: {'not up to date, run docs/gen/generate.py' if check else 'written'}"
        )
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    if not check and wanted == costs:  # the documents show what follows from the new prices
        return subprocess.call([sys.executable, __file__])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
