"""What the documents say is what the code does."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_fp8

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs/gen"), str(ROOT / "ci/engines")]
import engines
import generate
import ops
import performance
import pins
from results import fixed

DOCS = ROOT / "docs"
TOP = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    "ci/engines/README.md",
)
PAGES = (*(ROOT / name for name in TOP), *sorted(DOCS.rglob("*.md")))
EXAMPLES = {
    f"{path.relative_to(ROOT)}:{i}": source
    for path in PAGES
    for i, source in enumerate(
        re.findall(r"^```python\n(import .*?)```", path.read_text(), re.DOTALL | re.MULTILINE)
    )
}


@pytest.mark.parametrize("place", EXAMPLES)
def test_examples_run_as_they_are_on_a_gpu_and_with_one_word_changed_on_a_cpu(place, device, capsys):
    on_gpu = 'device = "cuda"'
    source = EXAMPLES[place]
    assert source.count(on_gpu) == 1
    namespace: dict[str, object] = {}
    exec(compile(source.replace(on_gpu, f'device = "{device}"'), place, "exec"), namespace)
    comment = re.search(r"^print\(.*  # (\[.*\]) in bf16, (\[.*\]) in float32$", source, re.MULTILINE)
    if comment is not None:
        out, lse = namespace["out"], namespace["lse"]
        assert out.isfinite().all() and lse.isfinite().all()
        assert capsys.readouterr().out == f"torch.Size({comment[1]}) torch.Size({comment[2]})\n"


def test_the_readme_and_the_start_page_have_an_example():
    assert {"README.md:0", "docs/start.md:0"} <= EXAMPLES.keys()


def test_everything_generated_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs/gen/generate.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_on_support_lists_every_public_op() -> None:
    not_ops = {
        "doctor",
        "explain",
        "decode_hot_rows",  # of several
        "hisparse_backend",
        "index_topk_counters",
        "index_topk_workspace",
        "resolve_kv_cache_dtype",
        "sparse_attention_workspace",
        "warmup",
        "workspace_rows",
    }
    public = {name for name in mla_fp8.__all__ if inspect.isfunction(getattr(mla_fp8, name))} - not_ops
    table = "\n".join(
        line for line in (DOCS / "support.md").read_text().splitlines() if line.startswith("| `")
    )
    assert public <= set(re.findall(r"`(\w+)`", table))


def test_the_reference_says_how_an_object_is_made() -> None:
    public = {name: getattr(mla_fp8, name) for name in mla_fp8.__all__}
    made = {name for name, x in public.items() if inspect.isclass(x)} - {"KVLayout", "IndexLayout"}
    signatures = (DOCS / "reference/ops.md").read_text()
    assert {name for name in made if f"```python\n{name}(" in signatures} == made
    assert "#### `attend(q, layer, topk_indices=None, *, sm_scale" in signatures


def test_install_lines_ask_one_index_for_our_name() -> None:
    """No public index holds it: whoever takes the name there would be installed with an extra index."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = {x: ROOT / x for x in files.stdout.split() if not x.startswith("tests/")}
    asked = re.compile(
        r"^.*(mla[-_]fp8\b.*--extra-index-url|--extra-index-url.*\bmla[-_]fp8\b).*$", re.MULTILINE
    )
    found = {
        x: asked.findall(path.read_text(errors="replace")) for x, path in texts.items() if path.is_file()
    }
    assert {x: lines for x, lines in found.items() if lines} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize(
    "path",
    [*PAGES, ROOT / "third_party/README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_a_document_names_are_there(path: Path) -> None:
    """`x` stands for an op."""
    folders = "benchmarks|ci|csrc|docs|packaging|python|tests|third_party"
    named = set(re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*\w\.\w+)(?![\w*<{{])", path.read_text()))
    real = [name for name in sorted(named) if not re.search(r"[/_]x\.", name)]
    assert [name for name in real if not (ROOT / name).exists()] == []


def test_documents_and_tests_that_sources_name_are_there() -> None:
    kinds = {".cu", ".cuh", ".h", ".cpp", ".py", ".sh"}
    files = [path for top in ("csrc", "python", "benchmarks", "ci") for path in (ROOT / top).rglob("*")]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        if path.suffix in kinds
        for name in re.findall(r"(?<![\w./])(?:docs|tests)/[\w/]+\.\w+", path.read_text())
    }
    assert len(named) > 10
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_constants_that_pages_of_kernels_name_are_there() -> None:
    sources = "\n".join(
        path.read_text()
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cuh", ".cu", ".cpp")
    )
    known = set(re.findall(r"\bk[A-Z]\w+", sources))
    for page in sorted((DOCS / "kernels").glob("*.md")):
        assert set(re.findall(r"\bk[A-Z]\w+", page.read_text())) <= known, page.name


def test_the_guide_has_the_indexers_workspace_as_the_op_does() -> None:
    said = re.search(
        r"with (\d+) SMs at most (\d+) MB for a `topk` of (\d+), (\d+) MB for (\d+)",
        (DOCS / "guide/indexer.md").read_text(),
    )
    assert said is not None
    sms, *pairs = map(int, said.groups())
    for megabytes, topk in (pairs[:2], pairs[2:]):
        num_bytes = torch.ops.mla_fp8.index_topk_workspace(2**31 - 1, topk, sms)
        assert round(num_bytes / 1e6) == megabytes


def test_third_party_names_what_is_pinned_with_its_version() -> None:
    pins = (ROOT / "ci/constraints.txt").read_text().split()
    text = (ROOT / "third_party/README.md").read_text()
    assert set(re.findall(r"[\w-]+==[\w.]+", text)) == set(pins)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """But for the notebook."""
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    found = [path for path in DOCS.rglob("*.md") if "notebook" not in path.parts]
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in found)


def documented(section: str, docstring: str) -> list[str]:
    """Names in a section of a docstring in Google's style."""
    found = re.search(rf"^{section}:\n((?:    .*\n?)+)", inspect.cleandoc(docstring), re.MULTILINE)
    return re.findall(r"^    ([\w, ]+): ", found[1], re.MULTILINE) if found else []


FUNCTIONS = [name for name in mla_fp8.__all__ if inspect.isfunction(getattr(mla_fp8, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_has_every_argument_the_result_and_the_errors(name: str) -> None:
    function = getattr(mla_fp8, name)
    text = function.__doc__
    args, parameters = documented("Args", text), inspect.signature(function).parameters
    assert [x for x in parameters if x in args] == args  # of the function, in its order
    elsewhere = set(re.findall(r"``(\w+)``", " ".join(re.findall(r"so are ([^.]*)", text))))
    if "that are not listed here" not in text:
        assert set(args) | elsewhere >= set(parameters)
    assert ("\nReturns:\n" in inspect.cleandoc(text)) == (
        inspect.signature(function).return_annotation is not None
    )
    assert name == "doctor" or documented("Raises", text)


def test_a_docstring_becomes_markdown() -> None:
    text = ops.markdown(
        """Do it, see :func:`mla_fp8.sparse_decode`.

        Args:
            a: [n] int32: one thing
                in two lines.
            b: As in :func:`x`.
            c: As in :func:`x`.

        Returns:
            The
            sum.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for none.
        """
    )
    assert text.split("\n\n") == [
        "Do it, see `sparse_decode`.",
        "- `a`: [n] int32: one thing in two lines.\n- `b`, `c`: As in `x`.",
        "**Returns:** The sum.",
        "**Raises:** ValueError for none.",
    ]


def test_a_part_that_nobody_writes_is_an_error() -> None:
    text = "a\n<!-- begin x: written by y -->\nold\n<!-- end x -->\nb\n"
    assert generate.filled(text, {"x": "new"}) == text.replace("old", "new")
    assert generate.filled(text.replace("old\n", ""), {"x": "new"}) == text.replace("old", "new")
    with pytest.raises(KeyError, match="x"):
        generate.filled(text, {})
    with pytest.raises(ValueError, match="without its end"):
        generate.filled(text.replace("end x", "end of x"), {"x": "new"})


def test_the_guide_has_the_numbers_of_the_results() -> None:
    """Worst, best and middle ratios, as sentences of the guide round them."""
    found = performance.strongest(performance.H100)
    indexer = [
        case.ratios["deep_gemm + flashinfer"]
        for case in performance.of(performance.GPU, "index_topk").values()
        if "deep_gemm + flashinfer" in case.peers
    ]
    ratios = {name: [ratio for _, ratio, _ in cases] for name, cases in found.items()}
    for page, numbers in (
        ("decode", ratios["decode"]),
        ("prefill", ratios["prefill over bf16 rows"]),
        ("prefill", ratios["prefill from FP8 pages"]),
        ("indexer", indexer),
    ):
        text = (DOCS / f"guide/{page}.md").read_text()
        assert f"{fixed(min(numbers))} to {fixed(max(numbers))} times" in text, page
    assert f"faster in {sum(r > 1 for r in indexer)} of {len(indexer)} cases" in (
        (DOCS / "guide/indexer.md").read_text()
    )


def test_shares_of_engine_steps_are_those_of_their_times() -> None:
    """Times of the file are whole microseconds, its shares were taken before they were rounded."""
    steps = engines.read()
    assert len(steps) > 40
    for step in steps:
        for kind in ("step", "attention"):
            theirs, ours = (float(step[f"{who}{kind}_us"]) for who in ("flashmla_", ""))
            low, high = (ours - 0.5) / (theirs + 0.5), (ours + 0.5) / (theirs - 0.5)
            assert low - 0.005 <= float(step[f"{kind}_ratio"]) <= high + 0.005, step


def test_engine_pages_name_the_versions_that_are_tested() -> None:
    text = (DOCS / "guide/vllm.md").read_text()
    assert f"vLLM {pins.VLLM[0].removesuffix('.0')} to {pins.VLLM[-1].removesuffix('.0')}." in text
    assert f"SGLang {pins.SGLANG[-1]}." in (DOCS / "guide/sglang.md").read_text()
    support = (DOCS / "support.md").read_text()
    assert all(version in support for version in (pins.VLLM[0], pins.VLLM[-1], *pins.SGLANG))


def test_the_start_page_has_the_minutes_that_a_build_announces() -> None:
    text, setup = (DOCS / "start.md").read_text(), (ROOT / "setup.py").read_text()
    cpu, hip = re.search(r"^CPU_MINUTES, HIP_MINUTES = (\d+), (\d+)$", setup, re.MULTILINE).groups()
    hopper, every = re.search(r'^CUDA_MINUTES = {"90a": (\d+), "all": (\d+)}', setup, re.MULTILINE).groups()
    assert f"They take {cpu} minutes of one core" in text and f"and take {hip} minutes" in text
    assert f"On one core Hopper takes {hopper} minutes, all GPUs take {every}." in text
