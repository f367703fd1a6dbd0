import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import reference

WINDOW, SEQ_LEN, NUM_SLOTS = 128, 16384, 1 << 20


def work(num_requests, extend_len, device):
    def ints(value):
        return torch.full((num_requests,), value, dtype=torch.int32, device=device)

    capacity = num_requests * (extend_len + WINDOW - 1)
    inputs = (
        ints(SEQ_LEN),
        ints(extend_len),
        torch.randperm(num_requests, device=device),
        torch.randint(NUM_SLOTS, (num_requests, SEQ_LEN), dtype=torch.int32, device=device),
        torch.randperm(NUM_SLOTS, device=device),
    )
    options = {"window_size": WINDOW, "capacity": capacity}
    names = ("ids", "first_pos", "gather_lens", "offsets")
    out = {
        f"out_{name}": x
        for name, x in zip(names, mla_fp8.build_swa_token_ids(*inputs, **options), strict=True)
    }
    return Work(
        label=f"requests={num_requests} extend={extend_len}",
        run=lambda: mla_fp8.build_swa_token_ids(*inputs, **options, **out),
        num_bytes=capacity * (4 + 8 + 4),  # req_to_token, full_to_swa, ids
        baselines={"torch": lambda: reference.build_swa_token_ids(*inputs, **options)},
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(1, 8192), (8, 1024), (64, 128), (256, 1)]
    run("build_swa_token_ids", [work(*case, device) for case in cases])
