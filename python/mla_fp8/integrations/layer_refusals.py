"""What of a layer of DeepSeek V3.2 or GLM-5 the ops around attention do not take, in either engine."""

from collections.abc import Callable

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
