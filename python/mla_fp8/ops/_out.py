"""Optional output buffers of ops with several outputs: all of them or none."""

import torch


def all_given(op: str, **buffers: torch.Tensor | None) -> bool:
    """Whether the caller passed its own output buffers. ValueError if it passed only some of them."""
    missing = [name for name, buffer in buffers.items() if buffer is None]
    if missing and len(missing) < len(buffers):
        raise ValueError(f"{op}: expected all of {', '.join(buffers)} or none, got no {', '.join(missing)}")
    return not missing
