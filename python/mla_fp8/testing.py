"""Helpers for our tests, and for anyone testing a kernel against ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from .tools import recording

__all__ = ["assert_as_accurate_as", "assert_within_flash_mla_tolerance", "record"]


def assert_as_accurate_as(out: Tensor, rounded: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """``out`` may err from ``exact`` (float64) at most ``factor`` times as much as PyTorch's ``rounded``."""
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} values are not finite"
    error, allowed = ((x.double() - exact.double()).abs().max().item() for x in (out, rounded))
    assert error <= factor * allowed + 1e-5, f"max error {error:.2e}; {rounded.dtype} PyTorch: {allowed:.2e}"


def assert_within_flash_mla_tolerance(out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor) -> None:
    """The bounds of FlashMLA's own decode tests: out 1e-3 or 2.01/128, cosine 5e-6, lse 8.01/65536.

    Near 0 an lse may err by 2e-6 instead of 1e-6: ours is the difference of float32 numbers near 10."""
    error = (out.double() - exact_out.double()).abs()
    bad = (error > 1e-3) & (error > exact_out.double().abs() * (2.01 / 128))
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} outputs off, worst by {error[bad].max():.2e}"
    a, b = out.double().flatten(), exact_out.double().flatten()
    norm = (a * a + b * b).sum()
    distance = 1 - 2 * (a * b).sum() / norm if norm > 0 else norm
    assert distance < 5e-6, f"cosine distance {distance:.2e}"
    finite = exact_lse.isfinite()
    assert lse.isneginf().equal(exact_lse.isneginf()), "lse is -inf in the wrong rows"
    lse_error = (lse.double() - exact_lse.double())[finite].abs()
    allowed = (exact_lse.double()[finite].abs() * (8.01 / 65536)).clamp_min(2e-6)
    assert (lse_error <= allowed).all(), f"lse off by {lse_error.max():.2e}"


@contextmanager
def record(path: str | Path, max_calls: int = 16) -> Iterator[recording.Recorder]:
    """Writes the first ``max_calls`` attention calls made inside the ``with`` to a file that
    ``python -m mla_fp8 replay`` runs through every backend. Needs safetensors.

    A CUDA graph shows its calls to nobody: turn graphs off while recording. ``recorder.missed`` counts the
    calls that were not kept: those made while a graph was captured, those beyond ``max_calls``, and
    ``paged_attention_ragged*``, which has one backend alone. The file is written also when the body raises.
    OSError, before the body runs, if it cannot be.
    """
    with open(path, "ab"):  # what cannot be written is said before the model runs
        pass
    recording.save(path, [])
    recorder = recording.Recorder(max_calls)
    try:
        with recorder:
            yield recorder
    finally:
        recording.save(path, recorder.calls)
