"""The version: ``version.txt``'s at its tag; before that ``0.1.0.dev850+g88a51c9a``, the 850th commit.

An sdist's ``version.txt`` has the whole of it. setup.py runs this file, so it imports nothing of the package.
"""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TREE = Path(__file__).parents[2]


def in_source_tree() -> bool:
    return (TREE / "version.txt").exists() and (TREE / "csrc").is_dir()


def git(*arguments: str) -> str:
    """What git says of the source tree; empty without git, or outside of a checkout."""
    if not (TREE / ".git").exists():
        return ""
    command = ["git", "-C", str(TREE), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find(label: str = "", commit: str = "HEAD") -> str:
    """Of the source tree that this is a part of, at a commit; else of the installed package.

    ``label``: of the variant, such as ``cu130``; it comes before the hash.
    """
    if not in_source_tree():
        try:
            return version("mla-fp8")
        except PackageNotFoundError:  # copied to where it is, not installed
            return "unknown"
    base, _, commits_hash = (TREE / "version.txt").read_text().strip().partition("+")
    if (TREE / ".git").exists() and f"v{base}" not in git("tag", "--points-at", commit).split():
        shallow = git("rev-parse", "--is-shallow-repository") != "false"
        count = "0" if shallow else git("rev-list", "--count", commit)
        short = git("rev-parse", "--short=8", commit)
        base, commits_hash = f"{base}.dev{count or 0}", short and f"g{short}"
    local = ".".join(filter(None, (label, commits_hash)))
    return f"{base}+{local}" if local else base
