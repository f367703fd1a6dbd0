#!/usr/bin/env python3
"""A static package index (PEP 503, with PEP 658 metadata) of wheels, one per variant, for any web server.

  packaging/make_index.py dist/*.whl -o site
  pip install mla-fp8 --index-url https://HOST/whl/cu130

A variant is the first part of the local version label: site/whl/cpu, site/whl/cu130. CUDA 13's wheels serve
every 13.x and are listed under cu131 and cu132 too. A wheel whose metadata says another version than its name
is refused here, as pip would refuse it later.
"""

import argparse
import hashlib
import html
import re
import shutil
import zipfile
from pathlib import Path
from urllib.parse import quote

PROJECT = "mla-fp8"
VARIANT = re.compile(r"cpu|cu\d+|rocm\d+")
ALIASES = {"cu130": ("cu131", "cu132")}


def page(title: str, links: list[str]) -> str:
    head = f'<meta name="pypi:repository-version" content="1.1"><title>{html.escape(title)}</title>'
    body = "\n".join(f"{link}<br>" for link in links)
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{body}\n</body></html>\n"


def metadata_of(wheel: Path) -> bytes:
    """METADATA, which must be of the wheel's project and version. ValueError if it is not."""
    distribution, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{distribution}-{version}.dist-info/METADATA")
    fields = dict(re.findall(r"^(Name|Version): (.*)$", metadata.decode(), re.MULTILINE))
    if (fields["Name"], fields["Version"]) != (PROJECT, version):
        raise ValueError(f"{wheel.name} says that it is {fields['Name']} {fields['Version']}")
    return metadata


def variant_of(wheel: Path) -> str:
    label = wheel.name.split("-")[1].partition("+")[2].partition(".")[0]  # behind it is the commit's hash
    if not VARIANT.fullmatch(label):
        raise ValueError(
            f"{wheel.name}: no variant in the local version label (packaging/build_wheel.sh sets one)"
        )
    return label


def link(wheel: Path, metadata: bytes, folder: str) -> str:
    wheel_hash, metadata_hash = (hashlib.sha256(x).hexdigest() for x in (wheel.read_bytes(), metadata))
    python = re.search(r"^Requires-Python: (.*)$", metadata.decode(), re.MULTILINE)
    attributes = f'data-core-metadata="sha256={metadata_hash}"'
    if python:
        attributes += f' data-requires-python="{html.escape(python[1])}"'
    return f'<a href="{folder}{quote(wheel.name)}#sha256={wheel_hash}" {attributes}>{wheel.name}</a>'


def write(folder: Path, links: list[str]) -> None:
    """The two pages of an index: its projects, and the files of ours."""
    (folder / PROJECT).mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(page(folder.name, [f'<a href="{PROJECT}/">{PROJECT}</a>']))
    (folder / PROJECT / "index.html").write_text(page(PROJECT, links))


def build(wheels: list[Path], site: Path) -> None:
    """Copies the wheels into ``site/whl/<variant>/mla-fp8`` and writes every page."""
    by_variant: dict[str, list[tuple[Path, bytes]]] = {}
    for wheel in sorted(wheels):
        by_variant.setdefault(variant_of(wheel), []).append((wheel, metadata_of(wheel)))
    root = site / "whl"
    for variant, files in by_variant.items():
        write(root / variant, [link(wheel, metadata, "") for wheel, metadata in files])
        for wheel, metadata in files:
            shutil.copyfile(wheel, root / variant / PROJECT / wheel.name)
            (root / variant / PROJECT / f"{wheel.name}.metadata").write_bytes(metadata)
        for alias in ALIASES.get(variant, ()):
            where = f"../../{variant}/{PROJECT}/"
            write(root / alias, [link(wheel, metadata, where) for wheel, metadata in files])
    variants = sorted(path.name for path in root.iterdir() if path.is_dir())
    (root / "index.html").write_text(page("variants", [f'<a href="{v}/">{v}</a>' for v in variants]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("site"))
    options = parser.parse_args()
    build(options.wheels, options.out)
    print(f"{options.out}/whl/index.html")


if __name__ == "__main__":
    main()
