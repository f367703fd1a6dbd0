"""A hook of MkDocs: files at the top of the tree become pages, with their links as seen from docs/."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ALL_OF = re.compile(r"<!-- all of (\S+) -->\n")


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    found = ALL_OF.fullmatch(markdown)
    return markdown if found is None else (ROOT / found[1]).read_text().replace("](docs/", "](")
