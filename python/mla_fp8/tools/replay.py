"""``python -m mla_fp8 replay FILE``: run recorded calls through every backend, compare errors and times.

``mla_fp8.testing.record`` writes such files. Errors are against float64 over the recorded pages.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .. import reference
from ..arch import arch_of
from ..backends import reference as specification
from ..backends.table import Backend, Problem
from ..dispatch import candidates
from . import recording
from .cli import device, seconds
from .recording import Call
from .timing import time_us

Run = Callable[[], tuple[Tensor, ...]]
TOKENS_AT_ONCE = 8  # of the float64 reference, which holds the selected rows of each
# Rounding to bf16 costs 0.2 % rms; softmax weights rounded to FP8 cost 5 %.
RMS_BOUND, LSE_BOUND = 1e-2, 1e-3
HEADER = f"  {'backend':<17}{'us':>11}{'':>10}{'rms error':>12}{'max error':>12}{'lse error':>12}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="that mla_fp8.testing.record wrote")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: a GPU where there is one)",
    )
    parser.add_argument(
        "--seconds", type=seconds, default=1.0, help="of timing at most, per call and backend (default 1)"
    )


def exact(call: Call, device: str) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    given = call.sparse(device)
    scopes = specification.scopes(given)
    q, outs, lses = given.q.double(), [], []
    for begin in range(0, max(len(q), 1), TOKENS_AT_ONCE):
        here = slice(begin, begin + TOKENS_AT_ONCE)
        part = [(rows, ids[here], None if n is None else n[here]) for rows, ids, n in scopes]
        out, _, lse = reference.sparse_attention(
            q[here], part, sm_scale=given.sm_scale, attn_sink=given.attn_sink
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def backends(call: Call, device: str) -> dict[Backend, str | None]:
    """Those that have the op, and why they cannot run the call."""
    given = call.sparse("cpu")
    arch = arch_of(torch.device(device).type, None)
    problem = Problem(call.op, arch, given.layout_name(), given.q.shape[1], frozenset(given.features()))
    return {backend: backend.why_not(problem) for backend in candidates(problem)}


def runnable(call: Call, device: str) -> tuple[dict[str, Run], dict[str, str]]:
    """(the call by each backend that fits, why the others do not)."""
    op = getattr(importlib.import_module("mla_fp8"), call.op)
    reasons = {backend.name: reason for backend, reason in backends(call, device).items()}
    arguments = call.arguments(device)
    runs: dict[str, Run] = {
        name: partial(op, **arguments, backend=name) for name, reason in reasons.items() if reason is None
    }
    return runs, {name: reason for name, reason in reasons.items() if reason}


@dataclass(frozen=True)
class Verdict:
    """How far one backend's result is from float64."""

    rms: float  # relative to the output
    most: float
    lse: float
    complaints: tuple[str, ...]  # bounds that do not hold

    def __str__(self) -> str:
        off = "  OFF: " + ", ".join(self.complaints) if self.complaints else ""
        return f"{self.rms:>12.2e}{self.most:>12.2e}{self.lse:>12.2e}{off}"


def verdict(result: tuple[Tensor, ...], want: tuple[Tensor, Tensor]) -> Verdict:
    out, lse = result[0], result[-1]
    error, norm = (out.double() - want[0]).abs(), want[0].norm().clamp_min(1e-30)
    attended = want[1].isfinite()
    lse_error = (lse.double() - want[1])[attended].abs()
    rms, most, lse_most = float(error.norm() / norm), largest(error), largest(lse_error)
    complaints = []
    if not rms <= RMS_BOUND:  # also if it is NaN
        complaints.append(f"rms error above {RMS_BOUND:g}")
    if not lse.isneginf().equal(~attended):
        complaints.append("lse is not -inf exactly where nothing is attended")
    if not lse_most <= LSE_BOUND * max(1.0, largest(want[1][attended].abs())):
        complaints.append(f"lse error above {LSE_BOUND:g}")
    return Verdict(rms, most, lse_most, tuple(complaints))


def largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def replay(call: Call, device: str, seconds: float) -> dict[str, Verdict]:
    """Prints one line per backend. Returns what is said of those that round no more than the cache does."""
    runs, reasons = runnable(call, device)
    want, verdicts = exact(call, device), dict[str, Verdict]()
    table = backends(call, device)
    for name, run in list(runs.items()):
        try:
            verdicts[name] = verdict(run(), want)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            reasons[name] = f"raised {error}"
            del runs[name]
            if not runs:
                raise
    us = time_us(runs, seconds=seconds, host=device == "cpu")
    best = min(us.values(), default=0.0)
    for backend in table:
        name = backend.name
        if name in us:
            print(f"  {name:<17}{us[name]:>11.1f}{us[name] / best:>9.2f}x{verdicts[name]}")
        else:
            print(f"  {name:<17}{reasons[name].splitlines()[0]}")
    lossy = {backend.name for backend in table if backend.lossy}
    return {name: found for name, found in verdicts.items() if name not in lossy}


def summary(calls: list[Call], verdicts: list[dict[str, Verdict]]) -> str:
    """How many calls are off, and the worst: off before not, others before the reference, by rms error."""
    found = [(i, name, v) for i, by_name in enumerate(verdicts) for name, v in by_name.items()]
    if not found:
        return "No backend could run any of the calls."
    off = {i for i, _, v in found if v.complaints}
    i, name, worst = max(
        found, key=lambda x: (bool(x[2].complaints), x[1] != "reference", math.isnan(x[2].rms), x[2].rms)
    )
    says = f"{len(off)} of {len(calls)} calls are OFF." if off else f"All {len(calls)} calls are right."
    why = f": {', '.join(worst.complaints)}" if worst.complaints else ""
    error = f"rms error {worst.rms:.2e} (bound {RMS_BOUND:g})"
    return f"{says} Worst: call {i} by {name}, {error}{why}\n  {calls[i]}"


def main(options: argparse.Namespace) -> int:
    """The exit status is 1 if a backend is off, 2 if the file cannot be read or holds what is no call."""
    if options.file.exists() and not options.file.is_file():
        print(f"mla_fp8 replay: {options.file} is not a file", file=sys.stderr)
        return 2
    try:
        calls = recording.load(options.file)
    except ImportError:
        print("mla_fp8 replay: safetensors is not installed (pip install mla-fp8[replay])", file=sys.stderr)
        return 2
    except Exception as error:  # what safetensors raises for a bad file has no common base
        said = str(error)
        where = "" if str(options.file) in said else f"{options.file}: "
        print(f"mla_fp8 replay: {where}{said}", file=sys.stderr)
        return 2
    if not calls:
        print(f"mla_fp8 replay: {options.file} holds no calls", file=sys.stderr)
        return 2
    verdicts = []
    for i, call in enumerate(calls):
        try:
            print(f"call {i}: {call}")
            if shared := recording.shared_by_neighbours(call):
                print(f"  {shared}")
            print(HEADER)
            verdicts.append(replay(call, options.device, options.seconds))
        except Exception as error:  # of the call: what a backend raises is its line of the table
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            print(
                f"mla_fp8 replay: {options.file}: call {i} is no call of {call.op}: {said}", file=sys.stderr
            )
            return 2
    print(summary(calls, verdicts))
    return 1 if any(v.complaints for found in verdicts for v in found.values()) else 0
