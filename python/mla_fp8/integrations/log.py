"""What plug-ins say goes to the engine's own logger: vLLM has no handler that shows INFO of any other."""

import functools
import logging
import sys


def logger() -> logging.Logger:
    vllm = sys.modules.get("vllm.logger")
    found: logging.Logger = vllm.init_logger("vllm.mla_fp8") if vllm else logging.getLogger("sglang.mla_fp8")
    return found


@functools.cache
def say_once(sentence: str) -> None:
    logger().info(sentence)
