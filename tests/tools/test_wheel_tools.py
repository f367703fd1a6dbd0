"""The checks of wheels find what they are for, and pip installs from the index that we build."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mla_fp8
from mla_fp8 import _libraries

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import check_wheel
import long_description
import make_index
import sbom

CPU_LIBRARY = _libraries.LIB_DIR / "libmla_fp8_cpu.so"
TORCH = Path(check_wheel.find_spec("torch").submodule_search_locations[0])
CONTENT = CPU_LIBRARY.read_bytes()
VERSION = (ROOT / "version.txt").read_text().strip()
MACHINE = platform.machine()
PLATFORM = f"manylinux_{os.confstr('CS_GNU_LIBC_VERSION').split()[1].replace('.', '_')}_{MACHINE}"


def make_wheel(folder: Path, label: str = "cpu", tag: str = PLATFORM, **changes: str | bytes | None) -> Path:
    """A wheel with the library of this build. ``changes``: content of files by name, None leaves one out."""
    version = f"{VERSION}+{label}"
    info = f"mla_fp8-{version}.dist-info"
    content: dict[str, str | bytes | None] = {
        "mla_fp8/__init__.py": "where = 'from the index'\n",
        "mla_fp8/lib/libmla_fp8_cpu.so": CONTENT,
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: mla-fp8\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n",
        f"{info}/RECORD": "",
        f"{info}/licenses/LICENSE": "Apache-2.0",
        f"{info}/sboms/mla_fp8.cdx.json": "{}",
    }
    content |= {name.format(info=info): text for name, text in changes.items()}
    path = folder / f"mla_fp8-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in content.items():
            if text is not None:
                wheel.writestr(name, text)
    return path


@pytest.fixture(autouse=True)
def without_the_tools_of_others(monkeypatch):
    """They take a second each."""
    monkeypatch.setattr(check_wheel, "audit", lambda wheel, libraries: [])


def complaints(wheel: Path) -> list[str]:
    return list(check_wheel.check(wheel))


def test_a_good_wheel_passes(tmp_path):
    assert complaints(make_wheel(tmp_path)) == []


@pytest.mark.parametrize("home", ["", "https://host/owner/mla_fp8/"])
def test_the_readme_of_a_wheel_has_no_relative_link(home, monkeypatch):
    monkeypatch.setenv("MLA_FP8_HOME", home)
    text = long_description.long_description()
    assert not long_description.RELATIVE.search(text)
    release = mla_fp8.__version__.partition("+g")[2] or f"v{mla_fp8.__version__}"
    assert (f"https://host/owner/mla_fp8/blob/{release}/" in text) == bool(home)
    assert "](docs/guide/vllm.md)" not in text and "vLLM" in text
    assert (f"/raw/{release}/" in text and "docs/img/speed.svg" in text) == bool(home)
    assert all(
        url.startswith("https://host/owner/mla_fp8") for url in long_description.project_urls().values()
    )
    assert bool(long_description.project_urls()) == bool(home)


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_tool_is_named_at_once(missing):
    tools = ["sh", "no-such-tool"] if missing else ["sh"]
    result = subprocess.run([ROOT / "ci/need.sh", *tools], capture_output=True, text=True, check=False)
    assert result.returncode == missing
    assert ("not on PATH: no-such-tool. " in result.stderr) == missing


def test_the_tools_of_others_are_asked(tmp_path, monkeypatch):
    """They know a library that is not torch's stable ABI, a tag that is too old, and poor metadata, when they
    see them."""
    monkeypatch.undo()
    if not (check_wheel.find_spec("auditwheel") and check_wheel.find_spec("torch_abi_audit")):
        pytest.skip("auditwheel and torch-abi-audit are not installed")
    old = make_wheel(tmp_path, tag=f"manylinux_2_17_{MACHINE}")
    found = list(check_wheel.audit(old, [CPU_LIBRARY, TORCH / "lib/libtorch_python.so"]))
    twine = ["twine"] if check_wheel.find_spec("twine") else []
    assert [line.split(":")[0] for line in found] == ["auditwheel", *twine, "torch-abi-audit"]


@pytest.mark.parametrize(
    ("label", "changes", "found"),
    [
        ("cpu", {"{info}/METADATA": "Name: mla-fp8\nVersion: 9.9\n"}, "version in METADATA"),
        ("cpu", {"{info}/METADATA": "Name: x\n\n[docs](docs/x.md), [a](https://x)"}, "link to docs/x.md"),
        ("cpu", {"{info}/METADATA": "Requires-Dist: x @ git+https://y\n"}, "the direct URL of x @ git"),
        ("cpu", {"{info}/WHEEL": "Tag: py3-none-linux_x86_64\n"}, "tags in WHEEL"),
        ("cpu", {"{info}/licenses/LICENSE": None}, "no licenses/LICENSE"),
        ("cpu", {"{info}/sboms/mla_fp8.cdx.json": None}, "no sboms/mla_fp8.cdx.json"),
        ("cpu", {"mla_fp8/lib/libmla_fp8_cuda.so": CONTENT}, "libraries must be libmla_fp8_cpu.so, got"),
        ("cu130", {}, "libraries must be libmla_fp8_cpu.so, libmla_fp8_cuda.so, got libmla_fp8_cpu.so"),
        ("cpu", {"mla_fp8/secret.key": "x"}, "mla_fp8/secret.key does not belong"),
        ("cpu", {"tests/test_x.py": "x"}, "tests/test_x.py does not belong"),
        ("cpu", {"mla_fp8/__pycache__/x.pyc": "x"}, "x.pyc does not belong"),
    ],
)  # fmt: skip
def test_wrong_content_is_found(tmp_path, label, changes, found):
    assert any(found in line for line in complaints(make_wheel(tmp_path, label, **changes)))


def test_a_platform_tag_that_promises_too_old_a_glibc_is_found(tmp_path):
    wheel = make_wheel(tmp_path, tag=f"manylinux_2_17_{MACHINE}")
    assert any("needs glibc" in line for line in complaints(wheel))


def test_the_size_budget_counts_the_file_as_it_is_downloaded(tmp_path):
    path = make_wheel(tmp_path, **{"mla_fp8/data/zeros.txt": bytes(3_000_000)})
    assert complaints(path) == []
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as wheel:
        wheel.writestr("mla_fp8/data/stored.txt", bytes(3_000_000))
    assert any("MB, at most 2" in line for line in complaints(path))


def test_a_library_that_needs_another_is_found(tmp_path):
    """Torch's binding to Python needs libraries of torch that ours must not need, and CPython."""
    found = list(check_wheel.check_library(TORCH / "lib/libtorch_python.so", PLATFORM))
    assert any("needs libshm.so" in line or "needs libtorch_cpu.so" in line for line in found)
    assert any("CPython" in line for line in found)


