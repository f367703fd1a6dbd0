"""What the documents say is what the code does."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mla_fp8

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(examples) == 1
    namespace: dict[str, object] = {}
    exec(compile(examples[0], "README.md", "exec"), namespace)
    out, lse = namespace["out"], namespace["lse"]
    assert out.isfinite().all() and lse.isfinite().all()
    assert capsys.readouterr().out == "torch.Size([2, 16, 512]) torch.Size([2, 16])\n"


@pytest.mark.parametrize("script", ["dispatch.py", "layouts.py", "ops.py", "support.py"])
def test_generated_document_is_up_to_date(script: str) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "docs/gen" / script, "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_lists_every_public_op() -> None:
    not_ops = {"doctor", "hisparse_backend", "resolve_kv_cache_dtype", "warmup", "workspace_rows"}
    public = {name for name in mla_fp8.__all__ if inspect.isfunction(getattr(mla_fp8, name))} - not_ops
    assert public <= set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))


def test_pins_of_third_party_are_those_that_are_installed() -> None:
    pins = (ROOT / "ci/constraints.txt").read_text().split()
    text = (ROOT / "third_party/README.md").read_text()
    named = set(re.findall(r"[\w-]+==[\w.]+", text))
    assert named <= set(pins)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
