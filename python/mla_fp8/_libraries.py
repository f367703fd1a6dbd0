"""Loads the kernel libraries into torch. Says why when one does not load."""

from pathlib import Path

import torch

LIB_DIR = Path(__file__).parent / "lib"
MIN_TORCH = (2, 10)

status: dict[str, str] = {}  # library file name -> "loaded", or why it is not; read by doctor


def _load(name: str) -> None:
    torch.ops.load_library(str(LIB_DIR / name))
    status[name] = "loaded"


def reason(error: OSError) -> str:
    """What the dynamic loader said: torch's own message names the file alone."""
    return str(error.__cause__ or error)


def load_all() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise ImportError(f"mla_fp8 needs torch >= 2.10, found {torch.__version__}")
    try:
        _load("libmla_fp8_cpu.so")  # defines every schema, so it comes first
    except OSError as error:
        status["libmla_fp8_cpu.so"] = f"failed to load: {reason(error)}"
        raise ImportError(
            f"mla_fp8: cannot load libmla_fp8_cpu.so into torch {torch.__version__}: {reason(error)}. "
            "In a source tree `make build` builds it; elsewhere reinstall mla-fp8"
        ) from error

    # A GPU library needs symbols that only that GPU's torch exports. Its absence never breaks the import.
    for name, built_for in (("libmla_fp8_cuda.so", "cuda"), ("libmla_fp8_hip.so", "hip")):
        if getattr(torch.version, built_for) is None:
            status[name] = f"not loaded: this torch was built without {built_for.upper()}"
        elif not (LIB_DIR / name).exists():
            status[name] = "not in this build"
        else:
            try:
                _load(name)
            except OSError as error:
                status[name] = f"failed to load: {reason(error)}"
