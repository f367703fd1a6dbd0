"""Drawings of the Hopper attention kernels: roles as boxes, what passes between them as arrows."""

from dataclasses import dataclass

import svg

MEMORY, ROLE = "#d29922", "#3f83f8"  # shared memory; warps
WIDTH = 760


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
        parts.append(svg.text(middle, self.y + 19, self.title, 13, "middle", bold=True))
        parts += [svg.text(middle, self.y + 36 + 15 * i, t, 11, "middle") for i, t in enumerate(self.lines)]
        return parts


def arrow(points: list[tuple[int, int]], label: str = "", at: tuple[int, int] | None = None) -> list[str]:
    path = " ".join(f"{x},{y}" for x, y in points)
    style = f"fill='none' stroke='{svg.TEXT}' stroke-width='1.5' marker-end='url(#tip)'"
    parts = [f"<polyline points='{path}' {style}/>"]
    if label:
        x, y = at or ((points[0][0] + points[-1][0]) // 2, points[0][1] - 6)
        parts.append(svg.text(x, y, label, 11, "middle"))
    return parts


def drawing(title: str, height: int, boxes: list[Box], arrows: list[list[str]]) -> str:
    tip = f"<path d='M0,0 L8,4 L0,8 z' fill='{svg.TEXT}'/>"
    marker = "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
    parts = [f"{marker}{tip}</marker></defs>"]
    for shape in (*(box.drawn() for box in boxes), *arrows):
        parts += shape
    return svg.document(WIDTH, height, title, parts)


def few_heads() -> str:
    boxes = [
        Box(
            4,
            30,
            178,
            84,
            "4 or 8 producer warps",
            ("valid keys of the row", "index, address", "one bulk copy per row"),
        ),
        Box(
            256,
            30,
            178,
            84,
            "ring",
            ("16 slots of 16 rows", "as they lie in the cache", "shared memory"),
            MEMORY,
        ),
        Box(
            508,
            30,
            248,
            174,
            "8 consumer warps",
            (
                "teams of 2 G warps, each with blocks",
                "of its own and an output of its own",
                "",
                "S = K Q: a warp 16 keys, all heads",
                "softmax: one exchange in the team",
                "O += V P: a warp 512 / 2 G dims,",
                "all heads",
                "K and V from the same raw rows",
            ),
        ),
        Box(256, 150, 178, 54, "Q", ("shared memory, B operand",), MEMORY),
        Box(508, 232, 248, 54, "merge, end of a row", ("teams, then CTAs of the row (decode)",)),
    ]
    arrows = [
        arrow([(182, 58), (254, 58)], "rows"),
        arrow([(434, 58), (506, 58)], "full"),
        arrow([(506, 92), (436, 92)], "empty", (471, 107)),
        arrow([(254, 92), (184, 92)], "empty", (219, 107)),
        arrow([(434, 177), (506, 177)]),
        arrow([(632, 204), (632, 230)]),
    ]
    return drawing("Roles of the kernel for few heads", 292, boxes, arrows)


def many_heads() -> str:
    boxes = [
        Box(
            4,
            30,
            178,
            84,
            "4 producer warps",
            ("valid keys of the row", "index, address", "one bulk copy per row"),
        ),
        Box(
            256,
            30,
            178,
            84,
            "ring",
            ("12 or 16 slots of 16 rows", "as they lie in the cache", "shared memory"),
            MEMORY,
        ),
        Box(
            508,
            30,
            248,
            84,
            "2 value warpgroups",
            ("O [256 dims x heads] += V P", "V through registers", "one block behind"),
        ),
        Box(
            256,
            190,
            178,
            84,
            "logits warpgroups",
            ("decode 1, prefill 2", "S = K Q, K through registers", "softmax; bases of the CTA"),
        ),
        Box(
            508,
            190,
            248,
            84,
            "two buffers",
            ("weights of a block, scales of V,", "change of base, end of a row", "shared memory"),
            MEMORY,
        ),
        Box(4, 190, 178, 84, "Q", ("shared memory", "B operand"), MEMORY),
    ]
    arrows = [
        arrow([(182, 58), (254, 58)], "rows"),
        arrow([(434, 58), (506, 58)], "V"),
        arrow([(506, 92), (436, 92)], "empty", (471, 107)),
        arrow([(345, 114), (345, 188)], "K", (356, 152)),
        arrow([(434, 232), (506, 232)], "P"),
        arrow([(632, 190), (632, 116)], "P full, empty", (676, 152)),
        arrow([(182, 232), (254, 232)]),
    ]
    return drawing("Roles of the kernel for many heads", 280, boxes, arrows)


def bf16_tiles() -> str:
    boxes = [
        Box(
            4,
            90,
            168,
            114,
            "gather",
            (
                "1 warpgroup",
                "what comes next: Q, keys",
                "cp.async of 16 bytes",
                "or FP8 to bf16 (pairs)",
                "an item ahead",
            ),
        ),
        Box(
            236, 30, 190, 70, "block 0, 64 rows", ("swizzled tiles of 64 x 64", "pieces of 128 dims"), MEMORY
        ),
        Box(236, 112, 190, 70, "Q, 64 rows", ("heads of a query, or all heads", "of neighbours"), MEMORY),
        Box(236, 194, 190, 70, "block 1, 64 rows", ("its weights lie over", "rope keys"), MEMORY),
        Box(
            508,
            30,
            248,
            100,
            "math group 0",
            (
                "S = Q K of block 0, softmax",
                "O += P V of both blocks,",
                "dims 0 to 255",
                "output of the item",
            ),
        ),
        Box(
            508,
            164,
            248,
            100,
            "math group 1",
            (
                "S = Q K of block 1, softmax",
                "O += P V of both blocks,",
                "dims 256 to 511",
                "output of the item",
            ),
        ),
    ]
    arrows = [
        arrow([(172, 112), (204, 112), (204, 65), (234, 65)]),
        arrow([(172, 147), (234, 147)]),
        arrow([(172, 182), (204, 182), (204, 229), (234, 229)]),
        arrow([(426, 65), (506, 65)], "K, V"),
        arrow([(426, 229), (506, 229)], "K, V"),
        arrow([(426, 85), (466, 85), (466, 190), (506, 190)], "V"),
        arrow([(426, 209), (486, 209), (486, 110), (506, 110)]),
        arrow([(600, 130), (600, 162)], "P", (590, 150)),
        arrow([(664, 164), (664, 132)], "P", (676, 150)),
    ]
    return drawing("Roles of the kernel in bf16 tiles", 272, boxes, arrows)


def images() -> dict[str, str]:
    return {"few_heads.svg": few_heads(), "many_heads.svg": many_heads(), "bf16_tiles.svg": bf16_tiles()}
