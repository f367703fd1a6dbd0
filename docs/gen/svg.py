"""Charts as SVG: small, the same bytes from the same numbers, colours that read on white and on black."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

TEXT, LINE, ONE = "#768390", "#76839055", "#d29922"
COLOURS = ("#3f83f8", "#2da44e", "#bf5af2", "#e8590c", "#e5484d")
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True)
class Range:
    label: str
    low: float
    middle: float
    high: float


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "start", bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'{weight}"
    return f"<text {place} fill='{TEXT}'>{html.escape(content)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 1) -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def document(width: int, height: float, title: str, parts: Iterable[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:.0f}' width='{width}' {FONT}"
    )
    body = "\n".join(parts)
    return f"{head} role='img'>\n<title>{html.escape(title)}</title>\n{body}\n</svg>\n"


def log_axis(low: float, high: float, left: float, right: float) -> Callable[[float], float]:
    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return left + min(1.0, max(0.0, share)) * (right - left)

    return place


def powers_of_two(low: float, high: float) -> list[float]:
    return [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Powers of two (or halves between) around the values and 1."""
    every = [1.0, *values]
    return 2 ** (math.floor(2 * math.log2(min(every)) - 0.2) / 2), 2 ** (
        math.ceil(2 * math.log2(max(every)) + 0.2) / 2
    )


def ranges(title: str, groups: Mapping[str, Sequence[Range]], one: str = "", unit: str = "x") -> str:
    """Horizontal bars from the lowest to the highest value on a logarithmic axis, a tick at the middle one.

    `one` is written under the line at 1, which then stands out.
    """
    width, left, right, step = 760, 140, 632, 19
    low, high = limits(v for rows in groups.values() for r in rows for v in (r.low, r.high))
    place, parts, y = log_axis(low, high, left, right), list[str](), 30.0
    bottom = y + sum(26 + step * len(rows) for rows in groups.values())
    parts.append(text(4, 16, title, 14, bold=True))
    for value in powers_of_two(low, high):
        colour, stroke = (ONE, 1.5) if one and value == 1 else (LINE, 1)
        parts.append(line(place(value), y, place(value), bottom, colour, stroke))
        parts.append(text(place(value), bottom + 16, f"{value:g}{unit}", 11, "middle"))
    parts.append(text(place(1), bottom + 31, one, 11, "middle"))
    for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
        y += 18
        parts.append(text(4, y, name, 12, bold=True))
        y += 8
        for row in rows:
            x1, x2 = place(row.low), place(row.high)
            parts.append(text(left - 8, y + 12, row.label, 12, "end"))
            bar = f"x='{x1:.1f}' y='{y + 3:.1f}' width='{max(2.0, x2 - x1):.1f}' height='11' rx='3'"
            parts.append(f"<rect {bar} fill='{colour}' fill-opacity='0.55'/>")
            parts.append(line(place(row.middle), y + 1, place(row.middle), y + 16, colour, 3))
            parts.append(text(right + 10, y + 12, f"{row.low:.2f} to {row.high:.2f}{unit}", 11))
            y += step
    return document(width, bottom + (38 if one else 22), title, parts)


def lines(title: str, panels: dict[str, dict[str, dict[str, float]]], one: str) -> str:
    """Panels of lines: {panel: {line: {x: value}}}, values on one logarithmic axis, a mark at 1."""
    width, height, top, gap, left = 760, 300, 44, 34, 40
    low, high = limits(v for curves in panels.values() for c in curves.values() for v in c.values())
    place, parts = log_axis(low, high, height - 34, top), [text(4, 16, title, 14, bold=True)]
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colours = dict(zip(names, COLOURS, strict=False))
    for i, name in enumerate(names):
        x = width - 100 * (len(names) - i)
        parts += [line(x, 33, x + 18, 33, colours[name], 3), text(x + 24, 37, name, 11)]
    each = (width - left - gap * (len(panels) - 1) - 8) / len(panels)
    for value in powers_of_two(low, high):
        y = place(value)
        parts.append(line(left, y, width - 8, y, ONE if value == 1 else LINE, 1.5 if value == 1 else 1))
        parts.append(text(left - 6, y + 4, f"{value:g}x", 11, "end"))
    parts.append(text(width - 10, place(1) - 5, one, 11, "end"))
    for i, (panel, curves) in enumerate(panels.items()):
        x0 = left + i * (each + gap)
        ticks = list(dict.fromkeys(x for curve in curves.values() for x in curve))
        at = {x: x0 + 14 + j * (each - 28) / max(1, len(ticks) - 1) for j, x in enumerate(ticks)}
        parts += [text(x, height - 18, tick, 11, "middle") for tick, x in at.items()]
        parts.append(text(x0 + each / 2, height - 3, panel, 11, "middle", bold=True))
        for name, curve in curves.items():
            points = [(at[x], place(value)) for x, value in curve.items()]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f"<polyline points='{path}' fill='none' stroke='{colours[name]}' stroke-width='2.5'/>"
            )
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colours[name]}'/>" for x, y in points]
    return document(width, height + 6, title, parts)


def bars(title: str, groups: dict[str, dict[str, float]], unit: str, roof: float) -> str:
    """Horizontal bars on a linear axis, with a line at `roof`."""
    width, left, right, step = 760, 250, 690, 18
    high = max(roof, *(v for bars_ in groups.values() for v in bars_.values())) * 1.02
    parts, y = [text(4, 16, title, 14, bold=True)], 26.0
    bottom = y + sum(20 + step * len(rows) for rows in groups.values())
    x_roof = left + (right - left) * roof / high
    parts.append(line(x_roof, y, x_roof, bottom, ONE, 1.5))
    for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
        y += 16
        parts.append(text(4, y, name, 12, bold=True))
        y += 4
        for label, value in rows.items():
            size = (right - left) * value / high
            parts.append(text(left - 8, y + 12, label, 11, "end"))
            bar = f"x='{left}' y='{y + 3:.1f}' width='{size:.1f}' height='11' rx='2'"
            parts.append(f"<rect {bar} fill='{colour}' fill-opacity='0.7'/>")
            parts.append(text(width - 8, y + 12, f"{value:.0f}{unit}", 11, "end"))
            y += step
    return document(width, bottom + 6, title, parts)
