"""``python -m mla_fp8 bench``: the table, the CSV that grows run by run, the chart."""

import csv
import re
import sys

import pytest

from mla_fp8 import bench
from mla_fp8.__main__ import main

sys.path.insert(0, str(bench.FOLDER))
import table


def run(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


def test_every_benchmark_is_known_by_its_op():
    assert {"quantize_kv", "dequantize_kv", "sparse_attention", "call_overhead"} <= set(bench.SCRIPTS)


def test_rows_are_printed_written_and_drawn(tmp_path, capsys):
    assert run("pad_q_heads", "--only", "128", "--seconds", 0, "--out", tmp_path, "--plot") == 0
    printed = capsys.readouterr().out
    written, chart = sorted(tmp_path.iterdir())
    header, *rows = csv.reader(written.open(newline=""))
    assert header == table.COLUMNS and len(rows) == 2
    for op, case, us, gbps, *_, baselines in rows:
        assert op == "pad_q_heads" and float(us) > 0 and float(gbps) > 0
        assert set(table.ratios(baselines)) == {"copy", "torch"}
        assert re.search(rf"^{re.escape(case)} +[\d.]+ ", printed, re.MULTILINE)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_smoke_run_writes_nothing(tmp_path):
    assert run("pad_q_heads", "--smoke", "--out", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_unknown_benchmark_names_the_known_ones(capsys):
    assert run("pad_heads") == 2
    assert "pad_heads" in (message := capsys.readouterr().err) and "pad_q_heads" in message


def test_a_benchmark_that_fails_fails_the_run_but_not_the_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "fine.py").write_text("print('fine')")
    scripts = {name: tmp_path / f"{name}.py" for name in ("broken", "fine")}
    monkeypatch.setattr(bench, "SCRIPTS", scripts)
    assert run("--smoke") == 1
    out, err = capsys.readouterr()
    assert "fine" in out and "failed: broken" in err


def row(op: str, case: str, us: str) -> list[str]:
    return [op, case, us, "1", "0", "50", "2.00x copy"]


@pytest.mark.parametrize(
    ("whole_op", "want"),
    [
        (True, [row("a", "x", "3"), row("b", "x", "1")]),
        (False, [row("a", "y", "1"), row("a", "x", "3"), row("b", "x", "1")]),
    ],
)
def test_new_rows_replace_those_of_their_op_or_of_their_cases(tmp_path, whole_op, want):
    path = tmp_path / "deeper" / "device.csv"
    table.write_csv(path, [row("a", "x", "1"), row("a", "y", "1")], whole_op=True)
    table.write_csv(path, [row("b", "x", "1")], whole_op=True)
    table.write_csv(path, [row("a", "x", "3")], whole_op=whole_op)
    assert table.read_csv(path) == want


def test_baselines_are_read_back_as_ratios():
    text = "0.85x copy  27.00x torch  1.5x flash_mla, pad, slice  error 1.7e-03, flash_mla 1.8e-03"
    assert table.ratios(text) == {"copy": 0.85, "torch": 27.0, "flash_mla, pad, slice": 1.5}
    assert table.ratios("") == {}
