"""The specification of the indexer's ops: plain PyTorch, slow, exact. No kernels, no dispatch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .index_layout import INDEX_DIM, IndexLayout
from .reference import E2M1, e2m1_codes, to_bf16, to_fp8

__all__ = [
    "best_blocks",
    "in_blocks",
    "index_logits",
    "index_topk",
    "merge_topk",
    "pool_index_k",
    "quantize_index_k",
    "topk_to_slots",
]

BLOCK_SIZE = 8  # entries of V4.1's blocks
POOL_SIZE = 4  # keys of GLM-5.3-Flash's pools
NO_SHIFT = -20  # 2^-20 times the largest e2m1 is 0 in e4m3


def power_of_two_at_least(x: Tensor) -> Tensor:
    """The exponent of the smallest power of two that is not below ``x`` > 0."""
    mantissa, exponent = torch.frexp(x.double())
    return exponent - (mantissa == 0.5).int()


def power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.double), exponent)


def rotate(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of the last dimension times 128^-0.5, neighbours first, in bf16."""
    for step in range(INDEX_DIM.bit_length() - 1):
        pairs = x.unflatten(-1, (-1, 2, 1 << step))
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
        x = x.flatten(-3)
    return to_bf16(x * torch.tensor(INDEX_DIM**-0.5, dtype=torch.float32)).float()


