"""docs/guide/accuracy.md: what a layout loses of rows whose tiles are hard for it, by the specification."""

import torch

from mla_fp8 import KV_LAYOUTS, reference

LAYOUTS = ("dsv4", "dsv41", "dsv41_fp4", "dsv32_nope", "fp8_e4m3_512")
ROWS = 512


def hard_rows() -> dict[str, torch.Tensor]:
    """[ROWS, 512] by what makes them hard."""
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, 512, generator=random)
    tiles = normal.view(ROWS, 32, 16)
    outlier = tiles.clone()
    outlier[:, :, 3] *= 64
    spread = tiles * torch.exp2(torch.randint(-12, 1, (ROWS, 32, 1), generator=random))
    rope = normal.clone()
    rope[:, -64:] *= 16
    return {
        "normal": normal,
        "an outlier of 64 in every 16": outlier.flatten(1),
        "sixteens of sizes 1 to 2^-12": spread.flatten(1),
        "last 64 values times 16": rope,
        "all of one size": 3 * (1 - 2.0 * torch.randint(2, (ROWS, 512), generator=random)),
    }


def error(name: str, rows: torch.Tensor) -> float:
    """rms, of an element relative to itself: what becomes 0 counts as 1."""
    layout, slots, rows = KV_LAYOUTS[name], torch.arange(ROWS), rows.bfloat16()
    largest = rows.float().abs().max()
    scale = (2 * largest / 448).reshape(1) if layout.needs_scale else None  # calibrated with a bit to spare
    cache = layout.empty(ROWS // 64, 64, "cpu")
    reference.quantize_kv(rows, slots, cache, layout=layout, page_size=64, scale=scale)
    stored = reference.dequantize_kv(cache, slots, layout=layout, page_size=64, scale=scale)
    relative = (stored.double() - rows.double()) / rows.double()
    return float(relative.square().mean().sqrt())


def parts() -> dict[str, str]:
    lines = [f"| rows | {' | '.join(f'`{name}`' for name in LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for what, rows in hard_rows().items():
        cells = (f"{error(name, rows):.1%}" for name in LAYOUTS)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return {"tiles": "\n".join(lines)}
