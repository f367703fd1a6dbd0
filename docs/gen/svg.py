"""Charts as SVG: small, the same bytes from the same numbers, colours that read on white and on black.

Every chart is WIDTH units wide: a phone has about 360 pixels for them, a desktop SHOWN. Text keeps clear of
other text, of bars and of upright lines (tests/tools/test_charts.py).
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, SHOWN = 440, 500
TEXT, LINE, ONE = "#768390", "#76839055", "#d29922"
COLOURS = ("#3f83f8", "#2da44e", "#bf5af2", "#e8590c", "#e5484d")
PARTS = ("#3f83f8", "#bf5af2", "#e5484d", "#e8590c", "#d29922", "#2da44e", "#768390", "#0e8a9a")
FONT = "font-family='system-ui, sans-serif'"
TITLE, HEAD, BODY, SMALL = 17, 15, 14, 13  # font sizes
STEP = 24  # from one bar to the next
LETTER = 0.62  # of the font size: how wide a letter is at most on average


@dataclass(frozen=True)
class Range:
    label: str
    low: float
    middle: float
    high: float


def text(
    x: float, y: float, content: str, size: int = BODY, anchor: str = "start", bold: bool = False
) -> str:
    weight = " font-weight='600'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'{weight}"
    return f"<text {place} fill='{TEXT}'>{html.escape(content)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 1) -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float = 0.6) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='3'"
    return f"<rect {place} fill='{colour}' fill-opacity='{opacity:g}'/>"


def document(height: float, title: str, parts: Iterable[str], width: int = WIDTH, shown: int = SHOWN) -> str:
    size = f"viewBox='0 0 {width} {height:.0f}' width='{shown}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}"
    body = "\n".join(parts)
    return f"{head} role='img'>\n<title>{html.escape(title)}</title>\n{body}\n</svg>\n"


def heading(title: str, note: str) -> tuple[list[str], float]:
    """The title with a smaller line under it, and where the chart may begin."""
    parts = [text(2, 18, title, TITLE, bold=True)]
    return (parts, 26.0) if not note else ([*parts, text(2, 38, note, SMALL)], 46.0)


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


def ranges(title: str, note: str, groups: Mapping[str, Sequence[Range]], unit: str = "x") -> str:
    """Horizontal bars from the lowest to the highest value on a logarithmic axis, a tick at the middle one.

    The line at 1x, if the unit is that, stands out.
    """
    longest = max(len(row.label) for rows in groups.values() for row in rows)
    left, right = 12 + LETTER * BODY * longest, WIDTH - 122
    low, high = limits(v for rows in groups.values() for r in rows for v in (r.low, r.high))
    place = log_axis(low, high, left, right)
    ticks = powers_of_two(low, high)
    ticks = ticks if len(ticks) < 6 else ticks[::2]
    parts, y = heading(title, note)
    for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
        parts.append(text(2, y + 20, name, HEAD, bold=True))
        y += 28
        for value in ticks:
            mark = (ONE, 2) if value == 1 and unit == "x" else (LINE, 1)
            parts.append(line(place(value), y, place(value), y + STEP * len(rows), *mark))
        for row in rows:
            x1, x2 = place(row.low), place(row.high)
            parts.append(text(left - 8, y + 17, row.label, BODY, "end"))
            parts.append(rectangle(x1, y + 5, max(2.0, x2 - x1), 14, colour, 0.55))
            parts.append(line(place(row.middle), y + 3, place(row.middle), y + 21, colour, 3))
            parts.append(text(right + 8, y + 17, f"{row.low:.2f} to {row.high:.2f}{unit}", SMALL))
            y += STEP
    for value in ticks:
        parts.append(text(place(value), y + 16, f"{value:g}{unit}", SMALL, "middle"))
    return document(y + 24, title, parts)


def lines(title: str, note: str, panels: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """Panels under each other: {panel: {line: {x: value}}}, x ascending, values on one logarithmic axis."""
    left, tall = 40.0, 170.0
    low, high = limits(v for curves in panels.values() for c in curves.values() for v in c.values())
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colours = dict(zip(names, COLOURS, strict=False))
    parts, y = heading(title, note)
    for i, name in enumerate(names):
        x = 2 + i * (WIDTH - 4) / len(names)
        parts += [line(x, y + 10, x + 14, y + 10, colours[name], 4), text(x + 18, y + 15, name, SMALL)]
    y += 20
    for panel, curves in panels.items():
        parts.append(text(2, y + 22, panel, HEAD, bold=True))
        top, bottom = y + 32, y + 32 + tall
        place = log_axis(low, high, bottom, top)
        for value in powers_of_two(low, high):
            at = place(value)
            mark = (ONE, 2) if value == 1 else (LINE, 1)
            parts.append(line(left, at, WIDTH - 4, at, *mark))
            parts.append(text(left - 6, at + 5, f"{value:g}x", SMALL, "end"))
        ticks = sorted({x for curve in curves.values() for x in curve})
        at_x = {x: left + 16 + j * (WIDTH - left - 40) / max(1, len(ticks) - 1) for j, x in enumerate(ticks)}
        parts += [text(x, bottom + 18, str(tick), SMALL, "middle") for tick, x in at_x.items()]
        for name, curve in curves.items():
            points = [(at_x[x], place(curve[x])) for x in sorted(curve)]
            path = " ".join(f"{x:.1f},{py:.1f}" for x, py in points)
            stroke = f"stroke='{colours[name]}' stroke-width='2.5'"
            parts.append(f"<polyline points='{path}' fill='none' {stroke}/>")
            parts += [
                f"<circle cx='{x:.1f}' cy='{py:.1f}' r='3' fill='{colours[name]}'/>" for x, py in points
            ]
        y = bottom + 24
    return document(y + 4, title, parts)


def stacked(title: str, note: str, groups: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Bars of parts behind each other, {group: {bar: {part: value}}}, on a linear axis for each group.

    A legend names the parts; the sum stands behind each bar.
    """
    names = list(dict.fromkeys(p for rows in groups.values() for bar in rows.values() for p in bar))
    colours = dict(zip(names, PARTS, strict=False))
    longest = max(len(label) for rows in groups.values() for label in rows)
    left, right = 12 + LETTER * BODY * longest, WIDTH - 60
    parts, y = heading(title, note)
    x = 2.0
    for name in names:
        wide = 26 + LETTER * SMALL * len(name)
        if x + wide > WIDTH:
            x, y = 2.0, y + 20
        parts += [rectangle(x, y + 4, 12, 12, colours[name], 0.8), text(x + 17, y + 15, name, SMALL)]
        x += wide
    y += 20
    for group, rows in groups.items():
        parts.append(text(2, y + 22, group, HEAD, bold=True))
        y += 30
        high = max(sum(bar.values()) for bar in rows.values())
        for label, bar in rows.items():
            parts.append(text(left - 8, y + 17, label, BODY, "end"))
            at = left
            for name, value in bar.items():
                wide = (right - left) * value / high
                if wide >= 0.5:  # what nobody would see
                    parts.append(rectangle(at, y + 4, wide, 16, colours[name], 0.8))
                at += wide
            parts.append(text(WIDTH - 2, y + 17, f"{sum(bar.values()):.0f}", BODY, "end"))
            y += STEP
    return document(y + 6, title, parts)


def bars(
    title: str, note: str, groups: Mapping[str, Mapping[str, float]], number: str = "{:.0f}", roof: float = 0
) -> str:
    """Horizontal bars on a linear axis that begins at 0; a line at `roof`."""
    longest = max(len(label) for rows in groups.values() for label in rows)
    widest = max(len(number.format(v)) for rows in groups.values() for v in rows.values())
    left, right = 12 + LETTER * BODY * longest, WIDTH - 14 - LETTER * BODY * widest
    high = max(roof, *(v for rows in groups.values() for v in rows.values()))
    parts, y = heading(title, note)
    for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
        parts.append(text(2, y + 20, name, HEAD, bold=True))
        y += 28
        for label, value in rows.items():
            parts.append(text(left - 8, y + 17, label, BODY, "end"))
            parts.append(rectangle(left, y + 4, (right - left) * value / high, 16, colour))
            parts.append(text(WIDTH - 2, y + 17, number.format(value), BODY, "end"))
            y += STEP
        if roof:
            at = left + (right - left) * roof / high
            parts.append(line(at, y - STEP * len(rows), at, y, ONE, 2))
    return document(y + 6, title, parts)
