"""The programs of examples/ run as they are."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "decode": "relative difference from plain PyTorch",
    "layer": "relative difference between step by step and at once",
    "flash_mla_call": "as sparse_decode: True",
    "record_and_replay": "All 2 calls are right",
}


def run(name: str, *options: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_found(name: str, device: str, tmp_path: Path) -> None:
    done = run(name, "--device", device, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[name] in done.stdout


def test_every_example_is_run_and_listed() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {*SAYS, "serve"}
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in text for name in programs)


def flags(engine: str, model: str, *options: str) -> str:
    return run("serve", engine, model, "--check", *options).stdout.splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "model", "expected"),
    [
        ("vllm", "deepseek-ai/DeepSeek-V3.2", "--attention-backend MLA_FP8"),
        ("vllm", "zai-org/GLM-5", "--attention-backend MLA_FP8"),
        ("vllm", "deepseek-ai/DeepSeek-V4", "VLLM_PLUGINS=mla_fp8_flash_mla"),
        ("vllm", "deepseek-ai/DeepSeek-V4.1-Flash", "VLLM_PLUGINS=mla_fp8_flash_mla"),
        ("sglang", "deepseek-ai/DeepSeek-V3.2", "--dsa-decode-backend flashmla_kv"),
        ("sglang", "deepseek-ai/DeepSeek-V4", "SGLANG_PLUGINS=mla_fp8"),
    ],
)
def test_the_recipe_of_an_engine_has_the_flags_of_the_guide(engine: str, model: str, expected: str) -> None:
    with_it, without = flags(engine, model, "--", "--seed", "7"), flags(engine, model, "--without")
    assert expected in with_it and with_it.endswith("--seed 7")
    assert "MLA_FP8" not in without and "mla_fp8" not in without.replace(str(EXAMPLES.parent), "")
    guide = (EXAMPLES.parent / f"docs/guide/{engine}.md").read_text()
    assert expected in guide.replace("\\\n  ", "")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_recipe_says_what_is_missing_and_starts_nothing(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    done = run("serve", engine, "deepseek-ai/DeepSeek-V3.2")
    assert done.returncode == 1 and f"{engine} is not installed here" in done.stderr
