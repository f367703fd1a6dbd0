"""What `python -m mla_fp8` says to who gets it wrong: one sentence and status 2, never a traceback."""

import subprocess
import sys

import pytest
import torch

from mla_fp8.__main__ import main


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["demo", "--device", "gpu"], "--device: expected cpu, cuda"),
        (["demo", "--device", "cuda:x"], "--device: expected cpu, cuda"),
        (["demo", "--device", "cuda"], "--device: there is no cuda: "),
        (["replay", "x", "--device", "cuda:3"], "--device: there is no cuda:3: "),
        (["demo", "--chunk", "0"], "--chunk: expected a whole number of at least 1, got '0'"),
        (["demo", "--tokens", "-5"], "--tokens: expected a whole number of at least 3, got '-5'"),
        (["demo", "--decode-steps", "x"], "--decode-steps: expected a whole number of at least"),
        (
            ["demo", "--device", "cpu:1"],
            "--device: expected cpu, cuda (ROCm's name too) or cuda:N, got 'cpu:1'",
        ),
        (["demo", "--heads", "129"], "--heads: expected a whole number from 1 to 128, got '129'"),
        (
            ["demo", "--seed", str(1 << 70)],
            "--seed: expected a whole number from 0 to 9223372036854775807, got",
        ),
        (["bench", "--seconds", "-1"], "--seconds: expected a number of seconds of at least 0, got '-1'"),
        (["bench", "--seconds", "nan"], "--seconds: expected a number of seconds of at least 0, got 'nan'"),
        (["bench", "--smoke", "--plot"], "--plot: not allowed with argument --smoke"),
        (["replay", "x", "--seconds", "x"], "--seconds: expected a number of seconds of at least 0, got 'x'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, is_about",
    [("demo", "real text through"), ("bench", "time the ops"), ("replay", "run recorded calls")],
)
def test_help_says_what_a_command_is(command, is_about, capsys):
    for arguments in ([command, "--help"], ["--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        says = capsys.readouterr().out
        assert is_about in says and "``" not in says


@pytest.mark.parametrize("command", [["demo"], ["bench", "pad_q_heads", "--seconds", "0.01"]])
def test_a_folder_that_cannot_be_made_is_named_before_any_work(command, capsys, tmp_path):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out")
    assert main([*command, "--out", out]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mla_fp8 {command[0]}: ") and out in captured.err and not captured.out


def test_a_folder_is_no_recording(capsys, tmp_path):
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"mla_fp8 replay: {tmp_path} is not a file\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["--help"], ["doctor"], ["demo", "--help"], ["replay", "nothing"]], ids=str
)
def test_commands_run_without_docstrings(command):
    """As under PYTHONOPTIMIZE=2: a help text that is missing costs no command."""
    run = [sys.executable, "-OO", "-m", "mla_fp8", *command]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode == (2 if command[0] == "replay" else 0)
