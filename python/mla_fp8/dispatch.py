"""Which kernel serves a call: who goes first, of those that can run it (``backends/table.py``).

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
from torch import Tensor

from ._arguments import raise_named
from ._inference import refuse_gradients_of
from ._torch_private import constant_to_the_compiler
from .arch import arch_of
from .backends import opaque
from .backends.table import NATIVE, TABLE, Backend, Problem
from .call import EXTRA, OPS, second_scope
from .kv_cache_dtype import BACKENDS, NAMES, meanings, resolve_kv_cache_dtype
from .layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout, get_layout, row_layout

__all__ = ["explain"]

_LOGGER = logging.getLogger(__name__)
MAX_HEADS = 128  # of every kernel


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


_UNTUNED = "our kernels are not tuned for this GPU and have not run on it"
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        ("native",), "faster than FlashMLA in nearly every case measured (docs/performance.md)",
        ("sparse_decode",), ("sm90",),
    ),
    Preference(
        ("native",), "faster than FlashMLA in nearly every case measured (docs/performance.md)",
        ("sparse_prefill",), ("sm90",), q_heads=range(17, 129),
    ),
    Preference(("flashmla_kv", "flashmla_sparse"), _UNTUNED, OPS, ("sm100", "sm103")),
    Preference(
        ("native",), "the only one by default on this GPU; tested in an emulator, never on hardware",
        OPS, ("gfx90a", "gfx942", "gfx950"),
    ),
)  # fmt: skip
_DEFAULT = Preference((), "the default", OPS, ())


def preference(p: Problem) -> Preference:
    return next((row for row in PREFERENCES if row.fits(p)), _DEFAULT)


def candidates(p: Problem) -> list[Backend]:
    """The backends that have the op, in the order in which they are asked."""
    order = preference(p).order
    backends = [b for b in TABLE if p.op in b.ops]
    return sorted(backends, key=lambda b: order.index(b.name) if b.name in order else len(order))


def explain(
    op: str,
    *,
    layout: str | KVLayout,
    num_heads: int,
    device: torch.device | str,
    extra_layout: str | KVLayout | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> str:
    """Which backend would serve a call of attention, and why not the others.

    Args:
        op: ``"sparse_decode"``, ``"sparse_prefill"``, ``"sparse_prefill_paged"`` or
            ``"sparse_prefill_window"``.
        layout: Of the cache; for ``sparse_prefill`` that of its rows, ``"bf16"`` or ``"bf16_512"``.
        num_heads: Query heads on this device, 1 to 128.
        device: Where the call runs.
        extra_layout: As in the call.
        batch_invariant: As in the call.
        backend: As in the call.

    Returns:
        A line for the problem, then one per backend that has the op, in order: ``taken``, ``could``, or why
        it cannot.

    Raises:
        ValueError: For what is none of these.
    """
    problem = _problem(op, layout, num_heads, device, extra_layout, batch_invariant)
    backends = candidates(problem)
    _check_backend("explain", backend, backends)
    return f"{problem}; backend={backend!r}\n{reasons(problem, backend)}"


def _problem(
    op: str, layout: str | KVLayout, num_heads: int, device: torch.device | str,
    extra_layout: str | KVLayout | None, batch_invariant: bool,
) -> Problem:  # fmt: skip
    if op not in OPS:
        raise ValueError(f"mla_fp8.explain: op must be one of {', '.join(OPS)}, got {op!r}")
    first, features = get_layout(layout), list[str]()
    name = first.name
    if op == "sparse_prefill" and (first.nope_format != "bf16" or extra_layout is not None):
        rows = " or ".join(x.name for x in KV_LAYOUTS.values() if x.nope_format == "bf16")
        raise ValueError(f"mla_fp8.explain: layout must be {rows} alone for sparse_prefill, got {name}")
    if extra_layout is not None:
        extra, features = get_layout(extra_layout), ["two caches"]
        possible = [x.name for x in KV_LAYOUTS.values() if x == first or name in x.extra_of]
        if extra.name not in possible:
            raise ValueError(
                f"mla_fp8.explain: extra_layout must be {' or '.join(possible)} with layout {name}, "
                f"got {extra.name}"
            )
        name = name if extra == first else f"{name} + {extra.name}"
    features += ["batch_invariant"] if batch_invariant else []
    if not isinstance(num_heads, int) or not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(f"mla_fp8.explain: num_heads must be in [1, {MAX_HEADS}], got {num_heads!r}")
    return Problem(op, _arch(device), name, num_heads, frozenset(features))


def _arch(device: torch.device | str) -> str:
    try:
        found = torch.device(device)
        return arch_of(found.type, found.index)
    except (RuntimeError, AssertionError, TypeError) as error:  # no such name, no such GPU, no driver
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"mla_fp8.explain: device must be one of this process, got {device!r} ({why})"
        ) from None


def reasons(
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


def _check_backend(op: str, backend: str, backends: list[Backend]) -> None:
    names = dict.fromkeys([*(b.name for b in backends), *(b.adapter for b in backends)])
    if backend not in ("auto", *names):
        raise ValueError(f"mla_fp8.{op}: backend must be auto or one of {', '.join(names)}, got {backend!r}")


@functools.lru_cache(maxsize=4096)
def select(p: Problem, backend: str = "auto") -> Backend:
    """The first backend that fits, or the one asked for. ValueError with every reason if there is none."""
    backends = candidates(p)
    _check_backend(p.op, backend, backends)
    for b in backends:
        if _is_asked_for(b, backend) and b.why_not(p) is None:
            if backend == "auto" and b is not NATIVE:
                _LOGGER.info("%s on %s, %s: %s (%s)", p.op, p.arch, p.layout, b.name, preference(p).why)
            return b
    raise ValueError(f"mla_fp8.{p.op}: backend={backend!r} cannot run {p}:\n{reasons(p, backend)}")


@constant_to_the_compiler
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
    if not isinstance(backend, str):
        raise ValueError(f"mla_fp8.{op}: backend must be a name, got {backend!r}")
    p = Problem(op, arch_of(device_type, device_index), layout, num_q_heads, frozenset(features))
    return select(p, backend).adapter


_HEADS = {b.max_q_heads for b in TABLE if b.max_q_heads is not None}
_HEADS |= {end - 1 for row in PREFERENCES for end in (row.q_heads.start, row.q_heads.stop)}
_HEAD_BOUNDS = sorted(_HEADS)


def _selected_heads(num_q_heads: int) -> int:
    """The number of heads to select by. The compiler gets the largest number that the tables treat alike: a
    graph is then guarded by a range of heads, not by one number of them."""
    return next((bound for bound in _HEAD_BOUNDS if num_q_heads <= bound), num_q_heads)


@constant_to_the_compiler
def layout_name(name: str, backend: str, head_dim_qk: int, row_bytes: int | None, fnuz: bool) -> str:
    """The layout that an engine's ``kv_cache_dtype`` means to the backend; a constant to the compiler."""
    known = next((b.adapter for b in TABLE if b.name == backend and b.name not in BACKENDS), backend)
    reader = "native" if backend == "auto" else known
    try:
        return resolve_kv_cache_dtype(name, reader, head_dim_qk, row_bytes, fnuz=fnuz).name
    except ValueError as error:
        said = str(error).partition(": ")[2]
        raise ValueError(f"mla_fp8: layout {name!r} does not fit this cache: {said}") from None


