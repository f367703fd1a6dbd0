"""Charts and drawings can be read on a phone, texts keep clear of each other, axes are in order."""

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/gen"))
import performance
import svg

PHONE = 358  # pixels for a page on a screen of 390
IMAGES = sorted((ROOT / "docs/img").glob("*.svg"))
CHARTS = ("accuracy", "cache_memory", "cache_ops", "decode", "engine_steps", "speed", "trained")


@dataclass(frozen=True)
class Box:
    """Where a text is, at least: letters are taken to be narrow."""

    words: str
    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def elements(path: Path, kind: str) -> list[dict[str, str]]:
    return [x.attrib | {"words": x.text or ""} for x in ET.parse(path).iter() if x.tag.endswith(f"}}{kind}")]


def width(path: Path) -> float:
    return float(ET.parse(path).getroot().attrib["viewBox"].split()[2])


def texts(path: Path, letter: float) -> list[Box]:
    boxes = []
    for t in elements(path, "text"):
        size, x, y = float(t["font-size"]), float(t["x"]), float(t["y"])
        long = letter * size * len(t["words"])
        left = x - {"start": 0.0, "middle": long / 2, "end": long}[t["text-anchor"]]
        boxes.append(Box(t["words"], left, left + long, y - 0.7 * size, y + 0.2 * size))
    return boxes


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_letters_are_large_enough_on_a_phone(path: Path) -> None:
    smallest = min(float(t["font-size"]) for t in elements(path, "text"))
    assert smallest * min(1.0, PHONE / width(path)) >= 10


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_texts_are_inside_and_clear_of_each_other(path: Path) -> None:
    boxes = texts(path, 0.5)
    assert [b.words for b in boxes if b.left < 0 or b.right > width(path)] == []
    assert [(a.words, b.words) for a, b in combinations(boxes, 2) if a.meets(b)] == []


@pytest.mark.parametrize("name", CHARTS)
def test_no_upright_line_and_no_bar_crosses_a_text(name: str) -> None:
    path = ROOT / f"docs/img/{name}.svg"
    upright = [t for t in elements(path, "line") if t["x1"] == t["x2"]]
    things = [
        Box("line", float(t["x1"]), float(t["x1"]), *sorted((float(t["y1"]), float(t["y2"]))))
        for t in upright
    ]
    for t in elements(path, "rect"):
        x, y = float(t["x"]), float(t["y"])
        things.append(Box("bar", x, x + float(t["width"]), y, y + float(t["height"])))
    found = [(b.words, t.words) for b in texts(path, svg.LETTER) for t in things if b.meets(t)]
    assert found == []


def test_batches_ascend_along_the_axis_of_decode() -> None:
    path = ROOT / "docs/img/decode.svg"
    by_height: dict[str, list[tuple[float, int]]] = {}
    for t in elements(path, "text"):
        if t["words"].isdigit():
            by_height.setdefault(t["y"], []).append((float(t["x"]), int(t["words"])))
    assert len(by_height) == 3
    for ticks in by_height.values():
        numbers = [number for _, number in sorted(ticks)]
        assert len(numbers) > 2 and numbers == sorted(numbers)
    for points in elements(path, "polyline"):
        xs = [float(point.split(",")[0]) for point in points["points"].split()]
        assert all(a < b for a, b in pairwise(xs))


def test_a_chart_says_its_gpu_and_whose_kernels_it_compares() -> None:
    for name in ("decode", "engine_steps", "speed"):
        words = " ".join(t["words"] for t in elements(ROOT / f"docs/img/{name}.svg", "text"))
        assert "FlashMLA" in words and re.search(r"\bH[12]00\b", words), name


def test_what_is_compared_from_pages_is_flash_mla_over_a_ready_workspace() -> None:
    cases = performance.strongest(performance.H100)["prefill from FP8 pages"]
    assert len(cases) > 40 and min(ratio for _, ratio, _ in cases) < 0.6
    assert not any(case.op.endswith("real_rows") for *_, case in cases)
