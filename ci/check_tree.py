#!/usr/bin/env python3
"""Rules of the tree that no formatter knows. Prints file:line: what is wrong; exit code 1 if anything is."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES, MAX_COLUMNS = 400, 110
MAX_ROLE_LINES = 500  # of a file with one role of a kernel in it: a class is not torn apart
MAX_REFERENCE_STATEMENTS, MAX_WRAPPER_STATEMENTS = 15, 60
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".hip", ".py")

# Bytes per token and page bytes of dsv32 and dsv4: whoever spells them restates the layout table.
LAYOUT_NUMBERS = re.compile(r"(?<![\w.#])(656|584|41984|37440|74880|149760|1728)(?![\w.])")
LAYOUT_HOMES = (
    "csrc/common/kv_layout.h",
    "tests/ops/test_kv_layout.py",
    "docs/reference/layouts.md",
    "ci/check_tree.py",
)
# Attention kernels include what is beside or above them: no kernel knows another, nothing general one GPU.
# Whoever reads sparse_decode with 128 heads, from the op's checks to the last instruction, opens the last of
# these files, and what the others include. Extensions of the kernel are not among it.
PATH = (
    "ops/sparse_attention.cpp", "ops/sparse_arguments.cpp", "cuda/sparse_attention.cu",
    "cuda/sparse_attention/plan.cpp",
    "cuda/sparse_attention/sm90/many_heads/split.cuh", "cuda/sparse_attention/sm90/many_heads/many_heads.cu",
)  # fmt: skip
KNOWN = re.compile(r"common/|cuda/device/|hip/|registration\.h")  # what every op stands on
MAX_PATH_FILES, MAX_PATH_LINES = 24, 4530
ATTENTION, DEVICE = "csrc/cuda/sparse_attention/", "csrc/cuda/device/"
INCLUDE = re.compile(r'#include "(cuda/[\w/]+/)[\w.]+"')
# A function of a kernel takes a struct rather than more parameters than these.
KERNELS, MAX_PARAMETERS = ("csrc/common/", "csrc/cpu/", "csrc/cuda/"), 8
MAX_TEMPLATE_PARAMETERS = 4  # more are a struct of traits
SHAPES_OF_INDEXER = tuple(f"csrc/cuda/indexer/sm90_{name}.cuh" for name in ("math", "scan", "shapes"))
DEFINITION = re.compile(r"^[^\n#/]*?\b(\w+)\(([^(){};]*)\)\s*(?:const\s*)?\{", re.MULTILINE)
# Public functions name their parameters; this one takes and ignores what FlashMLA's does.
NAMED_PARAMETERS = re.compile(r"python/mla_fp8/(ops|prefill|compat)/(?!_)")
SWALLOWS = {"python/mla_fp8/compat/flash_mla.py": {"get_mla_metadata"}}
# A comment on lines of its own has a subject: one that begins like this leans on its neighbours.
NO_SUBJECT = re.compile(r"// (Of|To|By|What|That|Those|From|With|Which|Whose)\b")
TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [ROOT / name for name in names]


def check_lines(name: str, lines: list[str]) -> Iterator[str]:
    most = MAX_ROLE_LINES if name.startswith(f"{ATTENTION}sm90/") else MAX_LINES
    if len(lines) > most:
        yield f"{name}: {len(lines)} lines, at most {most}"
    for number, line in enumerate(lines, 1):
        if len(line.split("  # type: ")[0]) > MAX_COLUMNS:
            yield f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if name not in LAYOUT_HOMES and LAYOUT_NUMBERS.search(line):
            yield f"{name}:{number}: a layout number; read it from the layout table"
        if name != "ci/check_tree.py" and TODO.search(line):
            yield f"{name}:{number}: a TODO carries an issue number: TODO(#12)"


def check_includes(name: str, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        folder = f"csrc/{found[1]}" if found else DEVICE
        if folder != DEVICE and not name.startswith(folder):
            yield f"{name}:{number}: includes {folder}, which is neither beside it nor above it"


def check_path() -> Iterator[str]:
    source, lines, left = ROOT / "csrc", {PATH[-1]: 0}, list(PATH[:-1])
    while left:
        name = left.pop()
        if name not in lines and not KNOWN.match(name) and (source / name).exists():
            lines[name] = 0
            left += re.findall(r'^#include "(.+)"', (source / name).read_text(), re.MULTILINE)
    total = sum(len((source / name).read_text().splitlines()) for name in lines)
    if len(lines) > MAX_PATH_FILES or total > MAX_PATH_LINES:
        yield f"csrc: the path of sparse_decode has {len(lines)} files and {total} lines, at most "
        yield f"{MAX_PATH_FILES} and {MAX_PATH_LINES}: {' '.join(sorted(lines))}"


def check_parameters(name: str, lines: list[str]) -> Iterator[str]:
    text = "\n".join(line.split("//")[0] for line in lines)
    for found in DEFINITION.finditer(text):
        flat = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", found[2]))
        if flat.count(",") >= MAX_PARAMETERS:
            number, count = text.count("\n", 0, found.start()) + 1, flat.count(",") + 1
            yield f"{name}:{number}: {found[1]} has {count} parameters, at most {MAX_PARAMETERS}"


def template_parameters(text: str) -> Iterator[tuple[int, int]]:
    """(line, count) of each template."""
    for found in re.finditer(r"\btemplate\s*<", text):
        angles, others, count = 1, 0, 1
        for c in text[found.end() :]:
            others += (c in "([{") - (c in ")]}")
            angles += (c == "<" and others == 0) - (c == ">" and others == 0)
            count += c == "," and angles == 1 and others == 0
            if angles == 0:
                break
        yield text.count("\n", 0, found.start()) + 1, count


def check_templates(name: str, lines: list[str]) -> Iterator[str]:
    for number, count in template_parameters("\n".join(line.split("//")[0] for line in lines)):
        if count > MAX_TEMPLATE_PARAMETERS and name not in SHAPES_OF_INDEXER:
            yield f"{name}:{number}: {count} template parameters, at most {MAX_TEMPLATE_PARAMETERS}"


def check_comments(name: str, lines: list[str]) -> Iterator[str]:
    before = ""
    for number, line in enumerate(map(str.lstrip, lines), 1):
        if not before.startswith("//") and (found := NO_SUBJECT.match(line)):
            yield f'{name}:{number}: a comment that begins with "{found[1]}"; give it a subject'
        before = line


def check_keywords(name: str, lines: list[str]) -> Iterator[str]:
    for node in ast.parse("\n".join(lines)).body:
        public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if public and node.args.kwarg and node.name not in SWALLOWS.get(name, ()):
            yield f"{name}:{node.lineno}: {node.name} takes **{node.args.kwarg.arg}; name its parameters"


def functions(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """(name, line of def, statements) of top-level functions; docstrings and wrapping do not count."""
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef):
            statements = sum(isinstance(child, ast.stmt) for child in ast.walk(node)) - 1
            yield node.name, node.lineno, statements - bool(ast.get_docstring(node))


def check_functions(name: str, lines: list[str]) -> Iterator[str]:
    limit = MAX_REFERENCE_STATEMENTS if name.endswith("reference.py") else MAX_WRAPPER_STATEMENTS
    for function, number, length in functions(lines):
        if length > limit:
            yield f"{name}:{number}: {function} has {length} statements, at most {limit}"


def main() -> int:
    wrong = []
    for path in tracked():
        if path.is_symlink():
            wrong.append(f"{path.relative_to(ROOT)}: a link to {path.readlink()}; the tree has none")
        if path.suffix not in SOURCES or not path.exists():
            continue
        name, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
        wrong += check_lines(name, lines)
        if name.startswith((ATTENTION, DEVICE)):
            wrong += check_includes(name, lines)
        if name.startswith(KERNELS):
            wrong += check_parameters(name, lines)
            wrong += check_templates(name, lines)
        if name.startswith("csrc/"):
            wrong += check_comments(name, lines)
        if NAMED_PARAMETERS.match(name):
            wrong += check_keywords(name, lines)
        if name.startswith("python/"):
            wrong += check_functions(name, lines)
    wrong += check_path()
    print("\n".join(wrong) or "tree: ok")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