def test_variants_are_told_by_their_label():
    versions = ("1.0+cpu", "1.0+cu126", "1.0+rocm7", "1.0", "1.0.dev7+cpu.g0123abcd", "1.0.dev7+g0123abcd")
    assert [check_wheel.kind(v) for v in versions] == ["cpu", "cu", "rocm", "cu", "cpu", "cu"]
    with pytest.raises(ValueError, match="custom"):
        check_wheel.kind("1.0+custom")


def test_the_listing_names_the_static_cuda_runtime_only_where_it_is_linked(monkeypatch):
    monkeypatch.setattr(sbom, "nvcc_version", lambda: "13.0.88")
    without, with_cuda = (sbom.document("1.0", TORCH, cuda) for cuda in (False, True))
    assert "cuda-cudart" not in without and "BSD-3-Clause" in without
    assert '"cuda-cudart"' in with_cuda and "NVIDIA CUDA Toolkit EULA" in with_cuda


def test_pip_installs_a_variant_from_the_index(tmp_path):
    wheels = [make_wheel(tmp_path, "cpu.g0123abcd"), make_wheel(tmp_path, "cu130")]
    make_index.build(wheels, tmp_path / "site")
    for variant, label in (("cpu", "cpu.g0123abcd"), ("cu130", "cu130"), ("cu132", "cu130")):
        target = tmp_path / variant
        index = (tmp_path / "site/whl" / variant).as_uri()
        command = [sys.executable, "-m", "pip", "install", "-q", "--isolated", "--no-deps", "--no-cache-dir"]
        command += ["--target", str(target), "--index-url", index, "mla-fp8"]
        subprocess.run(command, check=True, capture_output=True)
        assert (target / f"mla_fp8-{VERSION}+{label}.dist-info").is_dir()
        assert (target / "mla_fp8/__init__.py").read_text() == "where = 'from the index'\n"


def test_a_changed_file_is_refused_by_its_hash(tmp_path):
    wheel = make_wheel(tmp_path)
    make_index.build([wheel], tmp_path / "site")
    served = tmp_path / "site/whl/cpu/mla-fp8" / wheel.name
    served.write_bytes(served.read_bytes() + b"more")
    command = [sys.executable, "-m", "pip", "download", "-q", "--isolated", "--no-deps", "--no-cache-dir"]
    command += ["-d", str(tmp_path / "got"), "--index-url", (tmp_path / "site/whl/cpu").as_uri(), "mla-fp8"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "hash" in result.stderr.lower()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("Name: mla-fp8\nVersion: 0.0\n", "says that it is mla-fp8 0.0"),
        ("Name: other\nVersion: 1\n", "other"),
    ],
)
def test_a_wheel_that_pip_would_refuse_does_not_get_into_the_index(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        make_index.build([make_wheel(tmp_path, **{"{info}/METADATA": metadata})], tmp_path / "site")


def test_a_wheel_without_a_variant_does_not_get_into_the_index(tmp_path):
    path = make_wheel(tmp_path)
    path = path.rename(path.with_name(path.name.replace("+cpu", "+g0123abcd")))
    with pytest.raises(ValueError, match="no variant in the local"):
        make_index.build([path], tmp_path / "site")


def test_a_setting_of_the_build_that_is_neither_yes_nor_no_stops_it(tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path,
        "--build-temp",
        tmp_path,
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MLA_FP8_HIP": "perhaps"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert result.stderr.strip().endswith("mla_fp8: MLA_FP8_HIP must be 1 or 0, got 'perhaps'")
    assert not any(tmp_path.iterdir())
