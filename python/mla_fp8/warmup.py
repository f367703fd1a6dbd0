import torch

__all__ = ["warmup"]


def warmup(device: "torch.device | str | int | None" = None) -> None:
    """Load all kernels, as a first call of each op would.

    On ROCm call it before a graph is captured, which does not allow loading. Elsewhere there is nothing to
    load.

    Args:
        device: By default the current GPU, if there is one.

    Raises:
        RuntimeError: If there is no HIP runtime, or the package has no kernels for that GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ops.mla_fp8._warmup(torch.empty(0, device=device))
