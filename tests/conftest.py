import pytest
import torch


def available_devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=available_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Each test runs on every device that is here, from the same seed."""
    torch.manual_seed(0)
    return request.param
