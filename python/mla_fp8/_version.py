"""The version: of the source tree that this is a part of, else of the installed package."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TREE = Path(__file__).parents[2]


def in_source_tree() -> bool:
    return (TREE / "version.txt").exists() and (TREE / "csrc").is_dir()


def find() -> str:
    if in_source_tree():
        return (TREE / "version.txt").read_text().strip()
    try:
        return version("mla-fp8")
    except PackageNotFoundError:  # copied to where it is, not installed
        return "unknown"
