import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_fp8
from mla_fp8 import _libraries, _version, sparse_decode
from mla_fp8.__main__ import main
from mla_fp8.backends.table import TABLE
from mla_fp8.call import OPS
from mla_fp8.tools import doctor, environment


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
    monkeypatch.setattr(_libraries, "status", {})
    with pytest.raises(ImportError, match=f"cannot load libmla_fp8_cpu.so .*{said}.*make build"):
        _libraries.load_all()


def test_library_that_did_not_load_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_libraries.status, "libmla_fp8_cuda.so", "failed to load: no such symbol")
    assert "no such symbol" in mla_fp8.doctor()


def test_every_backend_of_the_table_has_a_row_per_op() -> None:
    rows = doctor.collect()["backends"]
    assert list(rows) == list(dict.fromkeys(f"{op}: {b.name}" for b in TABLE for op in b.ops))


def sections(report: str) -> list[str]:
    first, *blocks = report.split("\n\n")
    assert "\n" not in first
    return [block.partition("\n")[0] for block in blocks]


def test_command_prints_the_verdict_then_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    says, _, report = capsys.readouterr().out.partition("\n")
    assert says == doctor.verdict()[1]
    assert says.startswith(
        f"mla_fp8 {mla_fp8.__version__} works on the CPU ({torch.ops.mla_fp8.cpu_isa()} kernels)"
    )
    assert sections(f"{says}\n{report}") == [
        "versions",
        "libraries",
        "devices",
        "taken for sparse attention",
        "next",
    ]
    assert main(["doctor", "-v"]) == 0
    assert sections(capsys.readouterr().out)[4:-1] == ["kernels", "backends", "layouts"]


def test_the_report_is_json_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] and found["verdict"] == doctor.verdict()[1] and found["next"] == doctor.next_steps()
    assert found["backends"] == doctor.collect()["backends"]
    assert {"commit", "nvidia driver", "nvcc"} <= found["versions"].keys()


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (lambda out, lse: (out * 1.1, lse), "errs by 11%, at most 7% is right"),
        (lambda out, lse: out.view(3, 5), "fails: shape '[3, 5]' is invalid"),
    ],
)
def test_a_device_that_gives_wrong_results_fails_the_command(planted, says, monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "sparse_decode", lambda *tensors, **options: planted(*sparse_decode(*tensors, **options))
    )
    assert main(["doctor"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert f"does not work here; the CPU ({torch.ops.mla_fp8.cpu_isa()} kernels) {says}" in first


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mla_fp8", *arguments]
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)


@pytest.fixture
def without_library(tmp_path: Path) -> Path:
    shutil.copytree(Path(mla_fp8.__file__).parent, tmp_path / "mla_fp8", ignore=shutil.ignore_patterns("lib"))
    return tmp_path


@pytest.mark.slow
def test_the_report_is_there_where_the_cpu_library_is_not(without_library):
    failed = run(without_library, "doctor")
    first = failed.stdout.partition("\n")[0]
    assert failed.returncode == 1 and failed.stderr == ""
    assert "does not work here: cannot load libmla_fp8_cpu.so into torch" in first and "No such file" in first
    assert sections(failed.stdout) == ["versions", "libraries", "devices", "next"]
    found = json.loads(run(without_library, "doctor", "--json").stdout)
    assert not found["works"] and found["libraries"]["libmla_fp8_cpu.so"].startswith("failed to load: ")
    other = run(without_library, "demo")
    assert other.returncode == 1 and "ImportError: mla_fp8: cannot load" in other.stderr


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("1.2.0.dev7+cu130.g0123abcd", "0123abcd"),
        ("1.2.0.dev7+g0123abcd", "0123abcd"),
        ("1.2.0+cpu", "that of release 1.2.0+cpu"),
        ("unknown", "unknown"),
    ],
)
def test_an_installed_package_knows_its_commit(version, says, monkeypatch):
    monkeypatch.setattr(_version, "git", lambda *arguments: "")
    monkeypatch.setattr(_version, "find", lambda: version)
    assert environment.commit() == says


def test_the_commit_of_a_tree_is_gits_and_says_whether_there_are_changes(monkeypatch):
    said = {"rev-parse": "0123abcd" * 5, "status": " M x"}
    monkeypatch.setattr(_version, "git", lambda command, *arguments: said[command])
    assert environment.commit() == f"{said['rev-parse']}, with changes"
    said["status"] = ""
    assert environment.commit() == said["rev-parse"]


def test_driver_and_compiler_are_read(tmp_path, monkeypatch):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version"
    monkeypatch.setattr(environment, "_read", lambda path: text)
    assert environment.nvidia_driver() == "580.159.03"
    monkeypatch.setattr(environment, "_read", lambda path: "")
    assert environment.nvidia_driver() == ""
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(compiler))
    assert environment.nvcc() == f"13.0.88 at {compiler}"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert "does not run" in environment.nvcc()


