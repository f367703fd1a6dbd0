"""``python -m mla_fp8 bench``: the table, the CSV that grows run by run, the chart."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_fp8.__main__ import main
from mla_fp8.tools import bench

sys.path.insert(0, str(bench.FOLDER))
import chart
import merge
import table

import harness


def run(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


def test_every_benchmark_is_known_by_its_op():
    assert {"quantize_kv", "dequantize_kv", "sparse_attention", "call_overhead"} <= set(bench.SCRIPTS)


@pytest.mark.slow
def test_rows_are_printed_written_and_drawn(tmp_path, capsys):
    assert run("pad_q_heads", "--all", "--only", "128", "--seconds", 0, "--out", tmp_path, "--plot") == 0
    printed = capsys.readouterr().out
    written, picture = sorted(tmp_path.iterdir())
    cases = table.cases(table.read_csv(written))
    assert len(cases) == 2
    for case in cases:
        assert case.op == "pad_q_heads" and case.ours.us > 0 and case.gbps > 0
        assert case.percent_of_ceiling > 0 and set(case.peers) == {"copy", "torch"}
        assert re.search(rf"^{re.escape(case.label)} +[\d.]+ ", printed, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for peer in ("copy", "torch"):
        line = rf"^pad_q_heads, {peer} .*o.*  [\d.]+x, [\d.]+ to [\d.]+ in 2 cases$"
        assert re.search(line, printed, re.MULTILINE)
    assert re.search(r"^Worst: [\d.]+x (copy|torch) in pad_q_heads, tokens=", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_smoke_run_writes_nothing(tmp_path):
    assert run("pad_q_heads", "--smoke", "--out", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_label_that_no_case_has_is_said_and_nothing_measured(tmp_path, capsys):
    assert run("pad_q_heads", "--only", "nothing", "--out", tmp_path) == 0
    assert capsys.readouterr().out.strip() == "pad_q_heads: no case has 'nothing' in its label"
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


def test_a_reader_who_has_enough_ends_the_benchmark_without_a_word(capfd):
    def has_enough():
        raise BrokenPipeError

    endless = "import itertools\nfor i in itertools.count(): print(i, flush=True)"
    with pytest.raises(BrokenPipeError):
        bench.stream([sys.executable, "-c", endless], has_enough)
    assert capfd.readouterr().err == ""


def row(op: str, case: str, us: float, implementation: str = table.OURS, **other: object) -> table.Row:
    return table.Row(op, case, implementation, us, **other)


@pytest.mark.parametrize(
    ("whole_op", "want"),
    [
        (True, [row("a", "x", 3), row("b", "x", 1)]),
        (False, [row("a", "y", 1), row("a", "x", 3), row("b", "x", 1)]),
    ],
)
def test_new_rows_replace_those_of_their_op_or_of_their_cases(tmp_path, whole_op, want):
    path = tmp_path / "deeper" / "device.csv"
    table.write_csv(path, [row("a", "x", 1), row("a", "x", 2, "copy"), row("a", "y", 1)], whole_op=True)
    table.write_csv(path, [row("b", "x", 1)], whole_op=True)
    table.write_csv(path, [row("a", "x", 3)], whole_op=whole_op)
    assert table.read_csv(path) == want


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [
        row("a", "x", 12345.678, error=1.69e-3, difference=2e-3, bytes=10**10, flops=1, commit="0123abcd+"),
        row("a", "x", 0.25, "flash_mla, pad, slice", error=0.0),
    ]
    table.write_csv(tmp_path / "device.csv", rows, whole_op=True)
    assert table.read_csv(tmp_path / "device.csv") == [replace(rows[0], us=12345.68), rows[1]]


def test_a_file_of_other_columns_is_refused(tmp_path):
    (tmp_path / "device.csv").write_text("op,case,us\na,x,1\n")
    with pytest.raises(ValueError, match=r"columns must be op, case, implementation.*got op, case, us$"):
        table.read_csv(tmp_path / "device.csv")


def test_ratios_rates_and_shares_are_computed_from_rows():
    rows = [
        row("a", "x", 20.0, bytes=4_000_000, flops=60_000_000),
        row("a", "x", 5.0, table.CEILING),
        row("a", "x", 17.0, "copy"),
        row("a", "x", 540.0, "torch"),
    ]
    (case,) = table.cases(rows)
    assert case.ratios == {"copy": 0.85, "torch": 27.0}
    assert (case.gbps, case.tflops, case.percent_of_ceiling) == (200.0, 3.0, 25.0)


def test_a_folder_of_results_is_merged_under_the_commit_that_was_measured(tmp_path, monkeypatch, capfd):
    new, results = tmp_path / "new", tmp_path / "results"
    generated = tmp_path / "generate.py"
    generated.write_text("print('generated')")
    monkeypatch.setattr(merge, "RESULTS", results)
    monkeypatch.setattr(merge, "GENERATE", generated)
    table.write_csv(
        results / "gpu.csv",
        [row("a", "x", 9, commit="old"), row("a", "x", 9, "triton"), row("a", "y", 9, commit="old")],
        whole_op=True,
    )
    table.write_csv(new / "gpu.csv", [row("a", "x", 1), row("a", "x", 2, "copy", commit="theirs")], True)
    assert merge.main([str(new), "--commit", "abc"]) == ["gpu.csv"]
    assert table.read_csv(results / "gpu.csv") == [
        row("a", "y", 9, commit="old"),
        row("a", "x", 1, commit="abc"),
        row("a", "x", 2, "copy", commit="theirs"),
    ]
    out = capfd.readouterr().out
    assert "1 new, 1 of the same ops keep older rows" in out and "generated" in out
    assert "triton was not measured again in 1" in out
    with pytest.raises(SystemExit, match="no CSV"):
        merge.main([str(tmp_path / "nothing"), "--commit", "abc"])


def test_the_chart_has_dashes_from_worst_to_best_and_the_median():
    ours = [row("op", case, 10.0) for case in "abc"]
    peers = [row("op", case, us, "peer") for case, us in zip("abc", (5.0, 20.0, 80.0), strict=True)]
    (span,) = chart.spans(ours + peers)
    assert (span.worst, span.median, span.best, span.worst_case) == (0.5, 2.0, 8.0, "a")
    *_, scale, line, _, worst = chart.of_peers([span]).splitlines()
    at = {mark: scale.index(mark) for mark in ("1/2", " 1 ", " 2 ", " 8 ")}
    assert line[at["1/2"]] == "-" and line[at[" 2 "] + 1] == "o" and line[at[" 8 "] + 1] == "-"
    assert line[at["1/2"] : at[" 8 "] + 2].count("-") == at[" 8 "] + 1 - at["1/2"]
    assert line.endswith("  2.00x, 0.50 to 8.00 in 3 cases") and worst == "Worst: 0.50x peer in op, a"


def test_the_chart_has_each_op_that_ran_with_and_without_peers():
    rows = [row("alone", "x", 2_000, bytes=1), row("alone", "x", 500, table.CEILING), row("alone", "y", 10)]
    (own,) = chart.times(rows)
    assert own.says == "10 to 2,000 us in 2 cases, 12% of the ceiling"
    assert chart.text([], [own]).splitlines()[-1] == "alone  10 to 2,000 us in 2 cases, 12% of the ceiling"
    rows += [row("b", "x", 10), row("b", "x", 20, "peer"), row("b", "x", 15, table.CEILING)]
    said = chart.text(chart.spans(rows), chart.times(rows))
    assert said.count("peer") == 2 and said.endswith("\nb      10 us in 1 case, >100% of the ceiling")


def test_the_chart_of_a_run_has_what_it_ran(tmp_path, monkeypatch, capfd):
    """And not what earlier runs left in the folder."""
    code = f"import sys; sys.path.insert(0, {str(bench.FOLDER)!r}); import table; from pathlib import Path\n"
    code += (
        "table.write_csv(Path(sys.argv[-1], 'x.csv'), [table.Row('{}', 'c', 'mla_fp8', {})], whole_op=True)\n"
    )
    scripts = {}
    for name, us in (("a", 1), ("b", 2)):
        scripts[name] = tmp_path / f"{name}.py"
        scripts[name].write_text(code.format(name, us))
    monkeypatch.setattr(bench, "SCRIPTS", scripts)
    out = tmp_path / "out"
    assert run("a", "--out", out) == 0
    assert capfd.readouterr().out.endswith("\n\na  1 us in 1 case\n")
    assert run("b", "--out", out) == 0
    assert capfd.readouterr().out.endswith("\n\nb  2 us in 1 case\n")
    assert [row.op for row in table.read_csv(out / "x.csv")] == ["a", "b"]


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ([], ["--seconds", "0.2", "--limit", "27.0"]),
        (["--seconds", "1"], ["--seconds", "1.0", "--limit", "27.0"]),
        (["--all"], ["--seconds", "3.0"]),
    ],
)
def test_a_cpu_measures_for_a_minute_unless_asked_for_all(asked, passed, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(bench, "SCRIPTS", {"a": Path("a.py"), "b": Path("b.py")})
    monkeypatch.setattr(bench, "stream", lambda command, show: commands.append(command) or 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(*asked, "--out", tmp_path) == 0
    assert [command[2:-2] for command in commands] == [["--only", "", *passed]] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    commands.clear()
    assert run("--out", tmp_path) == 0 and commands[0][2:-2] == ["--only", "", "--seconds", "3.0"]


def test_a_case_with_inputs_is_not_made_where_it_is_left_out(monkeypatch, capsys):
    made = []

    def works():
        for i in range(5):
            made.append(i)
            yield harness.Work(f"case {i}", lambda: None)

    options = argparse.Namespace(only="", limit=0.0, smoke=True, seconds=0.0, csv=None)
    monkeypatch.setattr(harness, "ceilings", lambda: {"clone": 1.0, "copy_": 1.0, "matmul": 1.0})
    harness.run("op", works(), options=options)
    assert made == [0]
    assert capsys.readouterr().out == "not run within 0 s: case 0, and what comes behind it\n"


def test_the_chart_keeps_what_is_off_its_scale_at_the_ends():
    assert chart.column(1e-3) == 0 and chart.column(1e6) == chart.column(chart.TICKS[-1])


def test_progress_is_a_line_per_benchmark_where_nobody_watches(tmp_path, monkeypatch, capsys):
    scripts = {name: tmp_path / f"{name}.py" for name in ("pad_q_heads", "merge_attention_states")}
    for path in scripts.values():
        path.touch()
    monkeypatch.setattr(bench, "SCRIPTS", scripts)
    assert run("pad_q_heads", "merge_attention_states", "--smoke") == 0
    said = re.sub(r", \d+ s\]", "]", capsys.readouterr().err)
    assert said == "[1/2] pad_q_heads\n[2/2] merge_attention_states\n"
