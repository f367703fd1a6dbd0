"""Helpers for our tests, and for anyone testing a kernel against ours."""

from torch import Tensor


def assert_as_accurate_as(out: Tensor, rounded: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """``out`` may err from ``exact`` (float64) at most ``factor`` times as much as PyTorch's ``rounded``."""
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} values are not finite"
    error, allowed = ((x.double() - exact.double()).abs().max().item() for x in (out, rounded))
    assert error <= factor * allowed + 1e-5, f"max error {error:.2e}; {rounded.dtype} PyTorch: {allowed:.2e}"
