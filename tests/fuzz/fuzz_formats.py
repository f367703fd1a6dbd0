"""The formats of docs/reference/layouts.md once more, in NumPy: what `make fuzz` compares with."""

from dataclasses import dataclass, replace

import numpy as np

HEAD_DIM_V = 512
BF16_NAN = 0x7FFF
Array = np.ndarray


def e4m3_values(fnuz: bool) -> Array:
    """The float64 of each of the 256 codes."""
    code = np.arange(256)
    exponent, mantissa, bias = code >> 3 & 15, code & 7, 8 if fnuz else 7
    magnitude = np.where(
        exponent == 0, mantissa / 8 * 2.0 ** (1 - bias), (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    )
    nan = code == 0x80 if fnuz else code & 0x7F == 0x7F
    return np.where(nan, np.nan, np.where(code < 0x80, magnitude, -magnitude))


def e4m3_codes(x: Array, fnuz: bool, limit: float) -> Array:
    """Nearest even, saturating at ``limit``."""
    values = e4m3_values(fnuz)[: 0x80 if fnuz else 0x7F]
    middles = (values[1:] + values[:-1]) / 2
    magnitude = np.minimum(np.abs(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf)), limit)
    code = np.searchsorted(middles, magnitude)  # of two as near the lower one
    tie = np.isin(magnitude, middles) & (code % 2 == 1)
    code = code + tie
    negative = np.signbit(x) & ((code > 0) | (not fnuz))
    return np.where(np.isnan(x), 0x80 if fnuz else 0x7F, code | negative << 7).astype(np.uint8)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1_codes(x: Array, of_nan: int = 0) -> Array:
    """Nearest even, saturating."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    code = np.searchsorted(middles, np.abs(x))
    code = code + (np.isin(np.abs(x), middles) & (code % 2 == 1))
    return np.where(np.isnan(x), of_nan, code | np.signbit(x) << 3).astype(np.uint8)


def bf16_bits(x: Array) -> Array:
    """Nearest even, of float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(x), BF16_NAN, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Layout:
    name: str
    nope: int
    rope: int
    scales: str  # "f32", "ue8m0" and "e4m3" (of FP4) with each token, "layer" outside, "none": all bf16
    tile: int = 0
    floor: str = "scale"  # what writers raise to 1e-4: a tile's "amax" or its "scale"
    fnuz: bool = False

    @property
    def dim(self) -> int:
        return self.nope + self.rope

    @property
    def tail(self) -> int:
        """Bytes of a token behind all tokens of the page: the scales, a multiple of eight."""
        return -(-self.nope // self.tile // 8) * 8 if self.scales in ("ue8m0", "e4m3") else 0

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of nope, of the scales within a token, of rope."""
        nope = self.nope * {"none": 4, "e4m3": 1}.get(self.scales, 2) // 2
        inline = 4 * self.nope // self.tile if self.scales == "f32" else 0
        return nope, inline, self.rope * (1 if self.scales == "layer" else 2)

    @property
    def limit(self) -> float:
        return 240.0 if self.fnuz else 448.0

    def page_bytes(self, page_size: int) -> int:
        stride = sum(self.widths)
        if not self.tail:
            return page_size * stride
        return -(-page_size * (stride + self.tail) // stride) * stride

    def fields(self, page: Array, page_size: int, row: int) -> tuple[Array, Array, Array]:
        """Views of the bytes of one token: nope, scales, rope."""
        nope, inline, rope = self.widths
        token = page[row * (nope + inline + rope) :]
        scales = token[nope : nope + inline]
        if self.tail:
            scales = page[page_size * (nope + rope) + self.tail * row :][: self.tail]
        return token[:nope], scales, token[nope + inline :][:rope]

    def store(
        self, page: Array, page_size: int, row: int, latent: Array, scale: float, fp8_max: float | None
    ) -> None:
        """``latent``: the bits of bf16."""
        nope, scales, rope = self.fields(page, page_size, row)
        x, limit = bf16_values(latent), fp8_max or self.limit
        if self.scales == "none":
            nope[:], rope[:] = latent[: self.nope].view(np.uint8), latent[self.nope :].view(np.uint8)
        elif self.scales == "layer":
            with np.errstate(over="ignore"):
                codes = e4m3_codes(x / np.float32(scale), self.fnuz, limit)
            nope[:], rope[:] = codes[: self.nope], codes[self.nope :]
        elif self.scales == "e4m3":
            tiles = x.reshape(-1, self.tile).astype(np.float64)
            amax = np.abs(np.where(np.isfinite(tiles), tiles, 0)).max(1)
            scales[:] = e4m3_codes(np.maximum(amax / 6, 2.0**-9), False, 448.0)
            scales[np.isnan(tiles).any(1)] = 0x7F
            codes = e2m1_codes(tiles / e4m3_values(False)[scales][:, None]).reshape(-1, 2)
            nope[:] = codes[:, 0] | codes[:, 1] << 4
        else:
            rope[:] = latent[self.nope :].view(np.uint8)
            tiles = x[: self.nope].reshape(-1, self.tile).astype(np.float64)
            amax = np.abs(np.where(np.isfinite(tiles), tiles, 0)).max(1)
            floor = {"scale": lambda: np.maximum(amax / limit, np.float32(1e-4)),
                     "amax": lambda: np.maximum(amax, np.float32(1e-4)) / limit}[self.floor]()  # fmt: skip
            exponent = np.ceil(np.log2(floor)).astype(int)
            exponent = np.where(2.0**exponent < floor, exponent + 1, exponent)
            exponent = np.where(2.0 ** (exponent - 1) >= floor, exponent - 1, exponent)
            codes = e4m3_codes(tiles / 2.0 ** exponent[:, None], self.fnuz, limit)
            nope[:] = codes.reshape(-1)
            if self.scales == "f32":
                scales[:] = (2.0**exponent).astype(np.float32).view(np.uint8)
            else:
                scales[:] = 0
                scales[: len(exponent)] = exponent + 127

    def load(self, page: Array, page_size: int, row: int, scale: float) -> Array:
        """The latent as float32: number times scale, rounded once."""
        nope, scales, rope = self.fields(page, page_size, row)
        if self.scales == "none":
            return bf16_values(np.concatenate([nope, rope]).view(np.uint16))
        values = e4m3_values(self.fnuz).astype(np.float32)
        if self.scales == "e4m3":
            codes = np.stack([nope & 15, nope >> 4], 1).reshape(-1, self.tile)
            tiles = np.concatenate([E2M1, -E2M1])[codes] * e4m3_values(False)[scales][:, None]
            return tiles.reshape(-1).astype(np.float32)
        if self.scales == "layer":
            return values[np.concatenate([nope, rope])] * np.float32(scale)
        if self.scales == "f32":
            factors = scales.copy().view(np.float32)
        else:
            exponents = scales[: self.nope // self.tile].astype(int)
            factors = np.where(exponents == 255, np.nan, 2.0 ** (exponents - 127)).astype(np.float32)
        with np.errstate(all="ignore"):
            tiles = values[nope].reshape(-1, self.tile) * factors[:, None]
        return np.concatenate([tiles.reshape(-1), bf16_values(rope.copy().view(np.uint16))])


ROWS = [
    Layout("dsv32", 512, 64, "f32", tile=128),
    Layout("dsv4", 448, 64, "ue8m0", tile=64, floor="amax"),
    Layout("fp8_e4m3", 512, 64, "layer"),
    Layout("fp8_e4m3_512", 448, 64, "layer"),
]
LAYOUTS = [
    *ROWS,
    *(replace(row, name=row.name + "_fnuz", fnuz=True) for row in ROWS),
    Layout("bf16", 512, 64, "none"),
    Layout("bf16_512", 448, 64, "none"),
    Layout("dsv41", 512, 0, "ue8m0", tile=32),
    Layout("dsv32_nope", 512, 0, "f32", tile=128),
]
FP4 = Layout("dsv41_fp4", 512, 0, "e4m3", tile=16)  # the second cache of attention alone
FOLLOWS = {"dsv4": FP4, "dsv41": FP4, "dsv4_fnuz": ROWS[1]}  # other layouts of a second cache, by the first
