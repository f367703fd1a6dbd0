"""SGLang's HiSparse by its own signatures, against a plain model of what the engine relies on.

Tests whose names begin with `not_again` stand for answers that went wrong in an engine.
"""

import pytest
import torch
from hisparse_cases import POISON, bytes_at, host_memory, ints, model_step, picks

from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import sglang

V32, V4 = KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]


class Sglang:
    """One layer. Host rows, device rows and positions are numbered apart."""

    REQUESTS, K, HOT, CONTEXT = 3, 5, 9, 60

    def __init__(self, device, dsv4):
        self.device, self.dsv4 = device, dsv4
        self.layout, self.page = (V4, 64) if dsv4 else (V32, 1)
        size = self.layout.page_bytes(self.page)
        self.host = host_memory(256 // self.page, size, device)
        self.buffer = torch.zeros(128 // self.page, size, dtype=torch.uint8, device=device)
        self.locs = torch.randperm(127)[: self.REQUESTS * (self.HOT + 4)].view(self.REQUESTS, -1).int() + 1
        self.host_locs = torch.randperm(256)[: self.REQUESTS * self.CONTEXT].view(self.REQUESTS, -1)
        self.tokens = torch.full((self.REQUESTS, self.HOT + 4), -1, dtype=torch.int32, device=device)
        self.order = torch.arange(self.HOT, dtype=torch.int16, device=device).repeat(self.REQUESTS, 1)
        self.model = [([-1] * self.HOT, list(range(self.HOT))) for _ in range(self.REQUESTS)]
        self.plan = (
            torch.full((4, 8), POISON, dtype=torch.int64, device=device),
            torch.full((4, 8), POISON, dtype=torch.int32, device=device),
            torch.full((4,), POISON, dtype=torch.int32, device=device),
        )

    def write(self, request, position, device_row):
        """The row of a position lies on the GPU before it is in the host cache alone."""
        page, i = divmod(int(self.host_locs[request, position]), self.page)
        to, j = divmod(device_row, self.page)
        stride, tail = self.layout.token_stride, 0 if self.layout.scale_inline else self.layout.scale_bytes
        self.buffer[to, j * stride : (j + 1) * stride] = self.host[page, i * stride : (i + 1) * stride]
        a, b = self.page * stride + i * tail, self.page * stride + j * tail
        self.buffer[to, b : b + tail] = self.host[page, a : a + tail]

    def load(self, positions, requests, lens, real, wide=torch.int64, **options):
        out = torch.full((4, self.K + 2), POISON, dtype=torch.int32, device=self.device)
        forms = (sglang.load_cache_to_device_buffer_mla, sglang.load_cache_to_device_buffer_dsv4_mla)
        function = forms[self.dsv4]
        function(
            ints(positions, self.device), self.tokens, self.host_locs.to(self.device),
            self.locs.to(self.device), self.host, self.buffer, out[:, : self.K],
            ints(requests, self.device, wide),
            ints(lens, self.device), self.order, self.layout.bytes_per_token, self.K, self.HOT,
            num_real_reqs=ints([real], self.device), **options,
        )  # fmt: skip
        if self.device == "cuda":
            torch.cuda.synchronize()
        assert (out[:, self.K :] == POISON).all()
        return out[:, : self.K].tolist()

    def check(self, positions, requests, lens, real, rows):
        for i, row in enumerate(rows):
            if i >= real:
                assert row == [-1] * self.K
                continue
            request, length, locs = requests[i], lens[i], self.locs[requests[i]].tolist()
            inside = [p for p in positions[i] if 0 <= p < length]
            want = {p: locs[p] for p in inside} if length <= self.HOT else {length - 1: locs[self.HOT]}
            if length > self.HOT:
                keys = [p for p in inside if p != length - 1]
                held, order = self.model[request]
                slots, _ = model_step(keys, held, order)
                want |= {p: locs[slot] for p, slot in slots.items()}
                assert self.tokens[request, : self.HOT].tolist() == held
                assert self.order[request].tolist() == order
            assert row == [want.get(p, -1) if p in inside else -1 for p in positions[i]]
            for p in inside:
                got = bytes_at(self.buffer, self.layout, self.page, want[p])
                assert got == bytes_at(self.host, self.layout, self.page, int(self.host_locs[request, p]))


@pytest.mark.parametrize("dsv4", [False, True], ids=["V3.2", "V4"])
@pytest.mark.parametrize("planned", [False, True])
def test_sglang_requests_grow_past_the_buffer(planned, dsv4, device):
    """Short ones hold position p in slot p; of long ones the newest lies behind. Host rows are others."""
    world = Sglang(device, dsv4)
    for length in range(3, 30, 3):
        lens = [length, length + 20, max(length - 4, 1), 5]
        requests = [2, 0, 1, 1]
        for i in range(3):
            locs = world.locs[requests[i]].tolist()
            short = lens[i] <= world.HOT
            for p in range(lens[i]) if short else [lens[i] - 1]:
                world.write(requests[i], p, locs[p if short else world.HOT])
            if short:
                world.tokens[requests[i], : lens[i]] = torch.arange(lens[i])
                world.model[requests[i]][0][: lens[i]] = range(lens[i])
        positions = [p + [-1] * (5 - len(p)) for p in (torch.randperm(n)[:5].tolist() for n in lens)]
        positions[1][2] = -1
        plan = dict(zip(("miss_src", "miss_dst", "miss_count"), world.plan, strict=True)) if planned else {}
        rows = world.load(positions, requests, lens, 3, **plan)
        if planned:
            assert world.plan[2].tolist()[3] == 0
        world.check(positions, requests, lens, 3, rows)


@pytest.mark.parametrize("dsv4", [False, True], ids=["V3.2", "V4"])
def test_sglang_replays_a_plan_for_other_layers(dsv4, device):
    world, other = Sglang(device, dsv4), Sglang(device, dsv4)
    plan = dict(zip(("miss_src", "miss_dst", "miss_count"), world.plan, strict=True))
    world.load(picks(4, 5, 40), [0, 1, 2, 0], [50, 60, 41, 50], 3, torch.int32, skip_io=True, **plan)
    assert not world.buffer.any()
    world.plan[2][3] = 8  # rows of padding: what an earlier step left
    sglang.copy_cache_planned_mla(
        **plan, num_real_reqs=ints([3], device), host_cache=other.host, device_buffer=other.buffer,
        item_size_bytes=other.layout.bytes_per_token, is_dsv4_layout=dsv4, num_blocks=1,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    source, target, counts = (x.tolist() for x in world.plan)
    assert sum(counts[:3]) == 15
    for a, b, n in list(zip(source, target, counts, strict=True))[:3]:
        for s, t in zip(a[:n], b[:n], strict=True):
            assert bytes_at(other.buffer, other.layout, other.page, t) == bytes_at(
                other.host, other.layout, other.page, s
            )


def test_not_again_a_planned_copy_leaves_rows_behind_its_grid(device):
    """There are more rows than warps of the grid."""
    rows = 700
    host = host_memory(rows, V32.bytes_per_token, device)
    buffer = torch.zeros(rows, V32.bytes_per_token, dtype=torch.uint8, device=device)
    at = torch.randperm(rows, device=device).view(350, 2)
    sglang.copy_cache_planned_mla(
        miss_src=at, miss_dst=at.int(), miss_count=torch.full((350,), 2, dtype=torch.int32, device=device),
        num_real_reqs=ints([350], device), host_cache=host, device_buffer=buffer,
        item_size_bytes=V32.bytes_per_token, num_blocks=1, block_size=512,
    )  # fmt: skip
    assert torch.equal(buffer.cpu(), host)


def test_sglang_moves_rows_between_addresses(device):
    world = [Sglang(device, True) for _ in range(2)]
    source, target = torch.randperm(256)[:40], torch.randperm(128)[:40]
    want = [
        {int(t): bytes_at(w.host, V4, 64, int(s)) for s, t in zip(source, target, strict=True)} for w in world
    ]
    pointers = [torch.tensor([x.data_ptr() for x in xs], dtype=torch.uint64, device=device)
                for xs in ([w.host for w in world], [w.buffer for w in world])]  # fmt: skip
    sglang.transfer_cache_dsv4_mla(*pointers, source.to(device), target.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    for w, rows in zip(world, want, strict=True):
        for row in range(128):
            assert bytes_at(w.buffer, V4, 64, row) == rows.get(row, bytes(V4.bytes_per_token))


def test_sglangs_names_are_in_its_errors():
    world = Sglang("cpu", False)
    with pytest.raises(RuntimeError, match=r"lru_slots must have dtype torch.int16, got torch.float32"):
        world.order = world.order.float()
        world.load(picks(4, 5, 40), [0, 1, 2, 0], [50, 60, 41, 50], 3)
