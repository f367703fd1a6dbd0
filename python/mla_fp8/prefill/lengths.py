"""The lengths of a chunk's requests: the device's numbers within the host's."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bounded_lengths(lengths: Tensor, host: Sequence[int]) -> Tensor:
    """``lengths`` [num_requests] int32 as a new tensor, each in [0, host[r]]: the nearest of those numbers.

    Lengths are data: padding may hold -1, and memory that nobody wrote any number. Within these bounds no
    request takes rows of another, and no sum leaves int32.
    """
    bounded = lengths.clamp_min(0)
    if len(host):
        # The host's numbers travel as arguments of one kernel. A copy of them would make the host wait, and
        # the capture of a CUDA graph refuses it.
        torch._foreach_clamp_max_(list(bounded.unbind()), list(host))
    return bounded
