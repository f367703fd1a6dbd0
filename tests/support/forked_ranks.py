"""Ranks of a group over gloo. Each is a fork of this process, which has imported its engine already."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def of_ranks(world: int, run: Callable[[int], dict]) -> list[dict]:
    """What ``run(rank)`` returns on each of ``world`` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=_run, args=(world, rank, port, run, results), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, dict] = {}
    for _ in ranks:
        rank, result = results.get(timeout=120)
        assert isinstance(result, dict), result
        found[rank] = result
    for process in ranks:
        process.join(20)
    return [found[rank] for rank in range(world)]


def _run(world: int, rank: int, port: int, run: Callable[[int], dict], results: Any) -> None:
    try:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=world, rank=rank)
        results.put((rank, run(rank)))
    except BaseException as error:
        results.put((rank, f"rank {rank} of {world}: {error!r}\n{traceback.format_exc()}"))
        raise