def test_a_gpu_without_free_memory_is_still_listed(monkeypatch):
    class Properties:
        total_memory = 80 << 30

    def out_of_memory(device: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", out_of_memory)
    monkeypatch.setattr(environment, "arch_of", lambda *device: "sm90")
    assert environment.devices()["cuda:0"] == "H100, sm90, 80.0 GiB, CUDA error: out of memory"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    assert environment.devices()["cuda:0"] == "H100, sm90, 70.0 of 80.0 GiB free"


def test_unknown_command_is_an_error() -> None:
    command = [sys.executable, "-m", "mla_fp8", "dance"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "dance" in result.stderr


@pytest.mark.parametrize(
    "status, node, says",
    [
        ({"cuda": "failed to load: undefined symbol"}, None, "libmla_fp8_cuda.so did not load: take"),
        ({"cuda": "not in this build"}, "/dev/nvidiactl", "this build has no kernels for NVIDIA GPUs: "),
        ({"hip": "not in this build"}, "/dev/kfd", "this build has no kernels for AMD GPUs: docs/start.md"),
        ({"cuda": "not loaded: this torch"}, "/dev/nvidiactl", "this machine has an NVIDIA GPU and torch "),
        ({"cuda": "loaded"}, None, "no GPU is visible: the kernels for NVIDIA GPUs are loaded"),
        ({"cuda": "not in this build", "hip": "not loaded: this torch"}, None, None),
    ],
)  # fmt: skip
def test_the_report_ends_with_what_to_do_next(status, node, says, monkeypatch):
    libraries = {f"libmla_fp8_{name}.so": said for name, said in status.items()}
    monkeypatch.setattr(_libraries, "status", libraries)
    monkeypatch.setattr(doctor.Path, "exists", lambda path: str(path) == node)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *todo, demo, bench, documents = doctor.next_steps()
    assert demo.startswith("python -m mla_fp8 demo: ") and bench.startswith("python -m mla_fp8 bench: ")
    assert documents.startswith("docs/start.md")
    assert [line[: len(says)] for line in todo] == [says] if says else not todo
    monkeypatch.undo()
    assert mla_fp8.doctor().split("\n\n")[-1].splitlines()[0] == "next"


@pytest.mark.parametrize(
    "arch, hip, says",
    [
        ("sm90", None, None),
        (
            "sm80",
            None,
            "sm80: no kernel of sparse attention is tuned for it, and none of this package has run",
        ),
        ("gfx942", "7", "ROCm: "),
    ],
)
def test_a_gpu_is_told_what_it_has(arch, hip, says, monkeypatch):
    monkeypatch.setattr(_libraries, "status", {f"libmla_fp8_{'hip' if hip else 'cuda'}.so": "loaded"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(doctor, "arch_of", lambda *device: arch)
    *todo, demo, _, _ = doctor.next_steps()
    assert demo.startswith("python -m mla_fp8 demo" + ("" if hip else " --device cuda"))
    assert [line[: len(says)] for line in todo] == [says] if says else not todo


@pytest.mark.parametrize(
    "arch, kernel",
    [
        ("sm90", "native, tuned kernels; the portable one for _fnuz layouts"),
        ("sm80", "native, portable kernel as none is tuned for sm80"),
        ("sm121", "native, portable kernel as none is tuned for sm121"),
        ("gfx942", "native"),
    ],
)
def test_the_report_says_which_kernel_is_taken_and_why(arch, kernel, monkeypatch):
    monkeypatch.setattr(doctor, "arch_of", lambda *device: arch)
    monkeypatch.setattr(
        "mla_fp8.backends.table.probe", lambda backend, p: None if backend.needs_kernel else "no"
    )
    doctor.select.cache_clear()
    taken = doctor.collect()["taken for sparse attention"]
    doctor.select.cache_clear()
    assert list(taken) == list(OPS)
    assert all(line.startswith(f"{kernel} (") for line in taken.values())


def test_what_nothing_serves_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "arch_of", lambda *device: "sm80")
    monkeypatch.setattr("mla_fp8.backends.table.probe", lambda backend, p: "no")  # whatever is built here
    doctor.select.cache_clear()
    taken = doctor.collect()["taken for sparse attention"]
    doctor.select.cache_clear()
    assert taken == dict.fromkeys(OPS, "none (see below)")


def test_rocm_is_told_which_ops_its_library_lacks(monkeypatch):
    monkeypatch.setattr(_libraries, "status", {"libmla_fp8_hip.so": "loaded"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7")
    monkeypatch.setattr(doctor, "_kernels", lambda: {"index_topk": "cpu", "sparse_decode": "cpu, cuda"})
    assert doctor.next_steps()[0].startswith("ROCm: no kernel yet for index_topk; docs/guide/rocm.md")


def test_the_report_names_no_private_op_and_every_layout():
    report = doctor.collect()
    assert not [op for op in report["kernels"] if op.startswith("_")]
    assert report["layouts"].keys() == mla_fp8.KV_LAYOUTS.keys() | mla_fp8.INDEX_LAYOUTS.keys()


def test_a_reader_that_has_enough_is_no_traceback() -> None:
    command = f"{sys.executable} -m mla_fp8 doctor | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == f"{doctor.verdict()[1]}\n" and result.stderr == ""


def test_the_version_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"mla_fp8 {mla_fp8.__version__}\n"
