"""quantize_index_k and topk_to_slots against copies of as many bytes."""

import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import INDEX_LAYOUTS

PAGE = 64


def writer(name: str, num_tokens: int, device: str) -> Work:
    layout = INDEX_LAYOUTS[name]
    num_bytes = num_tokens * (256 + layout.bytes_per_entry + 4)
    rounds = gpu_rotation(num_bytes)
    cache = layout.empty(-(-num_tokens * rounds // PAGE), PAGE, device).zero_()
    keys = [torch.randn(num_tokens, 128, device=device).bfloat16() for _ in range(min(rounds, 16))]
    pages = torch.randperm(len(cache), device=device)[:, None] * PAGE
    slots = (
        (pages + torch.arange(PAGE, device=device)).flatten().int()[: num_tokens * rounds].split(num_tokens)
    )

    def call(i: int) -> None:
        mla_fp8.quantize_index_k(keys[i % len(keys)], slots[i], cache, layout=layout, page_size=PAGE)

    functions = [lambda i=i: call(i) for i in range(rounds)]
    return Work(
        f"{name} tokens={num_tokens}", functions, num_bytes, baselines={"copy": copies(num_bytes, device)}
    )


def slots(rows: int, topk: int, device: str) -> Work:
    table = torch.randperm(rows * 2048, device=device).int().view(rows, 2048)
    positions = torch.randint(2048 * PAGE, (rows, topk), device=device).int().sort(1).values
    out = {"out_slots": torch.empty_like(positions)}
    out["out_lens"] = torch.empty(rows, dtype=torch.int32, device=device)
    lens = torch.full((rows,), topk, dtype=torch.int32, device=device)
    num_bytes = 8 * positions.numel()

    def call() -> None:
        mla_fp8.topk_to_slots(positions, table, page_size=PAGE, lens=lens, **out)

    baselines = {"copy": copies(num_bytes, device)}
    return Work(f"topk_to_slots rows={rows} k={topk}", call, num_bytes, baselines=baselines)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [(name, n) for name in INDEX_LAYOUTS for n in (1, 128, 8192, 65536)]
    works = [lambda name=name, n=n: writer(name, n, device) for name, n in sizes]
    works += [lambda rows=rows: slots(rows, 2048, device) for rows in (1, 32, 1024, 8192)]
    run("quantize_index_k", (make() for make in works))
