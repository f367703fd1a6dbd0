"""What kind of device a tensor lives on, as dispatch names it."""

import functools

import torch


@functools.cache
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
