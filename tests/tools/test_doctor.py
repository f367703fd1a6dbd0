import subprocess
import sys

import pytest
import torch

import mla_fp8
from mla_fp8 import _libraries
from mla_fp8.__main__ import main
from mla_fp8.backends.table import TABLE
from mla_fp8.tools import doctor


def test_report_says_what_the_dispatcher_says() -> None:
    kernels = doctor.collect()["kernels"]
    assert {"quantize_kv", "sparse_decode"} <= set(kernels)
    for op, devices in kernels.items():
        for device, key in (("cpu", "CPU"), ("cuda", "CUDA")):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_fp8::{op}", key)
            assert (device in devices.split(", ")) == has


@pytest.mark.parametrize(
    "content, said", [(None, "cannot open shared object file"), (b"", "file too short"), (b"x" * 99, "ELF")]
)
def test_a_library_that_does_not_load_says_why_and_what_to_do(content, said, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "libmla_fp8_cpu.so").write_bytes(content)
    monkeypatch.setattr(_libraries, "LIB_DIR", tmp_path)
    with pytest.raises(ImportError, match=f"cannot load libmla_fp8_cpu.so .*{said}.*make build"):
        _libraries.load_all()


def test_library_that_did_not_load_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_libraries.status, "libmla_fp8_cuda.so", "failed to load: no such symbol")
    assert "no such symbol" in mla_fp8.doctor()


def test_every_backend_of_the_table_has_a_row_per_op() -> None:
    rows = doctor.collect()["backends"]
    assert list(rows) == list(dict.fromkeys(f"{op}: {b.name}" for b in TABLE for op in b.ops))


def test_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == mla_fp8.doctor() + "\n"


def test_unknown_command_is_an_error() -> None:
    command = [sys.executable, "-m", "mla_fp8", "dance"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "dance" in result.stderr
