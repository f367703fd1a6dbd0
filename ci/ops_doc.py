#!/usr/bin/env python3
"""Writes docs/ops.md, the reference of the ops, from the signatures and docstrings of the public functions.

``--check`` writes nothing and fails if the file is not up to date.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import mla_fp8

TARGET = Path(__file__).resolve().parents[1] / "docs/ops.md"
OPS_MODULES = "mla_fp8.ops."
INTRODUCTION = """\
<!-- written by ci/ops_doc.py from the docstrings in python/mla_fp8 -->
# Ops

Tensors come first and by position, the rest by keyword. Bad input raises before anything is written:
`RuntimeError` names the argument, what was expected and what came. An index is data: outside its range it is
masked, never followed. Each op is also `torch.ops.mla_fp8.<op>`, where `layout` is a number (`KVLayout.id`),
and `<op>_out`, which writes into given tensors and allocates nothing.
"""
BORDER = re.compile(r"=+(  +=+)+")


def inline(text: str) -> str:
    """Roles and double backquotes of reStructuredText as Markdown."""
    return re.sub(r":\w+:`~?(?:mla_fp8\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def cells(line: str, columns: list[slice]) -> list[str]:
    """The cells of one line; a text that crosses the gap between two columns spans them."""
    found = [line[column].strip() for column in columns]
    for i, (left, right) in reversed(list(enumerate(pairwise(columns)))):
        if line[left.stop : right.start].strip():
            found[i : i + 2] = [f"{line[left.start : right.start]}{found[i + 1]}".strip()]
    return found


def table(lines: list[str]) -> str:
    """A simple table of reStructuredText, without a header, as Markdown."""
    starts = [match.span() for match in re.finditer("=+", lines[0])]
    columns = [slice(begin, end) for begin, end in starts[:-1]] + [slice(starts[-1][0], None)]
    rows = [cells(line, columns) for line in lines[1:-1]]
    width = len(columns)
    heads = ["argument", "shape", "dtype", ""] if width == 4 else [""] * width
    body = [f"| `{row[0]}` | " + " | ".join([*row[1:], *[""] * (width - len(row))]) + " |" for row in rows]
    escaped = [inline(line) for line in body]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * width + "|", *escaped])


def markdown(docstring: str) -> str:
    lines, parts, paragraph = inspect.cleandoc(docstring).splitlines(), list[str](), list[str]()
    i = 0
    while i < len(lines):
        if BORDER.fullmatch(lines[i]):
            end = next(j for j in range(i + 1, len(lines)) if BORDER.fullmatch(lines[j]))
            parts.append(table(lines[i : end + 1]))
            i = end
        elif lines[i].strip():
            paragraph.append(lines[i])
        following = lines[i + 1] if i + 1 < len(lines) else ""
        if paragraph and (not following.strip() or BORDER.fullmatch(following)):
            parts.append(inline("\n".join(paragraph)))
            paragraph = []
        i += 1
    return "\n\n".join(parts)


def signature(name: str, function: object) -> str:
    """As one would write it, one argument per line, without the module names of types."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    lines, keyword = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            lines.append("*")
            keyword = True
        text = re.sub(r"\b(?:torch|mla_fp8\.layout)\.", "", str(parameter)).replace("'", '"')
        lines.append(text)
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def sections() -> Iterator[str]:
    for name in sorted(mla_fp8.__all__):
        function = getattr(mla_fp8, name)
        if getattr(function, "__module__", "").startswith(OPS_MODULES):
            code = f"```python\n{signature(name, function)}\n```"
            yield f"## {name}\n\n{code}\n\n{markdown(function.__doc__)}\n"


def main() -> int:
    document = "\n".join([INTRODUCTION, *sections()])
    if "--check" not in sys.argv:
        TARGET.write_text(document)
    elif TARGET.read_text() != document:
        print(f"{TARGET.name} is not up to date: run ci/ops_doc.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