def layout_of(
    layout: str | KVLayout | None, q: torch.Tensor, kv_cache: torch.Tensor, page_size: int | None,
    backend: str, *, extra: bool = False,
) -> KVLayout:  # fmt: skip
    """The layout, or the one that an engine's name for it (``"fp8_ds_mla"``, ...) means for this cache."""
    if not isinstance(layout, str) or layout in KV_LAYOUTS or layout not in NAMES:
        return get_layout(layout)
    if not (_has_size(q) and _has_size(kv_cache) and isinstance(page_size, int)):
        return row_layout(q)  # any of that size: the op says what is wrong
    fnuz = kv_cache.dtype is torch.float8_e4m3fnuz
    head_dim = _one_of((x.head_dim_qk for x in KV_LAYOUTS.values()), q.shape[-1])
    possible = [x for x in meanings(layout, head_dim, fnuz=fnuz) if extra or not x.extra_only]
    row_bytes = _row_bytes(layout, kv_cache, page_size, head_dim, possible)
    return KV_LAYOUTS[layout_name(layout, backend, head_dim, row_bytes, fnuz)]


def extra_layout_of(
    layout: str | KVLayout | None, q: torch.Tensor, kv_cache: torch.Tensor | None, page_size: int | None,
    backend: str,
) -> KVLayout | None:  # fmt: skip
    """The same of a second cache; None where none is given."""
    if layout is None or kv_cache is None or page_size is None:
        return None if layout is None else get_layout(layout)
    return layout_of(layout, q, kv_cache, page_size, backend, extra=True)


def _row_bytes(
    name: str, kv_cache: torch.Tensor, page_size: int, head_dim_qk: int, possible: list[KVLayout]
) -> int | None:
    """Bytes per token, if the shape of the cache tells. ValueError if that is so of several that the name can
    mean: a page of one row of `dsv41` is as long as a row of bf16."""
    last = kv_cache.shape[-1] * kv_cache.element_size()
    if kv_cache.dim() in (3, 4):
        return _one_of((x.bytes_per_token for x in KV_LAYOUTS.values()), last)
    fitting = [x for x in possible if x.page_bytes(page_size) == last]
    if kv_cache.dtype is torch.bfloat16:  # says what it holds
        fitting = [x for x in fitting if x.nope_format == "bf16"] or fitting
    if len({x.bytes_per_token for x in fitting}) > 1:
        raise ValueError(
            f"mla_fp8: layout {name!r} does not fit this cache: its pages of {last} bytes are those of "
            f"{' and of '.join(x.name for x in fitting)}: give one of these in place of {name!r}"
        )
    others = (x for x in KV_LAYOUTS.values() if x.head_dim_qk == head_dim_qk)
    found = next((x for x in (*fitting, *others) if x.page_bytes(page_size) == last), None)
    return None if found is None else found.bytes_per_token


