"""Who goes first, and what explain() says of ten real configurations."""

from support import registered

from mla_fp8.backends.table import Backend, Problem
from mla_fp8.dispatch import PREFERENCES, Preference, explain

TWO_CACHES = frozenset({"two caches"})
CONFIGURATIONS: tuple[tuple[str, Problem, str], ...] = (
    ("DeepSeek V3.2, decode, 8 x H200", Problem("sparse_decode", "sm90", "dsv32", 16), "auto"),
    ("DeepSeek V4-Pro, decode, 1 x H200", Problem("sparse_decode", "sm90", "dsv4", 128, TWO_CACHES), "auto"),
    (
        "DeepSeek V4-Flash, prefill from a workspace, H200",
        Problem("sparse_prefill", "sm90", "bf16_512", 64), "auto",
    ),
    (
        "DeepSeek V4-Flash, prefill from pages, H200",
        Problem("sparse_prefill_paged", "sm90", "dsv4", 64, TWO_CACHES), "auto",
    ),
    (
        "GLM-5, decode, bf16 cache, FlashMLA asked for, H200",
        Problem("sparse_decode", "sm90", "bf16", 64), "flash_mla",
    ),
    ("DeepSeek V3.2, decode, B200", Problem("sparse_decode", "sm100", "dsv32", 128), "auto"),
    (
        "DeepSeek V3.2, decode, one scale per layer, FlashInfer's FP8 asked for, B200",
        Problem("sparse_decode", "sm100", "fp8_e4m3", 128), "flashinfer_fp8",
    ),
    ("DeepSeek V3.2, decode, RTX PRO 6000", Problem("sparse_decode", "sm120", "dsv32", 16), "auto"),
    (
        "DeepSeek V3.2, decode, one scale per layer, MI300X",
        Problem("sparse_decode", "gfx942", "fp8_e4m3_fnuz", 16), "auto",
    ),
    ("DeepSeek V4-Flash, decode, A100", Problem("sparse_decode", "sm80", "dsv4", 64, TWO_CACHES), "auto"),
)  # fmt: skip


def not_built(backend: Backend, problem: Problem) -> str | None:
    """As on a machine that has every package and our library for its device: the ops that are not in it."""
    device = "cpu" if problem.arch == "cpu" else "hip" if problem.arch.startswith("gfx") else "cuda"
    if backend.needs_kernel and problem.op not in registered(f"MLA_FP8_{device.upper()}_OPS"):
        return f"libmla_fp8_{device}.so has no {problem.op}"
    return None


def preferences() -> str:
    rows = ["| op | GPU | layouts | heads | first | why |", "|---|---|---|---|---|---|"]
    for p in PREFERENCES:
        heads = "all" if p.q_heads == Preference.q_heads else f"{p.q_heads[0]} to {p.q_heads[-1]}"
        cells = [
            ", ".join(f"`{op}`" for op in p.ops), ", ".join(p.archs), ", ".join(p.layouts) or "all", heads,
            ", ".join(f"`{name}`" for name in p.order), p.why,
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def configurations() -> str:
    parts = []
    for title, p, backend in CONFIGURATIONS:
        parts.append(f"{title}:\n\n```\n{p}; backend={backend!r}\n{explain(p, backend, not_built)}\n```")
    return "\n\n".join(parts)


def parts() -> dict[str, str]:
    return {"preferences": preferences(), "configurations": configurations()}
