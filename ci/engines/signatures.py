"""Parameters of an engine's functions, read from its source: importing them takes Triton and a GPU."""

import ast
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

OPS = "models/deepseek_v4{}/common/ops/{}.py"
# Our module's functions, by the file of the package that has them.
VLLM = {
    OPS.format("1", "fused_compress_quant_cache"): ("fused_save_compress_norm", "rope_quant_insert"),
    OPS.format("", "fused_inv_rope_fp8_quant"): ("fused_inv_rope_fp8_quant",),
}
SGLANG = {
    "kernels/ops/attention/dsv4/norm_rope.py": (
        "fused_q_norm_rope", "fused_k_norm_rope_flashmla", "fused_rope_inplace",
    ),
    "kernels/ops/attention/dsv4/low_ratio_compress.py": (
        "c1_decode_norm_rope_store", "c2_decode_norm_rope_store", "c2_prefill_norm_rope_store",
    ),
}  # fmt: skip


def cases(files: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(file, name) for file, names in files.items() for name in names]


def parameters(package: str, file: str, name: str) -> tuple[list[str], list[str]]:
    """Positional parameters, and those by keyword alone."""
    spec = find_spec(package)
    assert spec and spec.origin
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    (found,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    return [x.arg for x in found.args.args], [x.arg for x in found.args.kwonlyargs]


def assert_takes(ours: Callable, package: str, file: str) -> None:
    """Ours takes a call of theirs: the same positions, and every keyword."""
    positional, keywords = parameters(package, file, ours.__name__)
    own = inspect.signature(ours).parameters
    by_position = [x.name for x in own.values() if x.kind is not x.KEYWORD_ONLY]
    assert by_position[: len(positional)] == positional
    assert set(keywords) <= set(own)
