"""``python -m mla_fp8 doctor``, ``demo``, ``bench`` and ``replay``."""

import argparse
import os
import sys

from . import __version__
from .tools import bench, doctor, replay
from .tools.cli import plain
from .tools.demo import run as demo


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mla_fp8", description=plain(__doc__))
    parser.add_argument("--version", action="version", version=f"mla_fp8 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "what works on this machine, and why the rest does not"
    doctor.add_arguments(commands.add_parser("doctor", help=about, description=about))
    for name, module in (("demo", demo), ("bench", bench), ("replay", replay)):
        about = plain(module.__doc__).partition(": ")[2]  # behind the command line
        module.add_arguments(commands.add_parser(name, help=about.partition("\n")[0], description=about))
    options = parser.parse_args(arguments)
    runs = {"doctor": doctor.main, "demo": demo.main, "bench": bench.main, "replay": replay.main}
    return runs[options.command](options)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
