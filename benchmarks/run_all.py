"""Runs every bench_*.py, each in a process of its own; arguments are passed on."""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    failed = []
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        if subprocess.call([sys.executable, str(path), *sys.argv[1:]]) != 0:
            failed.append(path.name)
        print(flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
