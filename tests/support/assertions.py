"""What tests say of results, once."""

from collections.abc import Sequence

import torch
from sparse_cases import Case
from torch import Tensor

from mla_fp8.testing import assert_as_accurate_as, assert_within_flash_mla_tolerance

Results = Sequence[Tensor]  # out, lse; or out, max_logits, lse


def assert_attention(
    case: Case, results: Results, which: Tensor | slice = slice(None), expected: Results | None = None
) -> None:
    """The results of some tokens of the case: as accurate as PyTorch in bf16, within FlashMLA's tolerance.

    ``expected`` is (out, max_logits, lse) in float64, by default what the specification makes of the rows
    that the test kept.
    """
    some = case.tokens(which)
    out, *max_logits, lse = (x[which] for x in results)
    exact, exact_max, exact_lse = some.expected() if expected is None else (x[which] for x in expected)
    assert out.shape == exact.shape and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_as_accurate_as(out, some.rounded(), exact)
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)
    for x in max_logits:
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), exact_max, rtol=1e-5, atol=1e-5)


def assert_same(got: Tensor | Results | None, want: Tensor | Results | None) -> None:
    """Equal in every element; a NaN equals a NaN, nothing equals nothing."""
    got, want = (tuple(x) if isinstance(x, Sequence) else x for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
