"""resolve_hot_rows and copy_host_rows: rows in pinned host memory, a hot buffer on the GPU.

Cases are steps of requests whose entries change by a share. With SGLang installed its kernel, which looks up
and copies in one launch, runs on the same entries; a plain copy of the same rows is the ceiling.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS

K, HOT, CONTEXT, STEPS = 2048, 4096, 32768, 24


def steps_of(requests: int, missing: float, device: str) -> list[Tensor]:
    """Entries of each step, a window that moves on a ring: what returns has left the buffer long before."""
    order = torch.stack([torch.randperm(CONTEXT) for _ in range(requests)])
    shift, found = int(K * missing), []
    ring = STEPS * shift if shift else K
    assert not shift or HOT < ring <= CONTEXT
    for step in range(STEPS):
        columns = (torch.arange(K) + step * shift) % ring
        found.append(order[:, columns].sort(1).values.int().to(device))
    return found


class Server:
    """Host rows, hot rows and the state of one index group."""

    def __init__(self, requests: int, layout: str, page: int, device: str) -> None:
        self.layout, self.page, self.device = KV_LAYOUTS[layout], page, device
        pages = requests * CONTEXT // page
        self.host = self.layout.empty(
            min(pages, (1 << 32) // self.layout.page_bytes(page)), page, "cpu"
        ).zero_()
        if device == "cuda":
            self.host = self.host.pin_memory()
        self.hot = self.layout.empty(requests * (HOT + 64) // 64, 64, device).zero_()
        self.held = torch.full((requests, HOT), -1, dtype=torch.int32, device=device)
        self.order = torch.arange(HOT, dtype=torch.int16, device=device).repeat(requests, 1)
        self.table = (torch.randperm(pages) % len(self.host)).view(requests, -1).int().to(device)
        self.hot_table = torch.arange(requests * HOT // 64, device=device).view(requests, -1).int()
        shape = (requests, K)
        self.out = {
            name: torch.full(shape, -1, dtype=torch.int32, device=device)
            for name in ("out_hot_rows", "out_miss_host_rows", "out_miss_hot_rows")
        }
        self.out["out_miss_counts"] = torch.zeros(requests, dtype=torch.int32, device=device)

    def resolve(self, entries: Tensor) -> None:
        mla_fp8.resolve_hot_rows(
            entries, self.held, self.order, self.table, self.hot_table,
            num_host_rows=len(self.host) * self.page, host_page_size=self.page, hot_page_size=64,
            by_entry=True, **self.out,
        )  # fmt: skip

    def copy(self) -> None:
        mla_fp8.copy_host_rows(
            self.host, self.hot, self.out["out_miss_host_rows"], self.out["out_miss_hot_rows"],
            self.out["out_miss_counts"], layout=self.layout, host_page_size=self.page, hot_page_size=64,
        )  # fmt: skip


def sglang_step(requests: int, server: Server, entries: list[Tensor]) -> list[Callable[[], None]]:
    """SGLang's kernel on a state of its own, over the same memory; none where it is not installed."""
    if importlib.util.find_spec("sglang") is None or server.layout.name != "dsv32":
        return []
    theirs = importlib.import_module("sglang.kernels.ops.kvcache.hisparse")

    device, item = server.device, server.layout.bytes_per_token
    tokens = torch.full((requests, HOT + 64), -1, dtype=torch.int32, device=device)
    locs = torch.arange(requests * (HOT + 64), device=device).view(requests, -1).int()
    host_locs = (
        server.table.long()[:, :, None] * server.page + torch.arange(server.page, device=device)
    ).flatten(1)
    order = torch.arange(HOT, dtype=torch.int16, device=device).repeat(requests, 1)
    out = torch.full((requests, K), -1, dtype=torch.int32, device=device)
    ids = torch.arange(requests, device=device)
    lens = torch.full((requests,), CONTEXT + 1, device=device)
    real = torch.tensor([requests], dtype=torch.int32, device=device)
    host, hot = server.host.view(-1, item), server.hot.view(-1, item)

    def call(step: Tensor) -> None:
        theirs.load_cache_to_device_buffer_mla(
            step, tokens, host_locs, locs, host, hot, out, ids, lens, order, item, K, HOT, page_size=64,
            block_size=1024, num_real_reqs=real,
        )  # fmt: skip

    return [lambda step=step: call(step) for step in entries]


def both(requests: int, missing: float, layout: str, device: str) -> Work:
    """Look up and copy."""
    server, entries = Server(requests, layout, 64, device), steps_of(requests, missing, device)

    def call(step: Tensor) -> None:
        server.resolve(step)
        server.copy()

    for step in entries:
        call(step)
    rows = int(requests * K * missing)
    source = torch.randint(0, len(server.host) * 64, (rows,), device=device)
    target = torch.randperm(len(server.hot) * 64, device=device)[:rows]

    def plain() -> None:
        mla_fp8.copy_host_rows(
            server.host, server.hot, source, target, layout=server.layout, host_page_size=64, hot_page_size=64
        )

    baselines = {"copy of as many rows": [plain] * len(entries)} if rows else {}
    if theirs := sglang_step(requests, server, entries):
        baselines["sglang"] = theirs
    return Work(
        f"{layout} requests={requests} misses={missing:.0%}",
        [lambda step=step: call(step) for step in entries],
        2 * rows * server.layout.bytes_per_token,
        baselines=baselines,
    )


def resolve_alone(requests: int, missing: float, device: str) -> Work:
    server, entries = Server(requests, "dsv32", 64, device), steps_of(requests, missing, device)
    for step in entries:
        server.resolve(step)
    num_bytes = requests * (8 * K + 8 * HOT)
    calls = [lambda step=step: server.resolve(step) for step in (entries if missing else entries[:1])]
    return Work(f"resolve requests={requests} misses={missing:.0%}", calls, num_bytes)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    works = [lambda n=n, m=m: resolve_alone(n, m, device) for n in (1, 8, 32, 64) for m in (0.0, 0.2)]
    works += [lambda n=n, m=m: both(n, m, "dsv32", device) for n in (1, 2, 8, 32, 64) for m in (0.1, 0.2)]
    works += [lambda n=n, x=x: both(n, 0.2, x, device) for n in (1, 32) for x in ("dsv4", "dsv41_fp4")]
    run("resolve_hot_rows", (make() for make in works))
