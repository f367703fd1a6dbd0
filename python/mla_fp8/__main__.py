"""``python -m mla_fp8 doctor`` and ``python -m mla_fp8 demo``."""

import argparse
import sys

from . import doctor
from .demo import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mla_fp8", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is loaded, what runs where, and why the rest does not")
    run.add_arguments(commands.add_parser("demo", help=run.__doc__))
    options = parser.parse_args(arguments)
    if options.command == "demo":
        return run.main(options)
    print(doctor())
    return 0


if __name__ == "__main__":
    sys.exit(main())
