"""Which layout an engine's ``kv_cache_dtype`` means: there one string stands for several byte formats.

Two tables decide: what a name can mean, likeliest first, and what a backend reads (``backends/table.py``).
The first meaning that the backend reads is taken; bytes per token, where the caller knows them, choose among
those that it reads.
"""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch

from .backends.table import TABLE
from .layout import KV_LAYOUTS, KVLayout, get_layout

__all__ = ["hisparse_backend", "resolve_kv_cache_dtype"]

_LOGGER = logging.getLogger(__name__)

# Engines tell formats apart by their scales: stored with each token, one per layer, none. Those with scales
# for all that a token holds (V4.1's, rows without RoPE) are no cache of the engines' kernels for the others.
_KIND = {"f32": "packed", "ue8m0": "packed", "per_layer": "plain", "none": "bf16"}
_KIND_OF_TILES = {"f32": "nope", "ue8m0": "mxfp8", "e4m3": "fp4"}

NAMES: dict[str, tuple[str, ...]] = {
    "auto": ("packed", "plain", "bf16", "mxfp8", "nope", "fp4"),
    "bfloat16": ("bf16",),
    "fp8": ("packed", "plain", "mxfp8", "nope"),
    "fp8_e4m3": ("plain", "packed", "mxfp8", "nope"),  # our own name, and what engines call FlashMLA's format
    "fp8_ds_mla": ("packed", "mxfp8", "nope"),
    # Not vLLM's nvfp4_ds_mla: V4.1's rows with each row's scales behind it, or 352 bytes of V3.2.
}

# Said once in the log, so that nobody compares the accuracy of two formats under one name.
_NOTES = {
    "packed": "FP8 with a scale per tile, rope in bf16",
    "mxfp8": "FP8 with a scale per tile, rope too",
    "nope": "FP8 with a scale per tile, no rope",
    "fp4": "FP4 with a scale per tile, rope too; the second cache of a call only",
    "plain": "FP8 with one scale per layer, rope too; may be less accurate than per tile (vLLM #35891)",
    "bf16": None,  # nothing to say
}


def _kind(layout: KVLayout) -> str:
    return (_KIND_OF_TILES if layout.num_tiles and not layout.rope_dim else _KIND)[layout.scale_format]


@dataclass(frozen=True)
class Reader:
    """The caches that a backend reads as they are."""

    kinds: tuple[str, ...]
    fnuz: bool = False  # e4m3fnuz as well as e4m3fn

    def reads(self, layout: KVLayout) -> bool:
        return _kind(layout) in self.kinds and (self.fnuz or layout.fp8_dtype is not torch.float8_e4m3fnuz)


def _reader(name: str) -> Reader:
    """Of a package: all that its rows read; of one row's name: what that row reads."""
    rows = [b for b in TABLE if name in (b.name, b.adapter)]
    names = [name for b in rows for pair in b.layouts + b.pairs for name in pair.split(" + ")]
    layouts = [KV_LAYOUTS[name] for name in dict.fromkeys(names)]
    kinds = {_kind(layout) for layout in layouts}
    fnuz = any(layout.fp8_dtype is torch.float8_e4m3fnuz for layout in layouts)
    return Reader(tuple(kind for kind in _NOTES if kind in kinds), fnuz)


# By package, and by the rows of one that reads different caches without loss.
BACKENDS = {name: _reader(name) for b in TABLE for name in ((b.adapter,) if b.lossy else (b.adapter, b.name))}
HISPARSE = {name: BACKENDS[name] for name in ("flashmla_sparse", "flashmla_kv")}
HISPARSE["flashinfer_sparse_mla"] = Reader(("packed",))  # as SGLang pairs it


