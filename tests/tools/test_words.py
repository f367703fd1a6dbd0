"""How documents are written: words per page by a table, short sentences, the answer first, few tables.

A page's words are counted as `wc -w` does: what stands between blanks, signs of tables and lists too. The
notebook is free of all of this.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest

import mla_fp8

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/gen"))
import ops

MOST = 30_000  # all of BUDGET, and the stubs
# What a page may have. An op that is new may have 250 words of the reference.
OPS_COUNTED = 31
BUDGET = {
    "README.md": 990,
    "SECURITY.md": 244,
    "CONTRIBUTING.md": 1051,
    "CHANGELOG.md": 578,
    "docs/index.md": 313,
    "docs/start.md": 690,
    "docs/support.md": 800,
    "docs/packaging.md": 449,
    "docs/performance.md": 1586,
    "docs/guide/concepts.md": 742,
    "docs/guide/caches.md": 658,
    "docs/guide/layer.md": 449,
    "docs/guide/step.md": 639,
    "docs/guide/indexer.md": 657,
    "docs/guide/decode.md": 748,
    "docs/guide/prefill.md": 921,
    "docs/guide/backends.md": 698,
    "docs/guide/vllm.md": 876,
    "docs/guide/sglang.md": 866,
    "docs/guide/migration.md": 630,
    "docs/guide/troubleshooting.md": 682,
    "docs/guide/accuracy.md": 540,
    "docs/guide/rocm.md": 431,
    "docs/kernels/overview.md": 1103,
    "docs/kernels/hopper.md": 1596,
    "docs/kernels/portable_and_hip.md": 959,
    "docs/kernels/indexer.md": 1076,
    "docs/kernels/emulators.md": 781,
    "docs/reference/layouts.md": 928,
    "docs/reference/ops.md": 7304,
}
# Pages of what came later than the table: at most 700 words each, not part of the sum.
ADDED: dict[str, int] = {
    "docs/guide/context_parallel.md": 700,
    "docs/guide/host_rows.md": 700,
    "docs/guide/index_levels.md": 700,
    "docs/guide/same_bits.md": 700,
    "docs/guide/trained.md": 600,
    "docs/kernels/index_levels.md": 450,
}
STUBS = ("docs/changelog.md", "docs/contributing.md", "docs/security.md")  # a file at the top of the tree
GUIDE = ("docs/guide/", "docs/index.md", "docs/start.md", "docs/support.md")
HISTORY = (
    "since then", "of then", "was not timed", "were not timed", "not looked into", "as the former", "besides",
    "in place of then", "we do not know why",
)  # fmt: skip
HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
FENCE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def pages() -> list[str]:
    found = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found += [path for path in (ROOT / "docs").rglob("*.md") if "notebook" not in path.parts]
    return sorted(str(path.relative_to(ROOT)) for path in found)


PAGES = [name for name in pages() if name not in STUBS]


def text_of(name: str) -> str:
    return COMMENT.sub("", (ROOT / name).read_text())


def counted(name: str) -> int:
    """As `wc -w` has it."""
    return len((ROOT / name).read_text().split())


def words(sentence: str) -> int:
    """What has a letter or a digit."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def blocks(text: str) -> list[str]:
    """Paragraphs and items of lists, without tables, headings and pictures; a span of code is one word."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("\n", text)):
        lines: list[str] = []
        for line in paragraph.splitlines():
            if re.match(r"\s*(\||#|!\[|<)", line):
                continue
            if re.match(r"\s*([*-]|\d+\.) ", line) or not lines:
                lines.append(re.sub(r"^\s*([*-]|\d+\.) ", "", line))
            else:
                lines[-1] += f" {line.strip()}"
        found += lines
    plain = [re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block) for block in found]
    return [re.sub(r"`[^`]*`", "code", block).replace("**", "") for block in plain]


def sentences(block: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])[)\"]*\s+", block) if part]


def tables(text: str) -> list[int]:
    """Rows of each table."""
    found = re.findall(r"(?:^\|.*\n)+", FENCE.sub("\n", text) + "\n", re.MULTILINE)
    return [table.count("\n") - 2 for table in found]


def test_the_budgets_are_thirty_thousand_words() -> None:
    assert sum(BUDGET.values()) + sum(map(counted, STUBS)) <= MOST
    assert all(most <= 700 for most in ADDED.values())
    assert not BUDGET.keys() & ADDED.keys()


def test_every_page_has_a_budget() -> None:
    assert set(PAGES) == BUDGET.keys() | ADDED.keys()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_within_its_budget(name: str) -> None:
    most = BUDGET.get(name) or ADDED[name]
    if name == "docs/reference/ops.md":
        functions = [getattr(mla_fp8, x) for x in mla_fp8.__all__]
        public = [x for x in functions if inspect.isfunction(x) and x.__module__.startswith(ops.OPS_MODULES)]
        most += 250 * max(0, len(public) - OPS_COUNTED)
    assert counted(name) <= most


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short(name: str) -> None:
    long = [s for block in blocks(text_of(name)) for s in sentences(block) if words(s) > 30]
    assert long == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_its_answer(name: str) -> None:
    """A paragraph of at least two sentences under the title, before any table, code or picture."""
    lines = text_of(name).strip().splitlines()
    assert lines[0].startswith("# ")
    first = "\n".join(lines[1:]).strip().split("\n\n")[0]
    assert not re.match(r"[|#!<]|```|([*-]|\d+\.) ", first), first
    assert len(sentences(blocks(first)[0])) >= 2, first


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith(GUIDE)])
def test_a_page_of_the_guide_has_few_short_tables(name: str) -> None:
    found = tables(text_of(name))
    assert len(found) <= 3 and all(rows <= 12 for rows in found), found


@pytest.mark.parametrize("name", PAGES)
def test_no_commit_and_no_history_outside_the_notebook(name: str) -> None:
    text = text_of(name)
    assert HASH.findall(text) == []
    assert [phrase for phrase in HISTORY if re.search(rf"\b{phrase}\b", text, re.IGNORECASE)] == []


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("docs/reference/")])
def test_lines_of_code_fit_beside_the_side_bars(name: str) -> None:
    most = 90 if name.startswith("docs/") else 100
    assert [
        line for code in FENCE.findall(text_of(name)) for line in code.splitlines() if len(line) > most
    ] == []


def test_the_rules_find_what_they_are_for() -> None:
    page = "# T\n\nOne two. Three four, `a b c`.\n\n```\nx y\n```\n\n"
    page += "| a | b |\n|---|---|\n| c | d |\n\n* e f\n  g\n* h\n"
    assert blocks(page) == ["One two. Three four, code.", "e f g", "h"]
    assert sentences(blocks(page)[0]) == ["One two.", "Three four, code."]
    assert tables(page) == [1] and words("a | b --- 1.0") == 3
    assert HASH.findall("at `0e98d0fb`, dsv41_fp4, 2048000, e4m3, deadbeef") == ["0e98d0fb"]
