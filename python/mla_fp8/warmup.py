import torch


def warmup(device: "torch.device | str | int | None" = None) -> None:
    """Load all kernels on ``device`` (the current GPU, if there is one), as a first call of each op would.

    On ROCm call it before a graph is captured: loading is no operation for a stream under capture. Raises
    RuntimeError if there is no HIP runtime, or the package has no kernels for that GPU. Elsewhere there is
    nothing to load.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ops.mla_fp8._warmup(torch.empty(0, device=device))