def resolve_kv_cache_dtype(
    name: str, backend: str, head_dim_qk: int, row_bytes: int | None = None, *, fnuz: bool = False
) -> KVLayout:
    """Find the one layout that an engine's ``kv_cache_dtype`` means to a backend. An FP8 one is logged once.

    Packed is ``dsv32`` or ``dsv4``, plain is ``fp8_e4m3``, each by ``head_dim_qk``. Bytes of ``dsv41`` and
    ``dsv32_nope`` need the layout's own name.

    Args:
        name: ``"auto"``: packed, plain or bf16, the first that the backend reads. ``"bfloat16"``: bf16.
            ``"fp8"``: packed, or plain. ``"fp8_e4m3"``: plain, or packed. ``"fp8_ds_mla"``: packed.
        backend: A name of the dispatch table.
        head_dim_qk: 512 or 576.
        row_bytes: Bytes of a token in an existing cache, which the layout must have.
        fnuz: Whether FP8 is e4m3fnuz, which bytes do not tell.

    Returns:
        The layout.

    Raises:
        ValueError: If there is none, or more than one.
    """
    _check_one_of("name", name, NAMES)
    _check_one_of("backend", backend, BACKENDS)
    _check_one_of("head_dim_qk", head_dim_qk, dict.fromkeys(x.head_dim_qk for x in KV_LAYOUTS.values()))
    reader = BACKENDS[backend]
    if fnuz and not reader.fnuz:
        _fail(f"fnuz must be False: backend {backend!r} reads e4m3fn only")
    possible = meanings(name, head_dim_qk, fnuz=fnuz)
    layouts = [x for x in possible if reader.reads(x)]
    if not layouts:
        _fail(
            f"name must be one whose layout backend {backend!r} reads ({', '.join(reader.kinds)}), "
            f"got {name!r} ({', '.join(x.name for x in possible)}); a cache is never converted on the fly"
        )
    fitting = [x for x in layouts if row_bytes in (None, x.bytes_per_token)]
    if row_bytes is not None and len(fitting) > 1:
        _fail(
            f"row_bytes {row_bytes} are those of {' and of '.join(x.name for x in fitting)}, which only "
            f"their names tell apart: give one of these in place of {name!r}"
        )
    for layout in fitting[:1]:
        _log_once(name, layout)
        return layout
    sizes = " or ".join(f"{x.bytes_per_token} ({x.name})" for x in layouts)
    _fail(f"row_bytes must be {sizes} for {name!r}, backend {backend!r}, got {row_bytes!r}")


def meanings(name: str, head_dim_qk: int, *, fnuz: bool = False) -> list[KVLayout]:
    """The layouts that one of NAMES can mean, likeliest first."""
    formats = (None, torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)
    rows = [x for x in KV_LAYOUTS.values() if x.head_dim_qk == head_dim_qk and x.fp8_dtype in formats]
    return [x for kind in NAMES[name] for x in rows if _kind(x) == kind]


def hisparse_backend(layout: str | KVLayout, backend: str = "auto") -> str:
    """Find the backend that serves a HiSparse cache on CUDA.

    The cache decides: bf16 goes to ``flashmla_sparse``, packed FP8 to ``flashmla_kv`` (SGLang #23013),
    or to ``flashinfer_sparse_mla`` if that is named.

    Args:
        layout: Of the cache.
        backend: ``"auto"``, or one of the three.

    Returns:
        Its name.

    Raises:
        ValueError: For one that does not read the layout.
    """
    layout = get_layout(layout)
    _check_one_of("backend", backend, ("auto", *HISPARSE), "hisparse_backend")
    for candidate, reader in HISPARSE.items():
        if reader.reads(layout) and backend in ("auto", candidate):
            return candidate
    reads = ", ".join(f"{b} reads {' and '.join(x.kinds)}" for b, x in HISPARSE.items())
    _fail(f"backend {backend!r} cannot read layout {layout.name}: {reads} (e4m3fn)", "hisparse_backend")


def _check_one_of(
    argument: str, value: object, accepted: Iterable[object], function: str = "resolve_kv_cache_dtype"
) -> None:
    if value not in (known := list(accepted)):
        _fail(f"{argument} must be one of {', '.join(map(str, known))}, got {value!r}", function)


def _fail(message: str, function: str = "resolve_kv_cache_dtype") -> NoReturn:
    raise ValueError(f"mla_fp8.{function}: {message}")


@functools.cache
def _log_once(name: str, layout: KVLayout) -> None:
    note = _NOTES[_kind(layout)]
    if note is not None:
        _LOGGER.info("kv_cache_dtype %r is layout %s: %s", name, layout.name, note)
