#!/usr/bin/env python3
"""Test files of an engine that PYTHONPATH has: `forks.py {vllm,sglang} FILE...`; exits with 1 if one fails.

Each file has a process of its own, forked behind the imports that all of them share: these take longer than
most files' tests.
"""

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
from importlib import import_module, metadata
from pathlib import Path

import pytest
import without_gpu

# The engine first: a file's own order is the same.
SHARED = {
    "vllm": ("vllm.v1.attention.backends.mla.flashmla_sparse", "mla_fp8.integrations.vllm"),
    "sglang": ("sglang.srt.layers.attention.deepseek_v4_backend", "mla_fp8.integrations.sglang"),
}
PRETEND = {"vllm": without_gpu.pretend_vllm, "sglang": without_gpu.pretend_sglang}
OPTIONS = ["-q", "-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider"]
SECONDS = 170  # of a file, which is killed behind them


def passes(name: str, file: Path) -> bool:
    begin = time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(SECONDS)
            code = pytest.main([*OPTIONS, str(file)])
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read()
    result = "killed" if code < 0 else (text.strip().splitlines() or ["nothing"])[-1]
    print(f"{name} {metadata.version(name)}, {file.name}: {result}, {time.time() - begin:.0f} s", flush=True)
    if code:
        print(text[-9000:], flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=SHARED)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    PRETEND[args.engine]()
    for module in SHARED[args.engine]:
        import_module(module)
    gc.collect()
    gc.freeze()  # forks share what they never write
    failed = [file for file in args.files if not passes(args.engine, file)]
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
