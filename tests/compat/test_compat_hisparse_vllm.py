"""vLLM's HiSparse by its own signatures, against a plain model of what the engine relies on.

Tests whose names begin with `not_again` stand for answers that went wrong in an engine.
"""

import pytest
import torch
from hisparse_cases import POISON, host_memory, ints, model_step, picks

from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import vllm

V32 = KV_LAYOUTS["dsv32"]


class Vllm:
    """The state of an index group, its layers' caches, and what has to be found in them."""

    BLOCK, HOST_BLOCKS, REQUESTS, K, HOT = 4, 40, 4, 6, 20

    def __init__(self, device, layers=1):
        self.device, rows = device, self.HOST_BLOCKS * self.BLOCK
        self.host = [host_memory(rows, V32.bytes_per_token, device) for _ in range(layers)]
        pages = self.REQUESTS * self.HOT // self.BLOCK + 9  # the last ones are resident pages
        pool = torch.zeros(pages, layers, self.BLOCK, V32.bytes_per_token, dtype=torch.uint8, device=device)
        self.hot = [pool[:, i] for i in range(layers)]  # blocks of the layers lie between each other
        order = torch.randperm(pages - 9)[: self.REQUESTS * self.HOT // self.BLOCK]
        self.hot_table = order.view(self.REQUESTS, -1).int().to(device)
        self.held = torch.full((self.REQUESTS + 1, self.HOT), -1, dtype=torch.int32, device=device)
        self.order = torch.arange(self.HOT, dtype=torch.int16, device=device).repeat(self.REQUESTS + 1, 1)
        self.blocks = (
            torch.randperm(self.HOST_BLOCKS - 1)[: self.REQUESTS * 9].view(self.REQUESTS, 9) + 1
        ).int()
        self.resident = torch.zeros(self.REQUESTS + 1, 9, dtype=torch.int32)  # of states
        self.states = [3, 0, 4, -1]
        self.model = {s: ([-1] * self.HOT, list(range(self.HOT))) for s in range(self.REQUESTS + 1)}
        self.stats = torch.zeros(2, dtype=torch.uint64, device=device)
        self.union = 2 * self.K

    def resolve(self, positions, request_ids):
        rows = len(positions)
        out = {
            name: torch.full((rows, self.K), POISON, dtype=torch.int32, device=self.device)
            for name in ("hot", "attention", "host_rows", "hot_rows")
        }
        out |= {
            name: torch.full((rows,), POISON, dtype=torch.int32, device=self.device)
            for name in ("valid", "counts")
        }
        vllm.hisparse_resolve_residency(
            self.host[0], self.hot[0], self.hot_table, ints(positions, self.device), out["hot"],
            self.held, self.order, ints(self.states, self.device), self.HOT, self.union, None, self.stats,
            out["attention"],
            11, ints(request_ids, self.device), self.blocks.to(self.device), self.BLOCK, None, out["valid"],
            out["host_rows"], out["hot_rows"], out["counts"], self.resident.to(self.device), self.BLOCK, 0,
        )  # fmt: skip
        return out

    def swap(self, out):
        for host, hot in zip(self.host, self.hot, strict=True):
            vllm.hisparse_gather_compact(host, hot, out["host_rows"], out["hot_rows"], out["counts"])
        if self.device == "cuda":
            torch.cuda.synchronize()

    def slot(self, request, position):
        return int(self.blocks[request, position // self.BLOCK]) * self.BLOCK + position % self.BLOCK

    def check(self, positions, request_ids, out):
        """Rows of one request follow each other."""
        self.swap(out)
        for request in dict.fromkeys(request_ids):
            rows = [i for i, r in enumerate(request_ids) if r == request]
            state = self.states[request] if request >= 0 else -1
            chosen = [
                (i, c, p, self.slot(request, p)) for i in rows for c, p in enumerate(positions[i])
                if p >= 0 and state >= 0
            ]  # fmt: skip
            cached = [s for _, _, p, s in chosen if not self.resident[state, p // self.BLOCK]]
            held, order = self.model[state] if state >= 0 else ([], [])
            slots, loads = model_step(cached, held, order)
            counts = [int(out["counts"][i]) for i in rows]
            assert counts == [max(0, min(self.K, len(loads) - i * self.K)) for i in range(len(rows))]
            planned = [x for i, n in zip(rows, counts, strict=True) for x in out["host_rows"][i, :n].tolist()]
            assert planned == loads
            for i in rows:
                valid = [p for j, _, p, _ in chosen if j == i]
                assert int(out["valid"][i]) == len(valid)
            found = {(i, c): (p, s) for i, c, p, s in chosen}
            for i in rows:
                for c in range(self.K):
                    at = int(out["hot"][i, c])
                    apart = at // self.BLOCK * 11 + at % self.BLOCK if at >= 0 else -1
                    assert int(out["attention"][i, c]) == apart
                    if (i, c) not in found:
                        assert at == -1
                        continue
                    p, s = found[i, c]
                    page = int(self.resident[state, p // self.BLOCK])
                    if page:
                        assert at == page * self.BLOCK + p % self.BLOCK
                        continue
                    block, row = divmod(slots[s], self.BLOCK)
                    assert at == int(self.hot_table[request, block]) * self.BLOCK + row
                    for host, hot in zip(self.host, self.hot, strict=True):
                        assert torch.equal(hot[at // self.BLOCK, at % self.BLOCK].cpu(), host[s])
            if state >= 0:
                assert self.held[state].tolist() == held and self.order[state].tolist() == order


def test_vllm_step_after_step_with_drafts_resident_pages_and_padding(device):
    world = Vllm(device, layers=2)
    world.resident[3, 2], world.resident[4, 0] = 21, 24  # of requests 0 and 2
    for step in range(6):
        ids = [0, 0, 1, 2, 2, -1, 3]
        positions = picks(7, 6, 36)
        positions[1] = [*positions[0][:4], -1, -1] if step % 2 else positions[1]
        world.check(positions, ids, world.resolve(positions, ids))
    assert world.stats.tolist()[1] > 2 * world.HOT


def test_not_again_layers_overwrite_each_other(device):
    """Without a layer's own offset the layers of a pool write the same rows."""
    world = Vllm(device, layers=3)
    positions = picks(1, 6, 36)
    out = world.resolve(positions, [1])
    for host, hot in zip(world.host, world.hot, strict=True):
        vllm.hisparse_gather_compact(host, hot, out["host_rows"], out["hot_rows"], out["counts"])
    rows = out["hot"][0].tolist()
    got = [[bytes(hot[r // 4, r % 4].cpu().numpy()) for r in rows] for hot in world.hot]
    assert got == [[bytes(h[world.slot(1, p)].numpy()) for p in positions[0]] for h in world.host]
    assert got[0] != got[1] != got[2]


def test_not_again_a_slot_that_serves_again_gives_the_old_row(device):
    world = Vllm(device)
    world.check(p := picks(1, 6, 36), [2], world.resolve(p, [2]))
    slot = world.slot(2, p[0][0])
    world.host[0][slot] ^= 255
    vllm.hisparse_invalidate_written_slots(
        world.held, ints(world.states, device), ints([-1, 2, 1, 9, 3], device),
        ints([slot, slot, slot, slot, slot], device, torch.int64),
    )  # fmt: skip
    held, _ = world.model[world.states[2]]
    held[held.index(slot)] = -1
    world.check(p, [2], world.resolve(p, [2]))


def test_not_again_padding_rows_keep_what_they_held(device):
    world = Vllm(device)
    before = world.held.clone(), world.order.clone()
    out = world.resolve(picks(3, 6, 36), [-1, 3, 7])
    for name in ("hot", "attention"):
        assert (out[name] == -1).all()
    assert out["counts"].tolist() == out["valid"].tolist() == [0, 0, 0]
    assert torch.equal(world.held, before[0]) and torch.equal(world.order, before[1])


def test_not_again_a_spoilt_order_writes_elsewhere(device):
    world = Vllm(device)
    world.order[0, :6] = torch.tensor([-1, world.HOT, 32767, -(1 << 15), 99, 20], dtype=torch.int16)
    memory = world.hot[0].clone()
    out = world.resolve(picks(1, 6, 36), [1])
    world.swap(out)
    assert out["hot"].tolist() == [[-1] * 6] and torch.equal(world.hot[0], memory)
    assert out["counts"].tolist() == [6] and out["hot_rows"].tolist() == [[-1] * 6]


def test_vllm_gathers_by_a_mask(device):
    world = Vllm(device)
    source, target = torch.randint(0, 160, (2, 9)), torch.randperm(80)[:18].view(2, 9)
    mask = torch.randint(0, 2, (2, 9))
    attention = torch.full((2, 9), POISON, dtype=torch.int32, device=device)
    target[0, 2], source[0, 3] = -1, 160
    mask[0, 3] = 1
    vllm.hisparse_gather_plan(
        world.host[0], world.hot[0], source.int().to(device), target.int().to(device), mask.int().to(device),
        ints([2, -1], device), attention, 7,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    for row in range(2):
        for s, t, m in zip(source[row].tolist(), target[row].tolist(), mask[row].tolist(), strict=True):
            got = world.hot[0][t // 4, t % 4].cpu()
            wanted = row == 0 and m and t >= 0
            zeros = torch.zeros_like(got)
            assert torch.equal(got, world.host[0][s] if wanted and s < 160 else zeros)
    want = [[t // 4 * 7 + t % 4 if t >= 0 else -1 for t in target[0].tolist()], [-1] * 9]
    assert attention.tolist() == want


@pytest.mark.parametrize(
    "change, message",
    [
        ({"resident_null_block": 1}, "resident blocks must have 4 rows and 0 for none, got 4 and 1"),
        ({"region_stride": 19}, "region_stride must be 20, the columns of device_global_indices, got 19"),
        ({"miss_mask": torch.zeros(1)}, "miss_mask must be None, got a tensor"),
        ({"swap_counts": None}, "expected all swap buffers, got None for one"),
        (
            {"global_indices": torch.zeros(1, 6)},
            "global_indices must have dtype torch.int32, got torch.float32",
        ),
        ({"lru_slots": torch.zeros(5, 20)}, "lru_slots must have dtype torch.int16, got torch.float32"),
    ],
)
def test_vllms_names_are_in_its_errors(change, message):
    world, rows = Vllm("cpu"), torch.zeros(1, 6, dtype=torch.int32)
    given = {
        "host_cache": world.host[0], "hot_cache": world.hot[0], "hot_block_table": world.hot_table,
        "global_indices": rows, "hot_indices": rows.clone(), "device_global_indices": world.held,
        "lru_slots": world.order, "request_state_indices": ints(world.states, "cpu"), "region_stride": 20,
        "max_union_rows": 12, "miss_mask": None, "stats": None, "attention_indices": None,
        "attention_block_stride": 4, "request_ids": ints([0], "cpu"), "source_block_table": world.blocks,
        "source_block_size": 4, "resolved_global_indices": None, "valid_counts": None,
        "swap_host_physical_rows": rows.clone(), "swap_device_physical_rows": rows.clone(),
        "swap_counts": ints([0], "cpu"), "resident_block_table": world.resident, "resident_block_size": 4,
        "resident_null_block": 0,
    }  # fmt: skip
    with pytest.raises((RuntimeError, ValueError), match=message.replace("[", r"\[")):
        vllm.hisparse_resolve_residency(**given | change)
