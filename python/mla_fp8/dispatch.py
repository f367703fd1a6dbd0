"""Which kernel serves a call: a table of what each backend can run, and a table of who goes first.

Selection looks at shapes, dtypes, the GPU and what is importable, never at tensor values, so it is cached
and a compiled graph decides once, when it is traced. An explicit choice that does not fit raises and is never
replaced.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .arch import arch_of
from .backends import ADAPTERS, aiter, flash_mla, flashinfer, flashinfer_sm90, flashinfer_sm120, opaque
from .backends.packages import Api, locate
from .kv_cache_dtype import BACKENDS, NAMES, resolve_kv_cache_dtype
from .layout import KV_LAYOUTS, KVLayout, get_layout

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """All that selection may look at."""

    op: str  # "sparse_decode", ...
    arch: str  # see arch_of
    layout: str  # a name in KV_LAYOUTS
    num_q_heads: int
    features: frozenset[str] = frozenset()  # what the call wants of FEATURES


FEATURES = {
    "two caches": "a second cache in the same softmax",
    "batch_invariant": "the same bits in any batch",
}


@dataclass(frozen=True)
class Backend:
    """One way to run some ops; the module ``mla_fp8.backends.<adapter>`` fits it to our signature."""

    name: str  # what a caller asks for; the adapter's name asks for those that auto may take, too
    adapter: str
    ops: tuple[str, ...]
    layouts: tuple[str, ...]
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
        if p.layout not in self.layouts:
            return f"reads {', '.join(self.layouts)}, not {p.layout}"
        if self.max_q_heads is not None and p.num_q_heads > self.max_q_heads:
            return f"takes at most {self.max_q_heads} query heads, not {p.num_q_heads}"
        for feature in sorted(p.features - self.features):
            return f"has no {feature} ({FEATURES[feature]})"
        for feature, layout in self.not_with:
            if layout == p.layout and feature in p.features:
                return f"has no {feature} ({FEATURES[feature]}) for {layout}"
        return (missing or probe)(self, p)


_DISPATCH_KEYS = {"cpu": "CPU", "meta": "Meta"}  # of other archs: CUDA, which ROCm uses too


def probe(backend: Backend, p: Problem) -> str | None:
    """What a backend needs and this process does not have."""
    if backend.api is not None:
        module, reason = locate(backend.api)
        if module is None:
            return reason
    if backend.needs_kernel:
        key = _DISPATCH_KEYS.get(p.arch, "CUDA")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_fp8::{p.op}", key):
            return f"no {key} kernel of {p.op} is loaded; see mla_fp8.doctor()"
    return None


_ALL_OPS = ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window")
_EVERYTHING = frozenset(FEATURES)
_HOPPER_BLACKWELL = ("sm90", "sm100", "sm103")
_ROUNDS_Q = "rounds the queries to FP8 as well"
_NEVER_RAN = "its adapter has met a stand-in for the package only"
_ROUNDS_WEIGHTS = f"rounds queries and weights to FP8; {_NEVER_RAN}"
_WAITS = "waits for the GPU at every call, so no CUDA graph"

NATIVE = Backend("native", "native", _ALL_OPS, tuple(KV_LAYOUTS), features=_EVERYTHING, needs_kernel=True)
REFERENCE = Backend(
    "reference", "reference", _ALL_OPS, tuple(KV_LAYOUTS), features=_EVERYTHING,
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
        max_q_heads=max(aiter.HEADS), api=aiter.DECODE, only_asked_for="native is the default on ROCm",
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


@dataclass(frozen=True)
class Preference:
    """Who goes first where; the first row that fits counts, and backends that it leaves out come after."""

    order: tuple[str, ...]
    why: str
    ops: tuple[str, ...]
    archs: tuple[str, ...]
    layouts: tuple[str, ...] = ()  # () means any
    q_heads: range = range(1, 129)

    def fits(self, p: Problem) -> bool:
        return (
            p.op in self.ops
            and p.arch in self.archs
            and (not self.layouts or p.layout in self.layouts)
            and p.num_q_heads in self.q_heads
        )


_UNTUNED = "no kernel of native is tuned for it, none has run there"
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        ("native",), "1.1 to 2.4 times the speed of FlashMLA at every head count and batch measured",
        ("sparse_decode",), ("sm90",),
    ),
    Preference(
        ("native",), "1.1 to 1.2 times the speed of FlashMLA from 4096 tokens on",
        ("sparse_prefill",), ("sm90",), q_heads=range(17, 129),
    ),
    Preference(("flashmla_kv", "flashmla_sparse"), _UNTUNED, _ALL_OPS, ("sm100", "sm103")),
)  # fmt: skip
_DEFAULT = Preference((), "native before others", _ALL_OPS, ())


def preference(p: Problem) -> Preference:
    return next((row for row in PREFERENCES if row.fits(p)), _DEFAULT)


def candidates(p: Problem) -> list[Backend]:
    """The backends that have the op, in the order in which they are asked."""
    order = preference(p).order
    backends = [b for b in TABLE if p.op in b.ops]
    return sorted(backends, key=lambda b: order.index(b.name) if b.name in order else len(order))


def explain(
    p: Problem, backend: str = "auto", missing: Callable[[Backend, Problem], str | None] | None = None
) -> str:
    """One line per backend that has the op: whether it is taken, could be, or why it cannot."""
    lines, taken = [], False
    for b in candidates(p):
        reason = b.why_not(p, missing)
        asked = _is_asked_for(b, backend)
        if reason is None and asked and not taken:
            taken = True
            says = f"taken: {preference(p).why}" if backend == "auto" else "taken: asked for"
        elif reason is None and b.only_asked_for:
            says = f"could, if asked for: {b.only_asked_for}"
        else:
            says = reason or "could"
        lines.append(f"  {b.name:<17}{says}")
    return "\n".join(lines)


def _is_asked_for(b: Backend, backend: str) -> bool:
    return backend == b.name or (b.only_asked_for is None and backend in ("auto", b.adapter))


@functools.cache
def select(p: Problem, backend: str = "auto") -> Backend:
    """The first backend that fits, or the one asked for. ValueError with every reason if there is none."""
    backends = candidates(p)
    names = dict.fromkeys([*(b.name for b in backends), *(b.adapter for b in backends)])
    if backend not in ("auto", *names):
        raise ValueError(
            f"mla_fp8.{p.op}: backend must be auto or one of {', '.join(names)}, got {backend!r}"
        )
    for b in backends:
        if _is_asked_for(b, backend) and b.why_not(p) is None:
            if backend == "auto" and b is not NATIVE:
                _LOGGER.info("%s on %s, %s: %s (%s)", p.op, p.arch, p.layout, b.name, preference(p).why)
            return b
    raise ValueError(f"mla_fp8.{p.op}: backend={backend!r} cannot run {p}:\n{explain(p, backend)}")


def select_name(
    op: str,
    device_type: str,
    device_index: int | None,
    layout: str,
    num_q_heads: int,
    features: tuple[str, ...],
    backend: str,
) -> str:
    """The adapter that serves a call with these properties; a constant to the compiler."""
    return _select_name(op, device_type, device_index, layout, num_q_heads, features, backend)


@functools.cache
def _select_name(
    op: str,
    device_type: str,
    device_index: int | None,
    layout: str,
    num_q_heads: int,
    features: tuple[str, ...],
    backend: str,
) -> str:
    p = Problem(op, arch_of(device_type, device_index), layout, num_q_heads, frozenset(features))
    return select(p, backend).adapter


_HEADS = {b.max_q_heads for b in TABLE if b.max_q_heads is not None}
_HEADS |= {end - 1 for row in PREFERENCES for end in (row.q_heads.start, row.q_heads.stop)}
_HEAD_BOUNDS = sorted(_HEADS)


def _selected_heads(num_q_heads: int) -> int:
    """The number of heads to select by. The compiler gets the largest number that the tables treat alike: a
    graph is then guarded by a range of heads, not by one number of them."""
    if not torch.compiler.is_compiling():
        return num_q_heads
    return next((bound for bound in _HEAD_BOUNDS if num_q_heads <= bound), num_q_heads)


def layout_name(name: str, backend: str, head_dim_qk: int, row_bytes: int | None, fnuz: bool) -> str:
    """The layout that an engine's ``kv_cache_dtype`` means to the backend; a constant to the compiler."""
    known = next((b.adapter for b in TABLE if b.name == backend and b.name not in BACKENDS), backend)
    reader = "native" if backend == "auto" else known
    return resolve_kv_cache_dtype(name, reader, head_dim_qk, row_bytes, fnuz=fnuz).name


