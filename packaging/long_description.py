#!/usr/bin/env python3
"""The README as a package index shows it: there a relative link leads nowhere.

With the home of the sources (``MLA_FP8_HOME``, such as ``https://HOST/OWNER/mla_fp8``) links become absolute,
to the files of the release; without it only their text stays, and no picture. Run as a script it prints it.
"""

import os
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELATIVE = re.compile(r"\[([^][]*)\]\((?!\w+:|#)([^)\s]*)\)")


def home() -> str:
    return os.environ.get("MLA_FP8_HOME", "").rstrip("/")


def project_urls() -> dict[str, str]:
    if not home():
        return {}
    return {
        "Source": home(),
        "Documentation": f"{home()}/tree/main/docs",
        "Changelog": f"{home()}/blob/main/CHANGELOG.md",
        "Issues": f"{home()}/issues",
    }


def long_description() -> str:
    version = runpy.run_path(str(ROOT / "python/mla_fp8/_version.py"))["find"]()
    release = version.partition("+g")[2] or f"v{version}"  # between releases the commit
    picture = rf"![\1]({home()}/raw/{release}/\2)" if home() else ""
    link = rf"[\1]({home()}/blob/{release}/\2)" if home() else r"\1"
    text = re.sub("!" + RELATIVE.pattern, picture, (ROOT / "README.md").read_text())
    return RELATIVE.sub(link, text)


if __name__ == "__main__":
    print(long_description(), end="")
