"""What tests of both engines' HiSparse share."""

import torch

POISON = 1 << 30


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def bytes_at(cache, layout, page_size, row):
    """The values and the scales of a row of a [pages, bytes] cache."""
    page, i = cache[row // page_size].cpu(), row % page_size
    tail = 0 if layout.scale_inline else layout.scale_bytes
    scales = page[page_size * layout.token_stride + i * tail :][:tail]
    return bytes(page[i * layout.token_stride :][: layout.token_stride].numpy()) + bytes(scales.numpy())


def host_memory(pages, size, device):
    memory = torch.randint(0, 256, (pages, size), dtype=torch.uint8)
    return memory.pin_memory() if device == "cuda" else memory


def model_step(keys, held, order):
    """(slot of each key, keys to load) of one request; lists of an LRU, oldest first, are updated."""
    used = [slot for slot in order if held[slot] in keys]
    stale = [slot for slot in order if slot not in used]
    loads = [key for key in dict.fromkeys(keys) if key not in held]
    for key, slot in zip(loads, stale, strict=False):
        held[slot] = key
    order[:] = stale[len(loads) :] + stale[: len(loads)] + used
    return {key: held.index(key) for key in keys}, loads


def picks(rows, k, limit):
    return [torch.randperm(limit)[:k].tolist() for _ in range(rows)]
