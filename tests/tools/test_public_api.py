"""What users may import, and with which parameters: frozen in public_api.txt.

After a deliberate change: python tests/tools/test_public_api.py > tests/tools/public_api.txt
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import mla_fp8

# Documented modules besides mla_fp8 itself. Each says what is public by __all__.
MODULES = (
    "mla_fp8.compat.aiter", "mla_fp8.compat.deep_gemm", "mla_fp8.compat.flash_mla", "mla_fp8.compat.fp4_rows",
    "mla_fp8.compat.sglang",
    "mla_fp8.compat.sglang_layer", "mla_fp8.compat.vllm",
    "mla_fp8.index_reference", "mla_fp8.layer_reference", "mla_fp8.reference",
    "mla_fp8.testing",
)  # fmt: skip
CALLS = ("mla_fp8.integrations.sglang:register",
         "mla_fp8.integrations.vllm:register_flash_mla_calls", "mla_fp8.__main__:main")  # fmt: skip


def signature(function: object) -> str:
    """Names, kinds and defaults; annotations are spelt differently by different Pythons."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def members(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}{signature(value)}"
        for member, found in vars(value).items():
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if not member.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{member}" + ("" if isinstance(found, property) else signature(function))
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield name


def listing() -> list[str]:
    lines = [line for name in mla_fp8.__all__ for line in members(f"mla_fp8.{name}", getattr(mla_fp8, name))]
    for name in MODULES:
        module = import_module(name)
        for own in module.__all__:
            lines += members(f"{name}.{own}", getattr(module, own))
    for module, _, function in (call.partition(":") for call in CALLS):
        lines += members(f"{module}.{function}", getattr(import_module(module), function))
    return sorted(lines)


def test_the_public_api_is_frozen():
    frozen = (Path(__file__).parent / "public_api.txt").read_text().splitlines()
    assert listing() == frozen


def test_the_version_is_that_of_the_package():
    tree = Path(__file__).parents[2] / "version.txt"
    assert mla_fp8.__version__.partition("+")[0].partition(".dev")[0] == tree.read_text().strip()


if __name__ == "__main__":
    print("\n".join(listing()))