def quantize_index_k(
    k: Tensor, slot_mapping: Tensor, index_cache: Tensor, *, layout: IndexLayout, page_size: int,
    scale_format: str = "ue8m0", amax_floor: float | None = None, hadamard: bool = False,
    reciprocal: bool = False,
) -> None:  # fmt: skip
    options = {"scale_format": scale_format, "amax_floor": amax_floor, "hadamard": hadamard}
    row = k[: len(slot_mapping)]
    codes, scale = encode(row, layout=layout, reciprocal=reciprocal, **options)  # type: ignore[arg-type]
    stored = (slot_mapping >= 0) & (slot_mapping < len(index_cache) * page_size)
    at = (slot_mapping[stored] // page_size, slot_mapping[stored] % page_size)
    values, scales = layout.views(index_cache, page_size)
    values[at], scales[at] = codes[stored], scale[stored]


def pool_index_k(
    k: Tensor, score: Tensor, query_start_loc: Tensor, start_pos: Tensor, state: dict[int, list[Tensor]],
    state_slots: Tensor, ape: Tensor,
) -> list[tuple[int, Tensor]]:  # fmt: skip
    """(token, the key that :func:`quantize_index_k` rotates and stores) of each closed pool.

    ``state`` is that of :func:`layer_reference.compress_kv`: all rows of a slot's request by position.
    """
    found, starts, rows = [], (query_start_loc - query_start_loc[0]).tolist(), torch.stack([k, score], 1)
    for r, (slot, start) in enumerate(zip(state_slots.tolist(), start_pos.tolist(), strict=True)):
        history = state.setdefault(slot, [])
        history[start:] = rows[starts[r] : starts[r + 1]].float()
        for p in range(start, len(history)):
            if (p + 1) % POOL_SIZE == 0:
                keys, scores = torch.stack(history[p + 1 - POOL_SIZE : p + 1]).unbind(1)
                pooled = ((scores + ape).softmax(0) * keys).sum(0)
                found.append((starts[r] + p - start, to_bf16(pooled)))
    return found


def encode(
    x: Tensor, *, layout: IndexLayout, scale_format: str, amax_floor: float | None, hadamard: bool,
    reciprocal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values and scales of the layout of rows ``[n, 128]``."""
    x = to_bf16(x).float()
    x = rotate(x) if hadamard else x
    tiles = x.unflatten(-1, (1 if layout.name == "index_fp8" else 4, -1))
    amax = torch.where(tiles.isfinite(), tiles.abs(), 0.0).amax(-1)
    amax = amax.clamp_min(layout.amax_floor if amax_floor is None else amax_floor)
    if layout.name == "index_fp4":
        return encode_e2m1(tiles, amax)
    exponent = power_of_two_at_least(amax / 448.0)
    scale = amax / 448.0 if scale_format == "f32" else power_of_two(exponent).float()
    quotient = x * (1.0 / scale) if reciprocal else x / scale
    return to_fp8(quotient, torch.float8_e4m3fn, 448.0), scale


def encode_e2m1(tiles: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes ``[n, 64]`` and ue8m0 ``[n, 4]`` of ``tiles`` [n, 4, 32]."""
    exponent = power_of_two_at_least(amax / 6.0)
    of_nan = len(E2M1) - 1  # the largest; the scale says it
    codes = e2m1_codes(tiles.double() * power_of_two(-exponent)[..., None], of_nan).flatten(-2)
    exponent = (exponent + 127).masked_fill(tiles.isnan().any(-1), 255)
    return codes[:, ::2] | codes[:, 1::2] << 4, exponent.byte()


def expand_e2m1(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes ``[..., 64]`` and ue8m0 ``[..., 4]`` as e4m3fn ``[..., 128]`` and one float ``[...]`` of all."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    magnitude = torch.tensor(E2M1, dtype=torch.double, device=packed.device)[codes & 7]
    largest = exponents.long().amax(-1)
    base = (largest - 6).clamp_min(2)
    shift = (exponents.long() - base[..., None]).clamp_min(NO_SHIFT)
    tiles = (magnitude * (1 - 2 * (codes >> 3))).unflatten(-1, (4, -1))
    scaled = tiles * power_of_two(shift)[..., None]
    values = to_fp8(scaled.flatten(-2), torch.float8_e4m3fn, 448.0)
    return values, power_of_two(base - 127).float().masked_fill(largest == 255, torch.nan)


def index_keys(index_cache: Tensor, layout: IndexLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """Values ``[num_slots, 128]`` and scales ``[num_slots]`` of a cache."""
    values, scales = (x.flatten(0, 1) for x in layout.views(index_cache, page_size))
    return expand_e2m1(values, scales) if layout.name == "index_fp4" else (values, scales[:, 0])


def logits_of(q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor, q_scale: Tensor | None) -> Tensor:
    """``[rows, keys]`` float64: k_scale * sum over heads of weight * relu(q . k)."""
    w = weights.float()
    if q.dtype is not torch.float8_e4m3fn and q_scale is not None:  # e2m1
        exponents = q_scale.contiguous().view(torch.uint8).view(*q.shape[:2], 4)
        q, scale = expand_e2m1(q.view(torch.uint8), exponents)
        w = w * scale
    elif q_scale is not None:
        w = w * q_scale
    products = torch.einsum("rhd,nd->rhn", q.double(), k.double())
    relu = torch.where(products > 0, products, products * 0)  # a NaN stays one
    return torch.einsum("rhn,rh->rn", relu, w.double()) * k_scale.double()


def index_rows(
    num_rows: int, page_table: Tensor, seq_lens: Tensor | None, *, page_size: int,
    row_lens: Tensor | None = None, query_start_loc: Tensor | None = None, next_n: int = 1,
    compress_ratio: int = 1,
) -> list[tuple[int, int]]:  # fmt: skip
    """Each row's request, -1 for none, and how many entries it sees."""
    found, capacity = [], page_table.shape[1] * page_size
    start = range(0, num_rows + 1, next_n) if query_start_loc is None else query_start_loc.tolist()
    for row in range(num_rows):
        begun = [r for r in range(len(page_table)) if start[r] - start[0] <= row]
        request = begun[-1] if begun and row < start[begun[-1] + 1] - start[0] else -1
        if row_lens is not None:
            seen = int(row_lens[row])
        elif request >= 0 and seq_lens is not None:
            seen = (int(seq_lens[request]) - (start[request + 1] - start[0] - row) + 1) // compress_ratio
        else:
            seen = 0
        found.append((request, min(max(seen, 0), capacity) if request >= 0 else 0))
    return found


def row_slots(
    page_table: Tensor, rows: list[tuple[int, int]], page_size: int, num_pages: int
) -> list[Tensor]:
    """The slots of the entries that each row sees; -1 for an absent one."""
    found = []
    for request, seen in rows:
        column = torch.arange(seen, device=page_table.device)
        page = page_table[max(request, 0)].long()[column // page_size]
        found.append(torch.where((page >= 0) & (page < num_pages), page * page_size + column % page_size, -1))
    return found


def index_logits(
    q: Tensor, weights: Tensor, keys: tuple[Tensor, Tensor], slots: list[Tensor], *, width: int,
    q_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``[rows, width]`` float64 over ``index_keys`` and ``row_slots``: -inf where there is no entry."""
    out = torch.full((len(q), width), -torch.inf, dtype=torch.double, device=q.device)
    for row, entries in enumerate(slots):
        (column,) = (entries[:width] >= 0).nonzero(as_tuple=True)
        k, scale = (x[entries[column]] for x in keys)
        scales = None if q_scale is None else q_scale[row : row + 1]
        out[row, column] = logits_of(q[row : row + 1], weights[row : row + 1], k, scale, scales)[0]
    return out


def index_topk(
    logits: Tensor, present: list[Tensor], *, topk: int, pin_first: int = 0, pin_last: int = 0
) -> tuple[Tensor, Tensor]:
    """Of the columns that are ``present`` (bool) the first in the order: pins, larger logit, lower column.

    Returns positions ``[rows, topk]``, ascending, then -1, and their numbers. NaN comes last.
    """
    pin_first = min(pin_first, topk)
    pin_last = min(pin_last, topk - pin_first)
    positions = torch.full((len(logits), topk), -1, dtype=torch.int32, device=logits.device)
    lens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    for row, exists in enumerate(present):
        column = torch.arange(len(exists), device=logits.device)
        logit = logits[row, : len(exists)].double()
        pinned = (column < pin_first) | (column >= len(exists) - pin_last)
        rank = torch.where(logit.isnan(), 0, 1).masked_fill(pinned, 2)
        logit = logit.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).masked_fill(pinned, 0.0)
        order = torch.sort(-logit, stable=True).indices
        order = order[torch.sort(-rank[order], stable=True).indices]
        chosen = order[exists[order]][:topk].sort().values
        positions[row, : len(chosen)], lens[row] = chosen.int(), len(chosen)
    return positions, lens


def in_blocks(present: list[Tensor], candidate_blocks: Tensor) -> list[Tensor]:
    """Of the columns that are ``present`` those in the row's blocks: what ``index_topk`` chooses among."""
    found = []
    for exists, blocks in zip(present, candidate_blocks.long(), strict=True):
        of = torch.arange(len(exists), device=exists.device) // BLOCK_SIZE
        found.append(exists & torch.isin(of, blocks))
    return found


def best_blocks(logits: Tensor, present: list[Tensor], *, num_blocks: int) -> Tensor:
    """The blocks of each row that are published, ascending, then -1: ``[rows, num_blocks]``.

    The block of the newest column, then those of the largest logits; never another without one above -inf.
    """
    out = torch.full((len(logits), num_blocks), -1, dtype=torch.int32, device=logits.device)
    for row, exists in enumerate(present):
        logit = logits[row, : len(exists)].double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        whole = pad(logit.where(exists, -torch.inf), (0, -len(exists) % BLOCK_SIZE), value=-torch.inf)
        score = whole.view(-1, BLOCK_SIZE).amax(1)
        newest = torch.arange(len(score), device=logits.device) == len(score) - 1
        order = torch.sort(-score, stable=True).indices
        order = order[torch.sort((~newest[order]).int(), stable=True).indices][:num_blocks]
        chosen = order[(score[order] > -torch.inf) | newest[order]].sort().values
        out[row, : len(chosen)] = chosen.int()
    return out


def scores_of(logits: Tensor, positions: Tensor) -> Tensor:
    """The logit of each position, -inf of none."""
    found = logits.gather(1, positions.clamp_min(0).long())
    return found.masked_fill(positions < 0, -torch.inf)


def slots_of(
    positions: Tensor, page_table: Tensor, requests: list[int], page_size: int, end: int = 1 << 31
) -> Tensor:
    """``page_table[request, p // page_size] * page_size + p % page_size``; -1 where there is none."""
    out = torch.full_like(positions, -1)
    table = pad(page_table.long(), (0, 1), value=-1)  # what is past its end has no page
    for row, request in ((i, r) for i, r in enumerate(requests) if r >= 0):
        p = positions[row].long()
        index = torch.where(p < 0, -1, (p // page_size).clamp_max(page_table.shape[1]))
        page = table[request][index]
        slot = torch.where(page >= 0, page * page_size + p % page_size, -1)
        out[row] = torch.where(slot < end, slot, -1).to(out.dtype)
    return out


def numbers_of_rank(numbers: Tensor, *, world_size: int, rank: int, interleave: int) -> Tensor:
    """What a rank calls numbers that ``world_size`` ranks share; -1 for another's, and for negative ones."""
    turn, within = numbers // (world_size * interleave), numbers % (world_size * interleave)
    own = (numbers >= 0) & (within // interleave == rank)
    return torch.where(own, turn * interleave + within % interleave, -1)


def packed(slots: Tensor) -> Tensor:
    """The slots of each row that are not negative, in order, then -1."""
    return slots.gather(1, (slots < 0).int().sort(dim=1, stable=True).indices)


def chosen_tokens(
    positions: Tensor, num_requests: int, *, row_to_request: Tensor | None, next_n: int, group_size: int,
    token_lens: Tensor | None, lens: Tensor | None,
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    """The tokens of each row's positions, then -1, their numbers, and each row's request or -1."""
    rows, topk = positions.shape
    tail = 0 if token_lens is None else group_size - 1
    tokens, out_lens = torch.full((rows, topk * group_size + tail), -1), torch.zeros(rows, dtype=torch.int32)
    request = [r // next_n for r in range(rows)] if row_to_request is None else row_to_request.tolist()
    request = [r if 0 <= r < num_requests else -1 for r in request]
    for row in (r for r in range(rows) if request[r] >= 0):
        ends = (positions[row] >= 0).nonzero()
        n = (int(ends[-1]) + 1 if len(ends) else 0) if lens is None else min(max(int(lens[row]), 0), topk)
        groups = positions[row, :n].long()[:, None].cpu()
        found = torch.where(groups < 0, -1, groups * group_size + torch.arange(group_size)).flatten()
        seen = 0 if token_lens is None else max(int(token_lens[row]), 0)
        found = torch.cat([found, torch.arange(seen - seen % group_size, seen)])
        tokens[row, : len(found)], out_lens[row] = found, len(found)
    return tokens, out_lens, request


def of_ranks(positions: Tensor, ranks: int, rank: int | None, interleave: int) -> Tensor:
    """Positions of a request, int64, that each rank has numbered for itself."""
    owner = torch.arange(ranks, device=positions.device).view(-1, 1, 1) if rank is None else rank
    of_request = (positions.long() // interleave * ranks + owner) * interleave + positions % interleave
    return torch.where((positions < 0) | (of_request >= 1 << 31), -1, of_request)


def merge_topk(
    scores: Tensor, positions: Tensor, *, topk: int, rank: int | None = None, interleave: int | None = None
) -> tuple[Tensor, Tensor]:
    positions = positions.long() if interleave is None else of_ranks(positions, len(scores), rank, interleave)
    per_rank, flat = scores.shape[2], scores.transpose(0, 1).flatten(1).double()
    if rank is None:
        columns = positions.transpose(0, 1).flatten(1)
    else:
        columns = torch.where(flat == -torch.inf, -1, torch.arange(flat.shape[1], device=flat.device))
    order = columns.sort(dim=1, stable=True).indices
    for key in (-flat.nan_to_num(0.0, torch.inf, -torch.inf), flat.isnan().int(), (columns < 0).int()):
        order = order.gather(1, key.gather(1, order).sort(dim=1, stable=True).indices)
    chosen = columns.gather(1, order[:, :topk])
    if rank is not None:
        answers = pad(positions, (rank * per_rank, flat.shape[1] - (rank + 1) * per_rank), value=-1)
        chosen = torch.where(chosen < 0, -1, answers.gather(1, chosen.clamp_min(0)))
    chosen = pad(chosen, (0, topk - chosen.shape[1]), value=-1)
    lens = (chosen >= 0).sum(1, dtype=torch.int32)
    return packed(chosen.sort(dim=1).values).int(), lens


def topk_to_slots(
    positions: Tensor, page_table: Tensor, *, page_size: int, row_to_request: Tensor | None = None,
    next_n: int = 1, group_size: int = 1, token_lens: Tensor | None = None, lens: Tensor | None = None,
    world_size: int = 1, rank: int = 0, interleave: int = 1, by_slot: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, out_lens, request = chosen_tokens(
        positions, len(page_table), row_to_request=row_to_request, next_n=next_n, group_size=group_size,
        token_lens=token_lens, lens=lens,
    )  # fmt: skip
    ranks = {"world_size": world_size, "rank": rank, "interleave": interleave}
    tokens = tokens if by_slot else numbers_of_rank(tokens, **ranks)
    slots = slots_of(tokens, page_table.cpu(), request, page_size, world_size << 31)
    slots = numbers_of_rank(slots, **ranks) if by_slot else slots
    slots = slots.where(slots < 1 << 31, -1)
    if world_size > 1:
        slots, out_lens = packed(slots), (slots >= 0).sum(1, dtype=torch.int32)
    return slots.int().to(positions.device), out_lens.to(positions.device)
