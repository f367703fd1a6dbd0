import torch


def warmup(device: "torch.device | str | int | None" = None) -> None:
    """Load all kernels on ``device`` (by default the current GPU), as a first call of each op would.

    On ROCm call it before a graph is captured: loading is no operation for a stream under capture. Raises
    RuntimeError if there is no HIP runtime, or the package has no kernels for that GPU. Elsewhere there is
    nothing to load.
    """
    torch.ops.mla_fp8._warmup(torch.empty(0, device="cuda" if device is None else device))
