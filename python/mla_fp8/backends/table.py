"""What each backend can run: one row says all that dispatch and ``kv_cache_dtype`` know of it."""

from collections.abc import Callable
from dataclasses import dataclass

from .. import _libraries
from .._torch_private import has_kernel
from ..call import FEATURES, OPS
from ..layout import KV_LAYOUTS
from . import aiter, flash_mla, flashinfer, flashinfer_sm90, flashinfer_sm120
from .packages import Api, locate


@dataclass(frozen=True)
class Problem:
    """All that selection may look at."""

    op: str  # "sparse_decode", ...
    arch: str  # see arch_of
    layout: str  # SparseCall.layout_name: a name in KV_LAYOUTS, or those of two caches
    num_q_heads: int
    features: frozenset[str] = frozenset()  # what the call wants of FEATURES

    def __str__(self) -> str:
        wants = f", {', '.join(sorted(self.features))}" if self.features else ""
        return f"{self.op} on {self.arch}, {self.layout}, {self.num_q_heads} heads{wants}"


@dataclass(frozen=True)
class Backend:
    """One way to run some ops; the module ``mla_fp8.backends.<adapter>`` makes its call of ours."""

    name: str  # what a caller asks for; the adapter's name asks for those that auto may take, too
    adapter: str
    ops: tuple[str, ...]
    layouts: tuple[str, ...]
    pairs: tuple[str, ...] = ()  # of two caches with different ones, as SparseCall.layout_name has them
    archs: tuple[str, ...] = ()  # () means any
    max_q_heads: int | None = None  # of its kernels; fewer are padded where they must be
    features: frozenset[str] = frozenset()
    not_with: tuple[tuple[str, str], ...] = ()  # (feature, layout) that its kernels do not combine
    api: Api | None = None  # functions of another package
    needs_kernel: bool = False  # an op of this package, registered for the device
    only_asked_for: str | None = None  # why "auto" never takes it
    lossy: bool = False  # rounds more than its cache does

    def why_not(
        self, p: Problem, missing: Callable[["Backend", Problem], str | None] | None = None
    ) -> str | None:
        """The first reason why this backend cannot run ``p``, or None if it can.

        ``missing`` says what this machine lacks, by default as probed.
        """
        if self.archs and p.arch not in self.archs:
            return f"runs on {', '.join(self.archs)}, not on {p.arch}"
        if p.layout not in (readable := self.layouts + self.pairs):
            return f"reads {', '.join(readable)}, not {p.layout}"
        if self.max_q_heads is not None and p.num_q_heads > self.max_q_heads:
            return f"takes at most {self.max_q_heads} query heads, not {p.num_q_heads}"
        for feature in sorted(p.features - self.features):
            return f"has no {feature} ({FEATURES[feature]})"
        for feature, layout in self.not_with:
            if layout == p.layout and feature in p.features:
                return f"has no {feature} ({FEATURES[feature]}) for {layout}"
        return (missing or probe)(self, p)


_EVERYTHING = frozenset(FEATURES)
_HOPPER_BLACKWELL = ("sm90", "sm100", "sm103")
_ROUNDS_Q = "rounds the queries to FP8 as well"
_NEVER_RAN = "its adapter has met a stand-in for the package only"
_ROUNDS_WEIGHTS = f"rounds queries and weights to FP8; {_NEVER_RAN}"
_WAITS = "waits for the GPU at every call, so no CUDA graph"

_LAYOUTS = tuple(name for name, layout in KV_LAYOUTS.items() if not layout.extra_only)
_PAIRS = tuple(f"{first} + {name}" for name, layout in KV_LAYOUTS.items() for first in layout.extra_of)

NATIVE = Backend("native", "native", OPS, _LAYOUTS, _PAIRS, features=_EVERYTHING, needs_kernel=True)
REFERENCE = Backend(
    "reference", "reference", OPS, _LAYOUTS, _PAIRS, features=_EVERYTHING,
    only_asked_for="the specification: for checking, not for serving",
)  # fmt: skip

