"""A hook of MkDocs: files at the top of the tree become pages, with their links as seen from docs/.

The search does not find the notebook, and every page says the version. The files of benchmarks/results and
examples are part of the site.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ALL_OF = re.compile(r"<!-- all of (\S+) -->\n")


def on_config(config: "MkDocsConfig") -> None:
    """The foot of each page says the version. Pages link to their sources if their home is known."""
    if not config.repo_url:
        config.edit_uri = None
    config.copyright = f"mla_fp8 {(ROOT / 'version.txt').read_text().strip()}, Apache-2.0"


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    for folder, pattern in (("benchmarks/results", "*.csv"), ("examples", "*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            place = f"data/{path.parent.name}/{path.name}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    if page.file.src_uri.startswith("notebook/"):
        page.meta["search"] = {"exclude": True}
    found = ALL_OF.fullmatch(markdown)
    markdown = markdown.replace("](../benchmarks/results/", "](data/results/")  # of pages beside index.md
    markdown = markdown.replace("](../../examples/", "](../data/examples/")  # of pages in docs/guide
    return markdown if found is None else (ROOT / found[1]).read_text().replace("](docs/", "](")
