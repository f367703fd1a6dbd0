"""What tests/conftest.py leaves out, and what it never leaves out."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
from pathlib import Path

@pytest.mark.device(False, "a device of tomorrow")
@pytest.mark.parametrize("i", range(5))
def test_elsewhere(i):
    pass

@pytest.mark.device(True, "this one")
def test_here():
    pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("i", range(7))
def test_sampled(i):
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.only(lambda i, **_: i > 1)
@pytest.mark.parametrize("i", range(4))
def test_only(i):
    pass

@pytest.mark.gpu_library(Path("libmla_fp8_of_tomorrow.so"))
def test_library():
    pass
"""
EVERY = {"test_here", "test_slow", "test_library", "test_only[2]", "test_only[3]"} | {
    f"test_sampled[{i}]" for i in range(7)
}


@pytest.fixture
def run(pytester, monkeypatch):
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    marks = ["op", "device", "only", "gpu_library", "slow", "sampled"]
    pytester.makeini(
        "\n    ".join(["[pytest]\naddopts = --strict-markers -p no:cacheprovider\nmarkers =", *marks])
    )
    pytester.makepyfile(TESTS)
    monkeypatch.delenv("CI", raising=False)
    return pytester.runpytest_inprocess


def collected(result) -> set[str]:
    return {line.partition("::")[2] for line in result.outlines if "::" in line}


def test_only_what_this_device_cannot_run_is_not_collected(run):
    result = run("--collect-only", "-q")
    assert collected(result) == EVERY
    result.stdout.fnmatch_lines(["*1 test functions are for other devices*", "     1  a device of tomorrow"])


def test_every_third_case_of_a_sampled_test_is_quick_and_the_others_are_slow(run):
    slow = collected(run("--collect-only", "-q", "-m", "slow"))
    assert slow == {"test_slow"} | {f"test_sampled[{i}]" for i in (1, 2, 4, 5)}
    assert collected(run("--collect-only", "-q", "-m", "not slow")) == EVERY - slow


@pytest.mark.parametrize("selected", [(), ("-m", "not slow")])
def test_shards_are_a_partition_of_what_is_selected(run, selected):
    whole = collected(run("--collect-only", "-q", *selected))
    shards = [collected(run("--collect-only", "-q", *selected, "--shard", f"{i}/3")) for i in (1, 2, 3)]
    assert set().union(*shards) == whole and sum(map(len, shards)) == len(whole)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("shard", ["0/3", "4/3", "2", "x"])
def test_a_shard_that_is_none_is_refused(run, shard):
    result = run("--shard", shard)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--shard: expected I/N, such as 1/4, got '{shard}'"])


def test_a_library_that_was_not_built_is_skipped_but_in_ci(run, monkeypatch):
    run("-k", "test_library").assert_outcomes(skipped=1)
    monkeypatch.setenv("CI", "1")
    result = run("-k", "test_library")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*libmla_fp8_of_tomorrow.so was not built"])
