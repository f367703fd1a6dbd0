"""ci/bench_regression.py: what counts as slower, what is only listed, and that a report can be read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci/bench_regression.py"
sys.path.insert(0, str(ROOT / "ci"))
import bench_regression

Row = bench_regression.table.Row

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.csv"))


def table(path: Path, times: dict[str, float], **peers: float) -> Path:
    """`peers`: microseconds."""
    rows = [
        Row("op", case, name, us)
        for case, ours in times.items()
        for name, us in ({"mla_fp8": ours} | peers).items()
    ]
    bench_regression.table.write_csv(path, rows, whole_op=True)
    return path


@pytest.fixture
def compare(tmp_path):
    def run(before, now, **options):
        files = (table(tmp_path / name, times) for name, times in (("a.csv", before), ("b.csv", now)))
        return bench_regression.compare(*files, **options)

    return run


@pytest.mark.parametrize(
    ("before", "now", "slower", "faster"),
    [
        (100.0, 104.9, 0, 0),
        (100.0, 105.1, 1, 0),
        (100.0, 94.9, 0, 1),
        (100.0, 95.1, 0, 0),
        (5.0, 5.9, 0, 0),  # 18 %, but less than a microsecond
        (5.0, 6.1, 1, 0),
    ],
)
def test_slower_is_over_5_percent_and_over_a_microsecond(compare, before, now, slower, faster):
    report = compare({"case": before}, {"case": now})
    assert (len(report.slower), len(report.faster)) == (slower, faster)


def test_cases_of_one_side_are_listed_and_do_not_fail(compare):
    report = compare({"kept": 10, "gone": 10}, {"kept": 10, "new": 99})
    assert report.missing == [("op", "gone")] and report.added == [("op", "new")] and not report.slower
    assert "Not measured now: op gone" in report.markdown(5) and "New: op new" in report.markdown(5)


def test_ops_that_were_not_run_are_not_missing(tmp_path):
    base = table(tmp_path / "a.csv", {"x": 1})
    now = tmp_path / "b.csv"
    now.write_text(base.read_text().replace("op,x", "other,x"))
    assert bench_regression.compare(base, now).missing == []


def test_the_report_shows_the_peers_of_both_runs(tmp_path):
    base = table(tmp_path / "a.csv", {"x": 100}, **{"copy": 90, "flash_mla, pad, slice": 200})
    now = table(tmp_path / "b.csv", {"x": 120}, **{"copy": 90, "flash_mla, pad, slice": 192, "triton": 360})
    (line,) = bench_regression.compare(base, now).slower
    assert "| +20.0 % | copy 0.90x -> 0.75x, flash_mla, pad, slice 2.00x -> 1.60x |" in line


def test_exit_status_says_whether_anything_is_slower(tmp_path):
    base = table(tmp_path / "a.csv", {"x": 100})
    for us, status in ((100, 0), (120, 1)):
        now = table(tmp_path / "b.csv", {"x": us})
        command = [sys.executable, SCRIPT, now, "--base", base]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == status and "1 cases" in result.stdout


def test_a_device_without_committed_results_passes(tmp_path):
    now = table(tmp_path / "some_other_gpu.csv", {"x": 1})
    result = subprocess.run([sys.executable, SCRIPT, now], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "nothing to compare with" in result.stdout


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_readable_and_equal_to_themselves(path):
    report = bench_regression.compare(path, path)
    assert report.num_cases > 10
    assert not (report.slower or report.faster or report.missing or report.added)