# All that torch.compiler.assume_constant_result does, which would import the compiler (a second) with us.
select_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
layout_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def layout_of(
    layout: str | KVLayout, q: torch.Tensor, kv_cache: torch.Tensor, page_size: int, backend: str
) -> KVLayout:
    """The layout, or the one that an engine's name for it (``"fp8_ds_mla"``, ...) means for this cache."""
    if isinstance(layout, KVLayout) or layout in KV_LAYOUTS or layout not in NAMES:
        return get_layout(layout)
    fnuz = kv_cache.dtype is torch.float8_e4m3fnuz
    head_dim = _one_of((x.head_dim_qk for x in KV_LAYOUTS.values()), q.shape[-1])
    return KV_LAYOUTS[layout_name(layout, backend, head_dim, _row_bytes(kv_cache, page_size), fnuz)]


def _row_bytes(kv_cache: torch.Tensor, page_size: int) -> int | None:
    """Bytes per token, if the shape of the cache tells."""
    last = kv_cache.shape[-1] * kv_cache.element_size()
    if kv_cache.dim() == 4:
        return _one_of((x.bytes_per_token for x in KV_LAYOUTS.values()), last)
    return next((x.bytes_per_token for x in KV_LAYOUTS.values() if x.page_bytes(page_size) == last), None)


def _one_of(known: Iterable[int], size: int) -> int:
    """``size`` as a number of ours, if it is one: a size that the compiler does not know becomes known."""
    return next((n for n in known if n == size), size)


def wanted(*, two_caches: bool = False, batch_invariant: bool = False) -> tuple[str, ...]:
    """Names of FEATURES."""
    asked = {"two caches": two_caches, "batch_invariant": batch_invariant}
    return tuple(name for name, is_asked in asked.items() if is_asked)


def can_run(op: str, q: torch.Tensor, layout: str, backend: str, features: tuple[str, ...] = ()) -> bool:
    """Whether :func:`backend_function` would find one."""
    try:
        backend_function(op, q, layout, backend, features)
    except ValueError:
        return False
    return True


def backend_function(
    op: str, q: torch.Tensor, layout: str, backend: str, features: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """The adapter for these queries: it takes the arguments of ``mla_fp8.<op>`` less ``backend``."""
    num_q_heads = _selected_heads(q.shape[1]) if q.dim() > 1 else 0
    adapter = select_name(op, q.device.type, q.device.index, layout, num_q_heads, features, backend)
    if adapter == "native":
        function: Callable[..., Any] = getattr(ADAPTERS[adapter], op)
        return function
    return functools.partial(opaque.call, op, adapter)
