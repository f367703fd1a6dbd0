from collections import Counter

import emulation
import pytest
import torch

pytest.register_assert_rewrite("assertions", "code_cases", "error_cases", "prefill_cases", "ragged_cases")
from op_samples import NO_KERNEL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated", choices=emulation.GPUS, help="test the library for that GPU, whose code a CPU executes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if gpu := config.getoption("--emulated"):
        if not emulation.library(gpu).exists():
            raise pytest.UsageError(f"--emulated {gpu}: {emulation.library(gpu)} was not built")
        emulation.load(gpu)


def available_devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=available_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Each test runs on every device that is here."""
    marker = request.node.get_closest_marker("op")
    if marker and request.param in NO_KERNEL.get(marker.args[0], ()):
        pytest.skip(f"{marker.args[0]} has no {request.param} kernel yet")
    return request.param


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends a run with how many tests were skipped, by reason: what this machine did not see."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section(f"{len(skipped)} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:>6}  {reason}")