TABLE: tuple[Backend, ...] = (
    NATIVE,
    Backend(
        "flashmla_kv", "flash_mla", ("sparse_decode",), ("dsv32", "dsv4"), archs=_HOPPER_BLACKWELL,
        max_q_heads=max(flash_mla.HEADS), features=frozenset({"two caches"}),
        not_with=(("two caches", "dsv32"),), api=flash_mla.DECODE,
    ),
    Backend(
        "flashmla_sparse", "flash_mla", ("sparse_decode", "sparse_prefill"), ("bf16", "bf16_512"),
        archs=_HOPPER_BLACKWELL, max_q_heads=max(flash_mla.HEADS), api=flash_mla.PREFILL,
    ),
    Backend(
        "flashinfer", "flashinfer", ("sparse_decode",), ("bf16",), archs=("sm100", "sm103"),
        max_q_heads=max(flashinfer.HEADS), api=flashinfer.DECODE, only_asked_for=_NEVER_RAN,
    ),
    Backend(
        "flashinfer_fp8", "flashinfer", ("sparse_decode",), ("fp8_e4m3",), archs=("sm100", "sm103"),
        max_q_heads=max(flashinfer.HEADS), api=flashinfer.DECODE, only_asked_for=_ROUNDS_Q, lossy=True,
    ),
    Backend(
        "flashinfer_sm120", "flashinfer_sm120", ("sparse_decode",), ("dsv32", "dsv4"),
        archs=("sm120", "sm121"), max_q_heads=max(flashinfer_sm120.HEADS),
        features=frozenset({"two caches"}), not_with=(("two caches", "dsv32"),),
        api=flashinfer_sm120.DECODE, only_asked_for=_ROUNDS_WEIGHTS, lossy=True,
    ),
    Backend(
        "flashinfer_sm90", "flashinfer_sm90", ("sparse_decode",),
        ("bf16", "bf16_512", "fp8_e4m3", "fp8_e4m3_512"), archs=("sm90",),
        max_q_heads=flashinfer_sm90.MAX_Q_HEADS, api=flashinfer_sm90.DECODE, only_asked_for=_WAITS,
    ),
    Backend(
        "aiter", "aiter", ("sparse_decode",), ("bf16",), archs=("gfx942", "gfx950"),
        max_q_heads=max(aiter.HEADS), api=aiter.DECODE, only_asked_for=_NEVER_RAN,
    ),
    Backend(
        "aiter_fp8_fnuz", "aiter", ("sparse_decode",), ("fp8_e4m3_fnuz",), archs=("gfx942",),
        max_q_heads=max(aiter.HEADS), api=aiter.DECODE, only_asked_for=_ROUNDS_Q, lossy=True,
    ),
    Backend(
        "aiter_fp8", "aiter", ("sparse_decode",), ("fp8_e4m3",), archs=("gfx950",),
        max_q_heads=max(aiter.HEADS), api=aiter.DECODE, only_asked_for=_ROUNDS_Q, lossy=True,
    ),
    REFERENCE,
)  # fmt: skip


_DISPATCH_KEYS = {"cpu": "CPU", "meta": "Meta"}  # of other archs: CUDA, which ROCm uses too


def probe(backend: Backend, p: Problem) -> str | None:
    """What a backend needs and this process does not have."""
    if backend.api is not None:
        module, reason = locate(backend.api)
        if module is None:
            return reason
    if backend.needs_kernel:
        key = _DISPATCH_KEYS.get(p.arch, "CUDA")
        if not has_kernel(p.op, key):
            library = f"libmla_fp8_{'hip' if p.arch.startswith('gfx') else key.lower()}.so"
            if _libraries.status.get(library) == "loaded":
                return f"{library} has no {p.op}"
            return f"no {key} kernel of {p.op} is loaded; see mla_fp8.doctor()"
    return None
