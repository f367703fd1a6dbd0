"""compress_kv against a copy of the same bytes: what it reads of its input and state, and what it writes."""

import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import KV_LAYOUTS
from mla_fp8.layer_reference import compressed_width

PAGE_SIZE, MAX_POS, EPS = 64, 16384, 1e-6
KINDS = ((4, False), (128, False), (128, True), (2, False), (1, False))
CALLS = (("prefill", 8192), ("decode", 128), ("decode", 1))
CASES = [(*kind, *call) for kind in KINDS for call in CALLS]
CASES += [(128, False, "all close", 128), (4, False, "all close", 128)]


def work(ratio: int, online: bool, what: str, num_tokens: int, device: str) -> Work:
    """A request of all tokens from position 0, or requests of a token each; of those none, or all, close."""
    layout, width = KV_LAYOUTS["dsv4"], compressed_width(ratio)
    window = {4: 8}.get(ratio, ratio)
    prefill, depth = what == "prefill", 2 if online else window
    lens = [num_tokens] if prefill else [1] * num_tokens
    start = 0 if prefill else 2 * ratio - 1 if what == "all close" or ratio == 1 else 2 * ratio
    closing = num_tokens // ratio if prefill else num_tokens if (start + 1) % ratio == 0 else 0
    state_width = 3 * 512 if online else width
    kept = 0 if ratio == 1 else sum(min(n, depth) for n in lens)
    old = 0 if prefill or ratio == 1 else closing * (window - 1) * width // (2 if ratio == 4 else 1)
    num_bytes = 4 * (num_tokens * width + old + kept * state_width) + closing * layout.bytes_per_token
    num_bytes += 4 * num_tokens * state_width if online and not prefill else 0
    rounds = gpu_rotation(num_bytes)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = torch.zeros(len(lens), depth, state_width, device=device) if ratio > 1 else None
    if state is not None and online:
        state += 1
    table = torch.rand(MAX_POS, 64, device=device)
    cache = layout.empty(num_tokens // PAGE_SIZE + 1, PAGE_SIZE, device)
    rows = [torch.randn(num_tokens, width, device=device) for _ in range(rounds)]
    requests = (ints([0, *torch.tensor(lens).cumsum(0).tolist()]), ints([start] * len(lens)), state)
    rest = (
        ints(list(range(len(lens)))),
        torch.randn(ratio, width // 2, device=device) if ratio > 2 else None,
        torch.ones(512, device=device), table[:, :32], table[:, 32:],
        torch.arange(num_tokens, device=device) // (ratio if prefill else 1), cache,
    )  # fmt: skip
    options = {"ratio": ratio, "layout": layout, "page_size": PAGE_SIZE, "eps": EPS, "online": online}
    name = f"{ratio}{' online' if online else ''}"
    return Work(
        label=f"ratio={name} {what} tokens={num_tokens}",
        run=[lambda x=x: mla_fp8.compress_kv(x, *requests, *rest, **options) for x in rows],
        num_bytes=num_bytes,
        baselines={"copy": copies(num_bytes, device)},
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("compress_kv", (work(*case, device) for case in CASES))
