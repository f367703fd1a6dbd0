"""Every commit has its version, and so has whatever is built from one."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import mla_fp8
from mla_fp8 import _version

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always")
    command = ["git", *author, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def find(folder: Path, *arguments: str) -> str:
    return runpy.run_path(str(folder / "python/mla_fp8/_version.py"))["find"](*arguments)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "python/mla_fp8").mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "csrc/x.h").touch()
    (folder / "version.txt").write_text("1.2.0\n")
    shutil.copy(_version.__file__, folder / "python/mla_fp8/_version.py")
    return folder


@pytest.fixture
def checkout(tree: Path) -> Path:
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    for message in ("first", "second"):
        git(tree, "commit", "-q", "--allow-empty", "-m", message)
    return tree


def test_a_commit_between_releases_is_counted_and_named(checkout):
    short = git(checkout, "rev-parse", "--short=8", "HEAD")
    assert find(checkout) == f"1.2.0.dev2+g{short}"
    assert find(checkout, "cu130") == f"1.2.0.dev2+cu130.g{short}"
    first = git(checkout, "rev-parse", "HEAD~1")
    assert find(checkout, "", first) == f"1.2.0.dev1+g{first[:8]}"


def test_a_release_is_what_version_txt_says(checkout):
    git(checkout, "tag", "v1.1.0")
    assert find(checkout).startswith("1.2.0.dev2+g")  # another's tag
    git(checkout, "tag", "v1.2.0")
    assert find(checkout) == "1.2.0" and find(checkout, "cpu") == "1.2.0+cpu"


def test_a_checkout_without_its_history_counts_nothing(checkout, tmp_path):
    git(tmp_path, "clone", "-q", "--depth=1", checkout.as_uri(), "shallow")
    assert re.fullmatch(r"1\.2\.0\.dev0\+g[0-9a-f]{8}", find(tmp_path / "shallow"))


def test_sources_outside_of_a_checkout_say_what_they_were_made_from(tree):
    assert find(tree) == "1.2.0"
    (tree / "version.txt").write_text("1.2.0.dev7+g0123abcd\n")
    assert find(tree) == "1.2.0.dev7+g0123abcd" and find(tree, "cpu") == "1.2.0.dev7+cpu.g0123abcd"


def test_an_sdist_has_the_version_of_its_commit(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        text = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive if m.isfile()}
    assert text["version.txt"].decode().strip() == mla_fp8.__version__
    assert f"\nVersion: {mla_fp8.__version__}\n" in text["PKG-INFO"].decode()
    assert "setup.py" in text and "csrc/registration.cpp" in text
    base = (ROOT / "version.txt").read_text().strip()
    assert base in mla_fp8.__version__ and "dev" not in base  # the tree's own is not written
