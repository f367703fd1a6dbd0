"""Drawings of docs/guide/concepts.md: pages, rows and slots; indices; two caches."""

import svg

PAGE, USED, NONE = "#3f83f8", "#2da44e", "#e5484d"
CELL = 26  # height of a row of a page


def cell(x: float, y: float, width: float, words: str, colour: str, filled: bool = False) -> list[str]:
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{CELL}'"
    opacity = 0.22 if filled else 0.06
    middle = x + width / 2
    return [
        f"<rect {place} fill='{colour}' fill-opacity='{opacity}' stroke='{colour}'/>",
        svg.text(middle, y + 18, words, svg.SMALL, "middle"),
    ]


def page(x: float, y: float, width: float, title: str, rows: list[str], filled: set[int]) -> list[str]:
    parts = [svg.text(x + width / 2, y - 7, title, svg.SMALL, "middle", bold=True)]
    for i, words in enumerate(rows):
        colour = USED if i in filled else PAGE
        parts += cell(x, y + CELL * i, width, words, colour, i in filled)
    return parts


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f"x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}'"
    return f"<line {ends} stroke='{svg.TEXT}' stroke-width='1.5' marker-end='url(#tip)'/>"


def tip() -> str:
    shape = f"<path d='M0,0 L8,4 L0,8 z' fill='{svg.TEXT}'/>"
    marker = "<marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
    return f"<defs>{marker}{shape}</marker></defs>"


def pages() -> str:
    """A cache of three pages of four rows, and where the seven tokens of a request are."""
    tokens = {
        8: "token 0",
        9: "token 1",
        10: "token 2",
        11: "token 3",
        0: "token 4",
        1: "token 5",
        2: "token 6",
    }
    parts = [tip(), svg.text(2, 18, "A cache is pages; a page is rows", svg.TITLE, bold=True)]
    parts.append(svg.text(2, 38, "page_size = 4; slot = page x 4 + row", svg.SMALL))
    for p in range(3):
        rows = [f"slot {4 * p + r}" for r in range(4)]
        filled = {r for r in range(4) if 4 * p + r in tokens}
        parts += page(2 + 150 * p, 68, 136, f"page {p}", rows, filled)
    parts.append(svg.text(2, 206, "A request of 7 tokens: its page table is [2, 0]", svg.HEAD, bold=True))
    for i in range(4):
        parts += cell(2 + 108 * i, 218, 104, f"token {i}", USED, True)
        parts.append(svg.text(54 + 108 * i, 262, f"slot {8 + i}", svg.SMALL, "middle"))
    for i in range(3):
        parts += cell(2 + 108 * i, 276, 104, f"token {4 + i}", USED, True)
        parts.append(svg.text(54 + 108 * i, 320, f"slot {i}", svg.SMALL, "middle"))
    return svg.document(330, "Pages, rows and slots of a cache", parts)


def indices() -> str:
    """A row of indices, two of which are -1, and the rows that they name."""
    chosen = [9, 2, -1, 11, -1]
    parts = [tip(), svg.text(2, 18, "Indices name slots; -1 names nothing", svg.TITLE, bold=True)]
    parts.append(svg.text(2, 50, "One row of `indices`, for one query token:".replace("`", ""), svg.SMALL))
    for i, slot in enumerate(chosen):
        parts += cell(2 + 88 * i, 60, 84, str(slot), NONE if slot < 0 else USED, slot >= 0)
    for p in range(3):
        rows = [f"slot {4 * p + r}" for r in range(4)]
        parts += page(
            2 + 150 * p, 162, 136, f"page {p}", rows, {s - 4 * p for s in chosen if 4 * p <= s < 4 * p + 4}
        )
    for i, slot in enumerate(chosen):
        if slot >= 0:
            p = slot // 4
            parts.append(arrow(44 + 88 * i, 88, 40 + 150 * p + (60 if slot == 11 else 0), 136))
    parts.append(svg.text(2, 292, "Attention reads slots 9, 2 and 11, and nothing else.", svg.SMALL))
    parts.append(svg.text(2, 312, "The result has the same bits without the two -1.", svg.SMALL))
    return svg.document(322, "Indices name slots of a cache", parts)


def two_caches() -> str:
    """DeepSeek V4: a window of tokens and entries of four tokens in one softmax."""
    parts = [tip(), svg.text(2, 18, "Two caches, one softmax (DeepSeek V4)", svg.TITLE, bold=True)]
    parts.append(svg.text(2, 50, "tokens of a request", svg.SMALL))
    for i in range(16):
        colour, filled = (USED, True) if i >= 12 else (PAGE, False)
        parts += [cell(2 + 27 * i, 60, 25, "", colour, filled)[0]]
    for e in range(3):
        parts.append(arrow(54 + 108 * e, 90, 54 + 108 * e, 124))
        parts += cell(2 + 108 * e, 126, 104, f"entry {e}", PAGE, e != 1)
    parts.append(arrow(378, 90, 378, 124))
    parts += cell(326, 126, 104, "window", USED, True)
    parts.append(svg.text(2, 176, "second cache: an entry", svg.SMALL))
    parts.append(svg.text(2, 194, "stands for 4 tokens", svg.SMALL))
    parts.append(svg.text(438, 176, "first cache:", svg.SMALL, "end"))
    parts.append(svg.text(438, 194, "the last tokens", svg.SMALL, "end"))
    parts.append(svg.text(110, 226, "an indexer chose entries 0 and 2", svg.SMALL, "middle"))
    parts.append(arrow(110, 236, 170, 262))
    parts.append(arrow(378, 204, 270, 262))
    parts += [
        svg.rectangle(120, 266, 200, 34, PAGE, 0.15),
        svg.text(220, 288, "one softmax over both", svg.BODY, "middle", bold=True),
    ]
    return svg.document(308, "Window and entries are attended to in one softmax", parts)


def images() -> dict[str, str]:
    return {"pages.svg": pages(), "indices.svg": indices(), "two_caches.svg": two_caches()}
