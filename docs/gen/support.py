#!/usr/bin/env python3
"""Writes the op table of README.md: what each op does (its wrapper's docstring) and which libraries have it.

The source is csrc/registration.h, so nothing needs to be built. ``--check`` writes nothing and fails if the
table is not up to date.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- ops: written by docs/gen/support.py -->\n", "<!-- end of ops -->"


def registered(macro: str) -> set[str]:
    """The ops of a list, those of the lists in it included."""
    source = (ROOT / "csrc/registration.h").read_text()
    body = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", source)
    if body is None:
        raise SystemExit(f"csrc/registration.h has no {macro}")
    included = (registered(name) for name in re.findall(r"(MLA_FP8_\w+)\(X\)", body[1]))
    return set(re.findall(r"X\(([a-z]\w+)\)", body[1])).union(*included)


def summaries() -> dict[str, str]:
    """The first paragraph of each public wrapper, by op."""
    found = {}
    for path in sorted((ROOT / "python/mla_fp8/ops").glob("[a-z]*.py")):
        for node in ast.parse(path.read_text()).body:
            docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and docstring:
                paragraph = " ".join(docstring.split("\n\n")[0].split())
                text = re.sub(r":func:`(?:mla_fp8\.)?(\w+)`", r"`\1`", paragraph).replace("``", "`")
                found[node.name] = re.split(r"(?<=\.) ", text)[0]
    return found


def table() -> str:
    libraries, text = [registered(f"MLA_FP8_{device}_OPS") for device in ("CPU", "CUDA", "HIP")], summaries()
    rows = [
        f"| `{op}` | {text[op]} | {' | '.join('yes' if op in ops else '' for ops in libraries)} |"
        for op in sorted(op for op in set().union(*libraries) if not op.endswith("_out"))
    ]
    return "\n".join(["| op | what | CPU | CUDA | ROCm |", "|---|---|---|---|---|", *rows]) + "\n"


def main() -> int:
    path = ROOT / "README.md"
    before, rest = path.read_text().split(BEGIN)
    old, after = rest.split(END)
    if "--check" not in sys.argv:
        path.write_text(before + BEGIN + table() + END + after)
    elif old != table():
        print("the op table of README.md is not up to date: run docs/gen/support.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
