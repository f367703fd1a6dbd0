"""``python -m mla_fp8 doctor``, ``demo``, ``bench`` and ``replay``."""

import argparse
import sys

from . import bench, doctor, replay
from .demo import run as demo


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mla_fp8", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is loaded, what runs where, and why the rest does not")
    demo.add_arguments(commands.add_parser("demo", help=demo.__doc__))
    bench.add_arguments(commands.add_parser("bench", help=bench.__doc__))
    replay.add_arguments(commands.add_parser("replay", help=replay.__doc__))
    options = parser.parse_args(arguments)
    runs = {"demo": demo.main, "bench": bench.main, "replay": replay.main}
    if options.command in runs:
        return runs[options.command](options)
    print(doctor())
    return 0


if __name__ == "__main__":
    sys.exit(main())
