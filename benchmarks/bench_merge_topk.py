"""merge_topk of the lists of ranks against torch.topk over all of their scores, which returns no positions in
order, and a copy of as many bytes."""

import torch

import mla_fp8
from harness import Work, copies, run


def work(ranks: int, rows: int, k: int, own: bool, device: str) -> Work:
    scores = torch.randn(ranks, rows, k, device=device)
    positions = torch.rand(rows, ranks * k, device=device).argsort(1).int()
    positions = positions.view(rows, ranks, k).transpose(0, 1).contiguous()
    out = {"out_positions": positions.new_empty(rows, k), "out_lens": positions.new_empty(rows)}
    options = {"topk": k, "rank": 1} if own else {"topk": k}
    given = positions[1].contiguous() if own else positions
    num_bytes = scores.nbytes + given.nbytes + 4 * rows * k
    return Work(
        label=f"ranks={ranks} rows={rows} k={k}{' scores alone' if own else ''}",
        run=lambda: mla_fp8.merge_topk(scores, given, **options, **out),
        num_bytes=num_bytes,
        baselines={
            "torch.topk": lambda: scores.transpose(0, 1).flatten(1).topk(k, dim=1),
            "copy": copies(num_bytes, device),
        },
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(2, 1, 2048), (4, 1, 2048), (8, 1, 2048), (8, 32, 2048), (8, 128, 2048), (8, 32, 512)]
    run("merge_topk", [work(*case, own, device) for case in cases for own in (False, True)])
