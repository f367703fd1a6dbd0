"""Engines of a step that are timed take turns on its GPU."""

import argparse
import contextlib
import fcntl
import os
import time

ROUNDS = 4  # of turns, at most


def ready(args: argparse.Namespace, *rounds: int) -> None:
    """Says to the step's other engines that this one leaves the GPU alone until its turn, or for good."""
    if args.turns:
        args.turns.mkdir(parents=True, exist_ok=True)
        for round_ in rounds:
            (args.turns / f"ready.{round_}.{os.getpid()}").touch()


@contextlib.contextmanager
def turn(args: argparse.Namespace, round_: int = 0):
    """Until all engines are ready, then until it is ours: nothing else runs on the GPU meanwhile. A round
    begins when all engines have ended the one before it.
    """
    if not args.turns:
        yield
        return
    ready(args, round_)
    deadline = time.time() + 150  # one may have failed
    while len(list(args.turns.glob(f"ready.{round_}.*"))) < args.of and time.time() < deadline:
        time.sleep(0.2)
    with open(args.turns / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
