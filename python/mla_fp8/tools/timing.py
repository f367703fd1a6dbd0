"""How the benchmarks and ``replay`` time: CUDA graph replays on a GPU, wall-clock time elsewhere.

Every number is a median. What is compared is timed in turns, so that a slow minute hits all of it.
"""

import functools
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

Function = Callable[[], object]
ROUNDS, SECONDS = 30, 3.0  # samples of each function; fewer when one case takes longer than this


def cpu_sampler(functions: Sequence[Function], calls: int) -> Callable[[], float]:
    """Returns the microseconds of one call."""
    repeats = max(calls, len(functions))

    def sample() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(repeats):
            functions[i % len(functions)]()
        return (time.perf_counter() - start) * 1e6 / repeats

    return sample


def synchronises(launch: Function) -> bool:
    """Whether it waits for the GPU: a capture of it would fail, and leave torch's random numbers broken."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def cuda_sampler(functions: Sequence[Function], calls: int) -> Callable[[], float]:
    """The same from a CUDA graph of the calls; what synchronises is launched as it comes."""
    repeats = max(calls, len(functions))

    def launch() -> None:
        for i in range(repeats):
            functions[i % len(functions)]()

    replay = launch
    if not synchronises(launch):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        if len(functions) == 1:
            flush_l2()
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeats

    return sample


@functools.cache
def l2_sized() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def flush_l2() -> None:
    l2_sized().zero_()


def time_us(
    cases: Mapping[str, Function | Sequence[Function]],
    calls: int = 1,
    rounds: int = ROUNDS,
    host: bool = False,
    seconds: float = SECONDS,
) -> dict[str, float]:
    """Median microseconds of each, sampled in turns: ``rounds`` times, or for ``seconds`` per case.

    Several functions of a case run in rotation, so that no input is still in the L2 cache.
    """
    make = cuda_sampler if torch.cuda.is_available() and not host else cpu_sampler
    samplers = {}
    for name, given in cases.items():
        functions = [given] if callable(given) else list(given)
        for function in functions * 2:
            function()
        samplers[name] = make(functions, calls)
    samples: dict[str, list[float]] = {name: [] for name in cases}
    deadline = time.perf_counter() + seconds * len(cases)
    for round_ in range(rounds):
        for name, sampler in samplers.items():
            samples[name].append(sampler())
        if round_ >= 2 and time.perf_counter() > deadline:
            break
    return {name: statistics.median(values) for name, values in samples.items()}


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"
