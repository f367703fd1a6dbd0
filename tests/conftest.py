import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch

# assert_close would import torch.distributed.tensor, for seconds, to see that no tensor is distributed.
torch.testing._comparison._HAS_DTENSOR = False
pytest.register_assert_rewrite("assertions", "code_cases", "error_cases", "prefill_cases", "ragged_cases")
from op_samples import NO_KERNEL

elsewhere: Counter[str] = Counter()  # test functions that are not collected, by the device that they need


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated", choices=emulation.GPUS, help="test the library for that GPU, whose code a CPU executes"
    )
    parser.addoption("--shard", default="1/1", help="I/N: of what is selected, every N-th test from the I-th")


def pytest_configure(config: pytest.Config) -> None:
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.getoption("--shard"))
    if shard is None or int(shard[1]) > int(shard[2]):
        raise pytest.UsageError(f"--shard: expected I/N, such as 1/4, got {config.getoption('--shard')!r}")
    if gpu := config.getoption("--emulated"):
        if not emulation.library(gpu).exists():
            raise pytest.UsageError(f"--emulated {gpu}: {emulation.library(gpu)} was not built")
        emulation.load(gpu)


def available_devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
    """A test that needs a device (`@pytest.mark.device(IS_HERE, WHAT)`) is collected where the device is."""
    if not collector.istestfunction(obj, name):
        return None
    of_module = getattr(collector.obj, "pytestmark", [])
    marks = [*(of_module if isinstance(of_module, list) else [of_module]), *getattr(obj, "pytestmark", [])]
    for mark in marks:
        if mark.name == "device" and not mark.args[0]:
            elsewhere[mark.args[1]] += 1
            return []
    return None


def holds(only: pytest.Mark, item: Any) -> bool:
    return bool(only.args[0](**item.callspec.params))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Any:
    """Leaves out the cases whose parameters the predicate of a mark `only` refuses. Marks all but every n-th
    case of a test that is marked `sampled(n)` as slow. Takes its shard of what is selected."""
    items[:] = [item for item in items if all(holds(mark, item) for mark in item.iter_markers("only"))]
    seen: Counter[str] = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % sampled.args[0]:
                item.add_marker("slow")
            seen[name] += 1
    yield
    index, shards = map(int, config.getoption("--shard").split("/"))
    if shards > 1:
        kept = items[index - 1 :: shards]
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % shards != index - 1])
        items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests live until the end: the garbage collector, off while they are made, skips them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu_library(FILE)` is a test of a GPU library's file. In CI every library is there."""
    for mark in item.iter_markers("gpu_library"):
        if not mark.args[0].exists():
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{mark.args[0].name} was not built")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    # torch.manual_seed notes the stack, for milliseconds, for each kind of GPU that is not here.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def several_threads() -> Iterator[None]:
    """`make test` gives a process one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=available_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Each test runs on every device that is here."""
    marker = request.node.get_closest_marker("op")
    if marker and request.param in NO_KERNEL.get(marker.args[0], ()):
        pytest.skip(f"{marker.args[0]} has no {request.param} kernel yet")
    return request.param


def pytest_sessionfinish(session: pytest.Session) -> None:
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:  # a process of pytest-xdist
        workeroutput["elsewhere"] = dict(elsewhere)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process of pytest-xdist collects all tests."""
    for device, count in getattr(node, "workeroutput", {}).get("elsewhere", {}).items():
        elsewhere[device] = count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends a run with what this machine did not see: tests that were skipped or not collected, by reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section(f"{len(skipped)} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:>6}  {reason}")
    if elsewhere:
        terminalreporter.section(f"{elsewhere.total()} test functions are for other devices")
        for device, count in elsewhere.most_common():
            terminalreporter.write_line(f"{count:>6}  {device}")
