"""Starts vLLM or SGLang with mla_fp8, with the flags that a model needs.

python examples/serve.py vllm deepseek-ai/DeepSeek-V3.2 --check        checks and prints, starts nothing
python examples/serve.py vllm deepseek-ai/DeepSeek-V3.2 -- --tensor-parallel-size 8
python examples/serve.py sglang deepseek-ai/DeepSeek-V4 --without      the engine as it is: to go back

What stands behind -- goes to the engine. Exit code 1 if the engine here cannot use mla_fp8.
"""

import argparse
import importlib.util
import os
import re
import shlex
import sys
from importlib import import_module
from importlib.metadata import entry_points

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


def is_v4(model: str) -> bool:
    return re.search(r"V4(\.\d+)?\b", model) is not None


def command(engine: str, model: str, with_mla_fp8: bool) -> tuple[dict[str, str], list[str]]:
    """(environment variables, command)."""
    if engine == "vllm":
        started = ["vllm", "serve", model, "--kv-cache-dtype", "fp8"]
        if not with_mla_fp8:
            return {}, started
        if is_v4(model):
            return {"VLLM_PLUGINS": "mla_fp8_flash_mla"}, started
        return {}, [*started, "--attention-backend", "MLA_FP8"]
    started = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    if not is_v4(model):
        started += ["--dsa-decode-backend", "flashmla_kv", "--dsa-prefill-backend", "flashmla_sparse"]
    return {"SGLANG_PLUGINS": "mla_fp8"} if with_mla_fp8 else {}, started


def why_not(engine: str, model: str) -> str | None:
    """The first reason why the engine of this environment cannot use mla_fp8, or None."""
    if importlib.util.find_spec(engine) is None:
        return f"{engine} is not installed here"
    if "mla_fp8" not in {point.name for point in entry_points(group=GROUPS[engine])}:
        return "mla_fp8 is on the path, but not installed: pip install --no-build-isolation ."
    plugin = import_module(f"mla_fp8.integrations.{engine}")  # and with it torch
    return plugin.why_not_calls() if engine == "vllm" and is_v4(model) else plugin.why_not()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=sorted(GROUPS))
    parser.add_argument("model")
    parser.add_argument("--check", action="store_true", help="start nothing")
    parser.add_argument("--without", action="store_true", help="without mla_fp8")
    arguments, more = parser.parse_known_args()
    more = [x for x in more if x != "--"]
    variables, words = command(arguments.engine, arguments.model, not arguments.without)
    words += more
    print(" ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)]))
    reason = None if arguments.without else why_not(arguments.engine, arguments.model)
    if reason:
        print(f"cannot use mla_fp8: {reason}", file=sys.stderr)
        return 1
    if not arguments.check:
        os.execvpe(words[0], words, {**os.environ, **variables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
