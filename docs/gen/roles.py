"""Drawings of the Hopper attention kernels: roles as boxes, what passes between them as arrows."""

from dataclasses import dataclass

import svg

MEMORY, ROLE = "#d29922", "#3f83f8"  # shared memory; warps
Point = tuple[int, int]


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    colour: str = ROLE

    def drawn(self) -> list[str]:
        place = f"x='{self.x}' y='{self.y}' width='{self.width}' height='{self.height}' rx='6'"
        middle = self.x + self.width / 2
        parts = [f"<rect {place} fill='{self.colour}' fill-opacity='0.15' stroke='{self.colour}'/>"]
        parts.append(svg.text(middle, self.y + 21, self.title, svg.HEAD, "middle", bold=True))
        return parts + [
            svg.text(middle, self.y + 41 + 18 * i, line, svg.SMALL, "middle")
            for i, line in enumerate(self.lines)
        ]


def arrow(points: list[Point], label: str = "", at: Point = (0, 0)) -> list[str]:
    path = " ".join(f"{x},{y}" for x, y in points)
    style = f"fill='none' stroke='{svg.TEXT}' stroke-width='1.5' marker-end='url(#tip)'"
    parts = [f"<polyline points='{path}' {style}/>"]
    return [*parts, svg.text(*at, label, svg.SMALL, "middle")] if label else parts


def drawing(title: str, height: int, boxes: list[Box], arrows: list[list[str]]) -> str:
    tip = f"<path d='M0,0 L8,4 L0,8 z' fill='{svg.TEXT}'/>"
    marker = "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
    parts = [f"{marker}{tip}</marker></defs>"]
    for shape in (*(box.drawn() for box in boxes), *arrows):
        parts += shape
    return svg.document(height, title, parts)


def few_heads() -> str:
    producers = ("valid keys of the row", "index, address", "one bulk copy per row")
    ring = ("16 slots of 16 rows", "as they lie in the cache", "shared memory")
    consumers = (
        "teams of 2 G warps, each with blocks of its own",
        "S = K Q: a warp has 16 keys, all heads",
        "softmax: one exchange in the team",
        "O += V P: a warp has 512 / 2 G dims, all heads",
        "K and V from the same raw rows",
    )
    boxes = [
        Box(2, 4, 190, 92, "4 or 8 producer warps", producers),
        Box(246, 4, 190, 92, "ring", ring, MEMORY),
        Box(2, 152, 436, 128, "8 consumer warps", consumers),
        Box(2, 324, 190, 56, "Q", ("shared memory",), MEMORY),
        Box(246, 324, 190, 56, "merge", ("teams, then CTAs of the row",)),
    ]
    arrows = [
        arrow([(192, 40), (244, 40)], "rows", (218, 34)),
        arrow([(246, 66), (194, 66)], "empty", (219, 82)),
        arrow([(316, 96), (316, 150)], "full", (296, 128)),
        arrow([(376, 152), (376, 98)], "empty", (402, 128)),
        arrow([(97, 324), (97, 282)]),
        arrow([(341, 280), (341, 322)], "end of a row", (390, 306)),
    ]
    return drawing("Roles of the kernel for few heads", 386, boxes, arrows)


def many_heads() -> str:
    producers = ("valid keys of the row", "index, address", "one bulk copy per row")
    ring = ("12 or 16 slots of 16 rows", "as they lie in the cache", "shared memory")
    logits = ("1 in decode, 2 in prefill", "S = K Q, K through registers", "softmax; bases of the CTA")
    buffers = ("weights of a block", "scales of V, change of base", "end of a row")
    values = ("O [256 dims x heads] += V P", "V through registers", "one block behind")
    boxes = [
        Box(2, 4, 190, 92, "4 producer warps", producers),
        Box(246, 4, 178, 92, "ring", ring, MEMORY),
        Box(2, 152, 206, 92, "logits warpgroups", logits),
        Box(232, 152, 186, 92, "two buffers", buffers, MEMORY),
        Box(2, 300, 150, 56, "Q", ("shared memory",), MEMORY),
        Box(196, 300, 222, 92, "2 value warpgroups", values),
    ]
    arrows = [
        arrow([(192, 40), (244, 40)], "rows", (218, 34)),
        arrow([(246, 66), (194, 66)], "empty", (219, 82)),
        arrow([(270, 96), (270, 124), (105, 124), (105, 150)], "K", (180, 118)),
        arrow([(424, 50), (434, 50), (434, 346), (420, 346)], "V", (424, 128)),
        arrow([(208, 198), (230, 198)], "P", (219, 192)),
        arrow([(320, 244), (320, 298)], "P", (336, 276)),
        arrow([(77, 300), (77, 246)]),
    ]
    return drawing("Roles of the kernel for many heads", 398, boxes, arrows)


def bf16_tiles() -> str:
    gather = (
        "what comes next: Q and keys",
        "copies of 16 bytes, an item ahead",
        "FP8 to bf16 where pairs of CTAs run",
    )
    first = ("S = K Q of block 0, softmax", "O += P V of both blocks,", "dims 0 to 255")
    second = ("S = K Q of block 1, softmax", "O += P V of both blocks,", "dims 256 to 511")
    boxes = [
        Box(60, 4, 320, 92, "1 gather warpgroup", gather),
        Box(2, 140, 132, 74, "block 0", ("64 rows", "pieces of 64 dims"), MEMORY),
        Box(154, 140, 132, 74, "Q", ("64 rows", "heads or queries"), MEMORY),
        Box(306, 140, 132, 74, "block 1", ("64 rows", "pieces of 64 dims"), MEMORY),
        Box(2, 270, 206, 92, "math group 0", first),
        Box(232, 270, 206, 92, "math group 1", second),
    ]
    arrows = [
        arrow([(100, 96), (68, 138)]),
        arrow([(220, 96), (220, 138)]),
        arrow([(340, 96), (372, 138)]),
        arrow([(50, 214), (50, 268)], "K, V", (28, 246)),
        arrow([(390, 214), (390, 268)], "K, V", (414, 246)),
        arrow([(110, 214), (260, 268)], "V", (128, 244)),
        arrow([(330, 214), (180, 268)], "V", (312, 244)),
        arrow([(208, 310), (230, 310)], "P", (219, 304)),
        arrow([(232, 336), (210, 336)], "P", (219, 354)),
    ]
    return drawing("Roles of the kernel in bf16 tiles", 368, boxes, arrows)


def images() -> dict[str, str]:
    return {"few_heads.svg": few_heads(), "many_heads.svg": many_heads(), "bf16_tiles.svg": bf16_tiles()}
