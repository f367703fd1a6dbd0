"""pool_index_k against a copy of the same bytes: what it reads of its input and state, and what it writes."""

import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import INDEX_LAYOUTS

PAGE, POOL, DEPTH = 64, 4, 8
CASES = [(1, 8192, 0), (8, 1024, 2), (128, 1, 8), (128, 1, 7), (64, 4, 5), (1, 1, 7)]


def work(requests: int, tokens: int, start: int, device: str) -> Work:
    """Requests of as many tokens each, the first at position `start`."""
    layout, n = INDEX_LAYOUTS["index_fp8"], requests * tokens
    closing = requests * ((start + tokens) // POOL - start // POOL)
    old = start % POOL if closing else 0
    num_bytes = 512 * (n + requests * (old + min(tokens, DEPTH))) + closing * layout.bytes_per_entry
    rounds = gpu_rotation(num_bytes)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = [torch.randn(2, n, 128, device=device).bfloat16() for _ in range(rounds)]
    state = torch.zeros(2, requests, DEPTH, 128, dtype=torch.bfloat16, device=device)
    entry = torch.arange(start, start + tokens, device=device) // POOL
    slots = (
        torch.arange(requests, device=device)[:, None] * (tokens // POOL + 1) + entry - start // POOL
    ).flatten()
    cache = layout.empty(int(slots.max()) // PAGE + 1, PAGE, device)
    arguments = (
        ints([tokens * r for r in range(requests + 1)]), ints([start] * requests), *state,
        ints(list(range(requests))), torch.randn(POOL, 128, device=device), slots, cache,
    )  # fmt: skip
    return Work(
        label=f"requests={requests} tokens={tokens} from={start}",
        run=[lambda x=x: mla_fp8.pool_index_k(*x, *arguments, page_size=PAGE) for x in rows],
        num_bytes=num_bytes,
        baselines={"copy": copies(num_bytes, device)},
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("pool_index_k", (work(*case, device) for case in CASES))
