"""What kind of device a tensor lives on, as dispatch names it, and how large it is."""

import functools

import torch

__all__ = ["arch_of", "num_processors"]


@functools.lru_cache(maxsize=256)
def arch_of(device_type: str, index: int | None) -> str:
    """``"cpu"``, ``"sm90"``, ``"gfx942"``, ... ``index`` None is the current device."""
    if device_type == "cpu":
        return "cpu"
    if device_type != "cuda":
        return device_type
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def num_processors(device: torch.device | str) -> int:
    """SMs or CUs of a GPU; 0 of a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    return _num_processors(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _num_processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