def _has_size(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _one_of(known: Iterable[int], size: int) -> int:
    """``size`` as a number of ours, if it is one: a size that the compiler does not know becomes known."""
    return next((n for n in known if n == size), size)


def can_run(op: str, q: torch.Tensor, layout: str, backend: str, features: tuple[str, ...] = ()) -> bool:
    """Whether :func:`attend` would find a backend."""
    try:
        _adapter(op, q, layout, backend, features)
    except ValueError:
        return False
    return True


def attend(
    op: str,
    given: dict[str, Any],
    backend: str,
    *,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
    max_logits: bool = False,
) -> Any:
    """The call by the backend that is asked for, or by the first that fits.

    ``given`` are the arguments of ``torch.ops.mla_fp8.<op>``, with layouts as the caller names them. Returns
    (out, lse), with ``max_logits`` as the op does: (out, max_logits, lse).

    What is looked up here depends on shapes, and is cached: with little work on a GPU, a call takes as long
    as the host does (benchmarks/bench_call_overhead.py).
    """
    q = given["q"]
    given = {name: x for name, x in given.items() if x is not None}  # None costs the op more than nothing
    layout, features = (
        (row_layout(q).name, _NO_FEATURES) if op == "sparse_prefill" else _resolve_layouts(op, given, backend)
    )
    if "batch_invariant" in given:
        features = (*features, "batch_invariant")
    refuse_gradients_of(op, given)
    adapter = _adapter(op, q, layout, backend, features)
    into = out is not None or lse is not None or workspace is not None
    if op != "sparse_decode" and (adapter != "native" or q.dim() != 3):
        given.pop("batch_invariant", None)  # of our _out forms
    if (not into and max_logits == (op != "sparse_decode")) or q.dim() != 3:  # which the op refuses
        return _call(op, adapter, given)
    refuse_gradients_of(op, {"out": out, "lse": lse})
    if adapter != "native":
        results = _call(op, adapter, given)
        out = results[0] if out is None else out.copy_(results[0])
        lse = results[-1] if lse is None else lse.copy_(results[-1])
        return (out, results[1], lse) if max_logits else (out, lse)
    given["out"] = q.new_empty((q.shape[0], q.shape[1], HEAD_DIM_V)) if out is None else out
    given["lse"] = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32) if lse is None else lse
    if op != "sparse_decode":
        given["max_logits"] = torch.empty_like(given["lse"]) if max_logits else None
    if workspace is None:
        given["allocate_workspace"] = True
    else:
        given["workspace"] = workspace
    _call(f"{op}_out", adapter, given)
    return (given["out"], given["max_logits"], given["lse"]) if max_logits else (given["out"], given["lse"])


def _call(op: str, adapter: str, given: dict[str, Any]) -> Any:
    ours = torch.ops.mla_fp8
    try:
        if adapter == "native":
            return getattr(ours, op)(**given)
        return getattr(opaque.ops, op)(adapter=adapter, **given)
    except RuntimeError as error:
        raise_named(ours if adapter == "native" else opaque.ops, op, error, (), given)


_NO_FEATURES: tuple[str, ...] = ()


def _resolve_layouts(op: str, given: dict[str, Any], backend: str) -> tuple[str, tuple[str, ...]]:
    """(the caches' layouts by name, the features that they are); puts layouts' ids into ``given``."""
    layout = layout_of(given.get("layout"), given["q"], given["kv_cache"], given.get("page_size"), backend)
    given["layout"], name, features = layout.id, layout.name, _NO_FEATURES
    if (
        "extra_kv_cache" in given or "extra_indices" in given or "extra_page_size" in given
        or "extra_layout" in given or "extra_topk_length" in given or "extra_page_table" in given
    ):  # fmt: skip
        q, (kv_cache, extra_layout, page_size, *rest) = given["q"], map(given.get, EXTRA)
        extra = extra_layout_of(extra_layout, q, kv_cache, page_size, backend)
        (scope,) = second_scope(op, layout, kv_cache, extra, page_size, *rest)
        features = ("two caches",)
        given.pop("extra_layout", None)
        if scope.layout.name != name:
            given["extra_layout"], name = scope.layout.id, f"{name} + {scope.layout.name}"
    return name, features


def _adapter(op: str, q: torch.Tensor, layout: str, backend: str, features: tuple[str, ...]) -> str:
    device, num_q_heads = q.device, q.size(1) if q.dim() > 1 else 0
    if torch.compiler.is_compiling() or not isinstance(backend, str):
        heads = _selected_heads(num_q_heads)
        return select_name(op, device.type, device.index, layout, heads, features, backend)
    return selected_on(op, device, layout, num_q_heads, features, backend)


@functools.lru_cache(maxsize=4096)
def selected_on(
    op: str, device: torch.device, layout: str, num_q_heads: int, features: tuple[str, ...], backend: str
) -> str:
    """:func:`select_name`, as fast as it can be asked."""
    return select_name(op, device.type, device.index, layout, num_q_heads, features, backend)
