"""Which kernel serves a call: one table per phase, read top to bottom, first match wins.

Selection looks at shapes, dtypes, the GPU and what is importable, never at tensor values, so it is cached
and a compiled graph decides once, when it is traced. An explicit choice that does not fit raises and is never
replaced.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from .arch import arch_of
from .backends import ADAPTERS
from .layout import KV_LAYOUTS


@dataclass(frozen=True)
class Problem:
    """All that selection may look at."""

    op: str  # "sparse_decode", ...
    arch: str  # see arch_of
    layout: str  # a name in KV_LAYOUTS
    num_q_heads: int


@dataclass(frozen=True)
class Backend:
    """One way to run an op; the module ``mla_fp8.backends.<name>`` adapts it to our signature."""

    name: str
    requires: str | None = None  # importable package
    archs: tuple[str, ...] = ()  # () means any
    layouts: tuple[str, ...] = ()
    q_heads: tuple[int, ...] = ()  # head counts that its kernels take
    needs_kernel: bool = False  # an op of this package, registered for the device

    def why_not(self, p: Problem) -> str | None:
        """The first reason why this backend cannot run ``p``, or None if it can."""
        if self.archs and p.arch not in self.archs:
            return f"runs on {', '.join(self.archs)}, not on {p.arch}"
        if self.layouts and p.layout not in self.layouts:
            return f"reads {', '.join(self.layouts)}, not {p.layout}"
        if self.q_heads and p.num_q_heads > max(self.q_heads):
            return f"takes at most {max(self.q_heads)} query heads, not {p.num_q_heads}"
        if self.requires and find_spec(self.requires) is None:
            return f"needs the package {self.requires}, which is not installed"
        if self.needs_kernel:
            key = "CPU" if p.arch == "cpu" else "CUDA"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_fp8::{p.op}", key):
                return f"no {key} kernel of {p.op} is loaded; see mla_fp8.doctor()"
        return None


NATIVE = Backend("native", layouts=tuple(KV_LAYOUTS), needs_kernel=True)
REFERENCE = Backend("reference", layouts=tuple(KV_LAYOUTS))  # plain PyTorch; never chosen by "auto"

TABLES: dict[str, tuple[Backend, ...]] = {
    "sparse_decode": (NATIVE, REFERENCE),
    "sparse_prefill": (NATIVE, REFERENCE),
    "sparse_prefill_paged": (NATIVE, REFERENCE),
}


def explain(p: Problem) -> str:
    """One line per backend of the op's table: ``ok``, or why it cannot run ``p``."""
    return "\n".join(f"  {b.name:<11}{b.why_not(p) or 'ok'}" for b in TABLES[p.op])


@functools.cache
def select(p: Problem, backend: str = "auto") -> Backend:
    """The first backend that fits, or the one asked for. ValueError with every reason if there is none."""
    names = [b.name for b in TABLES[p.op]]
    if backend not in ("auto", *names):
        raise ValueError(
            f"mla_fp8.{p.op}: backend must be auto or one of {', '.join(names)}, got {backend!r}"
        )
    for b in TABLES[p.op]:
        wanted = b is not REFERENCE if backend == "auto" else b.name == backend
        if wanted and b.why_not(p) is None:
            return b
    raise ValueError(f"mla_fp8.{p.op}: backend={backend!r} cannot run {p}:\n{explain(p)}")


def select_name(
    op: str, device_type: str, device_index: int | None, layout: str, num_q_heads: int, backend: str
) -> str:
    """The name of the backend that serves a call with these properties; a constant to the compiler."""
    return _select_name(op, device_type, device_index, layout, num_q_heads, backend)


# All that torch.compiler.assume_constant_result does, which would import the compiler (a second) with us.
select_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _select_name(
    op: str, device_type: str, device_index: int | None, layout: str, num_q_heads: int, backend: str
) -> str:
    return select(Problem(op, arch_of(device_type, device_index), layout, num_q_heads), backend).name


def can_run(op: str, q: torch.Tensor, layout: str, backend: str) -> bool:
    """Whether :func:`backend_function` would find one."""
    try:
        backend_function(op, q, layout, backend)
    except ValueError:
        return False
    return True


def backend_function(op: str, q: torch.Tensor, layout: str, backend: str) -> Callable[..., Any]:
    """The adapter for these queries: it takes the arguments of ``mla_fp8.<op>`` less ``backend``."""
    num_q_heads = q.shape[1] if q.dim() > 1 else 0
    name = select_name(op, q.device.type, q.device.index, layout, num_q_heads, backend)
    function: Callable[..., Any] = getattr(ADAPTERS[name], op)
    return function
