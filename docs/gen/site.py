"""A hook of MkDocs: files at the top of the tree become pages, with their links as seen from docs/.

The search does not find the notebook, and every page says the version.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ALL_OF = re.compile(r"<!-- all of (\S+) -->\n")


def on_config(config: "MkDocsConfig") -> None:
    """The foot of each page says the version."""
    config.copyright = f"mla_fp8 {(ROOT / 'version.txt').read_text().strip()}, Apache-2.0"


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    if page.file.src_uri.startswith("notebook/"):
        page.meta["search"] = {"exclude": True}
    found = ALL_OF.fullmatch(markdown)
    return markdown if found is None else (ROOT / found[1]).read_text().replace("](docs/", "](")
