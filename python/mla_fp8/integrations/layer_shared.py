"""What the layers of DeepSeek V3.2 and GLM-5 have in common in both engines: widths that the ops around
attention do not take, and tables of RoPE."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..layout import HEAD_DIM_V

ROPE_DIM, MOST_QA = 64, 2048
Refusals = dict[str, Callable[[], bool]]  # by their reasons; each is asked only if those before do not refuse


def of_dims(latent: int, rope: int, query_latent: int) -> Refusals:
    """Of columns of the keys' latents, of what RoPE rotates, and of the queries' latents."""
    return {
        f"latents of {latent} + {rope} dims": lambda: (latent, rope) != (HEAD_DIM_V, ROPE_DIM),
        f"queries' latents of {query_latent} dims": lambda: query_latent > MOST_QA or query_latent % 8 != 0,
    }


def first(refusals: Refusals) -> str | None:
    return next((reason for reason, refuses in refusals.items() if refuses()), None)


def tables(rope: Any) -> tuple[Tensor, Tensor]:
    """cos and sin of an engine's [positions, cos | sin], made once: views, or copies of one that is bf16."""
    table, kept = rope.cos_sin_cache, vars(rope).get("mla_fp8_tables")
    if kept is None or kept[0] is not table:
        kept = vars(rope)["mla_fp8_tables"] = (table, *table.float().chunk(2, 1))
    return kept[1], kept[2]
