"""docs/reference/ops.md: the ops, from the signatures and docstrings of the public functions."""

import inspect
import re
from collections.abc import Iterator
from itertools import pairwise

import mla_fp8

OPS_MODULES = "mla_fp8.ops."
INTRODUCTION = """\
<!-- written by docs/gen/ops.py from the docstrings in python/mla_fp8 -->
# Ops

Tensors come first and by position, the rest by keyword. Bad input raises before anything is written:
`RuntimeError` names the argument, what was expected and what came. An index is data: outside its range it is
masked, never followed. `layout` says what a cached row looks like ([Layouts](layouts.md)), `page_size` how
many of them a page holds. Each op is also `torch.ops.mla_fp8.<op>`, where `layout` is a number
(`KVLayout.id`), and, if it returns tensors, `<op>_out`, which writes into given ones and allocates nothing.
"""
BORDER = re.compile(r"=+(  +=+)+")


def inline(text: str) -> str:
    """Roles and double backquotes of reStructuredText as Markdown."""
    return re.sub(r":\w+:`~?(?:mla_fp8\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def cells(line: str, columns: list[slice]) -> list[str]:
    """The cells of one line; a text that crosses the gap between two columns spans them."""
    found = [line[column] for column in columns]
    for i, (left, right) in reversed(list(enumerate(pairwise(columns)))):
        if line[left.stop : right.start].strip():
            found[i : i + 2] = [f"{line[left.start : right.start]}{found[i + 1]}"]
    return [cell.strip() for cell in found]


def table(lines: list[str]) -> str:
    """A simple table of reStructuredText as Markdown; without a header it is one of arguments."""
    starts = [match.span() for match in re.finditer("=+", lines[0])]
    columns = [slice(begin, end) for begin, end in starts[:-1]] + [slice(starts[-1][0], None)]
    width, rows = len(columns), list[list[str]]()
    for row in (cells(line, columns) for line in lines if not BORDER.fullmatch(line)):
        if row[0] or not rows:
            rows.append(row + [""] * (width - len(row)))
        else:  # the row before goes on
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], row, strict=True)]
    heads = ["argument", "shape", "dtype", ""] if width == 4 else [""] * width
    if sum(bool(BORDER.fullmatch(line)) for line in lines) == 3:
        heads, *rows = rows
    body = ["| " + " | ".join([code(row[0]), *row[1:]]) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * width + "|", *map(inline, body)])


def code(text: str) -> str:
    return f"`{text}`" if text and "`" not in text else text


def markdown(docstring: str) -> str:
    lines, parts, paragraph = inspect.cleandoc(docstring).splitlines(), list[str](), list[str]()
    i = 0
    while i < len(lines):
        if BORDER.fullmatch(lines[i]):
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            parts.append(table(lines[i:end]))
            i = end - 1
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
        text = re.sub(r"\b(?:torch|collections\.abc|mla_fp8(?:\.[a-z_]+)+)\.(?=[A-Z])", "", str(parameter))
        lines.append(text.replace("'", '"'))
    inside = "".join(f"\n    {line}," for line in lines)
    return f"{name}({inside}\n)" if lines else f"{name}()"


def entry(name: str, function: object) -> str:
    block = f"```python\n{signature(name, function)}\n```"
    return f"## {name}\n\n{block}\n\n{markdown(function.__doc__ or '')}\n"


def call(method: object) -> str:
    """``(a, *, b=1)``: a method's parameters without their types."""
    parameters = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    bare = [x.replace(annotation=x.empty) for x in parameters if x.name != "self"]
    return str(inspect.Signature(bare))


def class_entry(name: str, kind: type) -> str:
    """How it is made, unless a table has all there are; its docstring; a line per method and property."""
    lines = []
    for member, value in vars(kind).items():
        of_instances = not isinstance(value, property)
        function = getattr(value, "__func__", value) if of_instances else value.fget
        if inspect.isfunction(function) and not member.startswith("_") and function.__doc__:
            text = inline(" ".join(inspect.cleandoc(function.__doc__).split()))
            lines.append(f"| `{member}{call(function) if of_instances else ''}` | {text} |")
    listing = "\n".join(["| | |", "|---|---|", *lines]) if lines else ""
    made = "" if "id" in kind.__annotations__ else f"```python\n{signature(name, kind)}\n```\n\n"
    return f"## {name}\n\n{made}{markdown(kind.__doc__ or '')}\n\n{listing}\n"


def sections() -> Iterator[str]:
    public = {name: getattr(mla_fp8, name) for name in sorted(mla_fp8.__all__)}
    functions = {name: x for name, x in public.items() if inspect.isfunction(x)}
    ops = {name: x for name, x in functions.items() if x.__module__.startswith(OPS_MODULES)}
    yield from (entry(*item) for item in ops.items())
    yield "# Around the ops\n"
    yield from (entry(*item) for item in functions.items() if item[0] not in ops)
    yield from (class_entry(*item) for item in public.items() if inspect.isclass(item[1]))


def files() -> dict[str, str]:
    return {"docs/reference/ops.md": "\n".join([INTRODUCTION, *sections()])}
