import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, load_triton_baselines, run

WINDOW, RATIO, NUM_REQUESTS, SEQ_LEN = 128, 4, 8, 65536


def make_inputs(num_tokens, topk, device):
    def ints(values):
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    per_request, requests = num_tokens // NUM_REQUESTS, torch.arange(NUM_REQUESTS)
    gather_len, compressed_len = per_request + WINDOW - 1, SEQ_LEN // RATIO
    topk_indices = torch.randint(compressed_len, (num_tokens, topk), dtype=torch.int32, device=device)
    return (
        topk_indices,
        ints(torch.arange(NUM_REQUESTS + 1) * per_request),
        ints([SEQ_LEN] * NUM_REQUESTS),
        ints([gather_len] * NUM_REQUESTS),
        ints(requests * compressed_len),
        ints(NUM_REQUESTS * compressed_len + requests * gather_len),
    )


def torch_combine(topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base):
    """The same rows by whole-tensor PyTorch operations."""
    num_tokens, topk = topk_indices.shape
    width = -(-(topk + WINDOW) // 128) * 128
    token, column = (torch.arange(n, device=topk_indices.device) for n in (num_tokens, width))
    request = torch.searchsorted(query_start_loc[1:] - query_start_loc[0], token, right=True)
    pos = (seq_lens - query_start_loc[1:] + query_start_loc[0])[request] + token
    num_topk = ((pos + 1) // RATIO).clamp_max(topk)
    first = (seq_lens - gather_lens)[request]
    start = torch.maximum(pos - WINDOW + 1, first).clamp_min(0)
    lens = num_topk + pos - start + 1
    entries = torch.nn.functional.pad(topk_indices, (0, width - topk), value=-1)
    j = column - num_topk[:, None]
    compressed = torch.where((j < 0) & (entries >= 0), entries + compressed_base[request][:, None], -1)
    window = (swa_base[request] + start - first)[:, None] + j
    indices = torch.where((j >= 0) & (column < lens[:, None]), window, compressed)
    return indices.int(), lens.int()


def works(num_tokens, topk, device):
    inputs = make_inputs(num_tokens, topk, device)
    options = {"window_size": WINDOW, "compress_ratio": RATIO, "topk": topk}
    want = torch_combine(*inputs)
    indices, lens = mla_fp8.combine_topk_swa_indices(*inputs, **options)
    assert torch.equal(indices, want[0]) and torch.equal(lens, want[1])
    rounds = gpu_rotation(indices.nbytes)
    sources = [(inputs[0].clone(), *inputs[1:]) for _ in range(rounds)]
    targets = [indices.clone() for _ in range(rounds)]
    num_bytes = 4 * (inputs[0].numel() + indices.numel() + lens.numel())

    def rotate(fn, targets=targets):
        return [lambda i=i: fn(sources[i], targets[i]) for i in range(rounds)]

    baselines = {"copy": copies(num_bytes, device), "torch": lambda: torch_combine(*inputs)}
    if triton := load_triton_baselines(device):
        baselines["triton"] = rotate(
            lambda x, out: triton.combine_topk_swa_indices(x, WINDOW, RATIO, out, lens)
        )
        triton.combine_topk_swa_indices(inputs, WINDOW, RATIO, indices, lens)
        assert torch.equal(indices, want[0]) and torch.equal(lens, want[1])
    label = f"tokens={num_tokens} width={indices.shape[1]}"
    yield Work(
        label=label,
        run=rotate(
            lambda x, out: mla_fp8.combine_topk_swa_indices(*x, **options, out_indices=out, out_lens=lens)
        ),
        num_bytes=num_bytes,
        baselines=baselines,
    )
    indptr, flat = mla_fp8.combine_topk_swa_indices_ragged(*inputs, **options)
    num_bytes = 4 * (inputs[0].numel() + flat.numel() + indptr.numel())
    yield Work(
        label=label + " ragged",
        run=rotate(
            lambda x, out: mla_fp8.combine_topk_swa_indices_ragged(
                *x, **options, out_indptr=indptr, out_indices=out
            ),
            [flat.clone() for _ in range(rounds)],
        ),
        num_bytes=num_bytes,
        baselines={"copy": copies(num_bytes, device)},
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(8, 512), (4096, 512), (8192, 512), (16384, 512), (4096, 1024), (16384, 1024)]
    run("combine_topk_swa_indices", (work for case in cases for work in works(*case, device)))
