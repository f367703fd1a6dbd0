"""mla_fp8_hisparse in SGLang's own coordinator of HiSparse, without a GPU (probe.py): V3.2, GLM-5, V4.

SGLang's coordinator and pool run as they are; what it compiles at first use is not here. Attention over the
hot buffer has the bits of attention over all rows.
"""

import without_gpu

without_gpu.pretend_sglang()

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_hisparse"

import pytest
import sglang_engine
import spies
import torch
from matrix_steps import STEPS
from sglang.kernels.ops.kvcache import hisparse as kernels
from sglang.srt.arg_groups import hisparse_hook
from sglang.srt.managers import hisparse_coordinator
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.sparsity import factory
from sglang.srt.plugins.hook_registry import HookRegistry

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat import sglang_hisparse
from mla_fp8.integrations import hisparse, log

PAGE, HOT, K, REQUESTS, LONGEST, LAYERS, HEADS = 64, 48, 20, 5, 160, 3, 8
LAYOUTS = {name: KV_LAYOUTS[name] for name in ("dsv32", "bf16", "dsv4")}


@pytest.fixture(scope="module", autouse=True)
def plugged():
    hisparse.register_sglang()
    HookRegistry.apply_hooks()


class Stream(nullcontext):
    """Everything is done at once."""

    wait = wait_stream = record = lambda self, *args: None


@pytest.fixture(autouse=True)
def without_streams(monkeypatch):
    device = SimpleNamespace(current_stream=Stream, stream=lambda stream: stream)
    monkeypatch.setattr(hisparse_coordinator, "device_module", device)


@pytest.mark.parametrize("case", STEPS["sglang_hisparse"].cases, ids=lambda case: case.name)
def test_the_step_on_a_gpu_asks_for_hisparse_as_sglang_reads_it(case, monkeypatch):
    args = sglang_engine.parse(["--out", "x", *case.arguments()])
    given = sglang_engine.server_arguments(args, Path("folder"))
    assert given["disable_radix_cache"] and given["enable_deterministic_inference"]
    if not args.hot_rows:
        return
    is_v32 = args.kv in sglang_engine.PREFILL_BACKENDS
    memory = SimpleNamespace(hisparse_config=given["hisparse_config"])
    monkeypatch.setattr(factory, "get_memory", lambda: memory)
    found = factory.parse_hisparse_config()
    assert given["enable_hisparse"] and found.device_buffer_size == args.hot_rows
    assert found.top_k == (2048 if is_v32 else 512)
    known = hisparse_hook.HISPARSE_CUDA_DSA_BACKENDS_BY_DTYPE[given["kv_cache_dtype"]]
    assert not is_v32 or {given["dsa_prefill_backend"], given["dsa_decode_backend"]} <= known


def test_the_coordinator_and_the_pool_call_functions_that_are_ours():
    assert hisparse.why_not_sglang() is None and HookRegistry._patched >= set(hisparse.HOOKS)
    for name in ("load_cache_to_device_buffer_mla", "load_cache_to_device_buffer_dsv4_mla",
                 "copy_cache_planned_mla"):  # fmt: skip
        assert getattr(hisparse_coordinator, name) is getattr(kernels, name)
        assert hasattr(getattr(kernels, name), "__wrapped__")
    for name in ("load_cache_to_device_buffer_spec_mla", "load_blocks_to_device_buffer_mha"):
        assert not hasattr(getattr(kernels, name), "__wrapped__")


class Server:
    """Requests whose last row lies on the GPU alone; the rows of longer ones come and go."""

    def __init__(self, name: str, shared: bool) -> None:
        self.layout, self.lens, rows = LAYOUTS[name], [], REQUESTS * LONGEST
        is_dsv4 = name == "dsv4"
        host_pages = -(-rows // PAGE)
        places = torch.randperm(REQUESTS * (HOT + PAGE)).view(REQUESTS, HOT + PAGE)
        hot_pages = -(-places.numel() // PAGE)
        self.host_rows = torch.randperm(host_pages * PAGE)[:rows].view(REQUESTS, LONGEST)
        self.rows = torch.randn(LAYERS, rows, self.layout.head_dim_qk).bfloat16()
        self.whole = [self.filled(i) for i in range(LAYERS)]
        self.host = [self.layout.empty(host_pages, PAGE, "cpu").fill_(0xFF) for _ in range(LAYERS)]
        self.hot = [self.layout.empty(hot_pages, PAGE, "cpu").fill_(0xFF) for _ in range(LAYERS)]

        def pools(caches):  # as SGLang's pools have them
            return caches if is_dsv4 else [x.view(-1, 1, self.layout.bytes_per_token) for x in caches]

        c = self.coordinator = hisparse_coordinator.HiSparseCoordinator.__new__(
            hisparse_coordinator.HiSparseCoordinator
        )
        vars(c).update(
            top_k=K, device_buffer_size=HOT, swap_in_block_size=960, skip_io=False, is_dsv4_hisparse=is_dsv4,
            item_size_bytes=self.layout.bytes_per_token, enable_prefetch=shared,
            mem_pool_host=SimpleNamespace(kv_buffer=pools(self.host)),
            mem_pool_device=SimpleNamespace(kv_buffer=pools(self.hot)),
            req_device_buffer_tokens=torch.full((LAYERS, REQUESTS, HOT + PAGE), -1, dtype=torch.int32),
            req_device_buffer_token_locs=places.int().repeat(LAYERS, 1, 1),
            req_to_host_pool=torch.full((REQUESTS, LONGEST), -1),
            lru_slots=torch.arange(HOT, dtype=torch.int16).repeat(LAYERS, REQUESTS, 1),
            top_k_device_locs_buffer=torch.full((REQUESTS, K), 1 << 30, dtype=torch.int32),
            num_real_reqs=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        if shared:
            c._is_shared_index_layer = [False, True, True]
            c._prefetch_groups, c._prefetch_slot = hisparse_coordinator._build_prefetch_groups(
                c._is_shared_index_layer
            )
            c.prefetch_stream, c._prefetch_events, c._prefetch_copy_blocks = Stream(), [Stream()] * 2, 4
            c._miss_src = torch.zeros(REQUESTS, 2 * K, dtype=torch.int64)
            c._miss_dst = torch.zeros(REQUESTS, 2 * K, dtype=torch.int32)
            c._miss_count = torch.zeros(REQUESTS, dtype=torch.int32)

    def filled(self, layer: int) -> torch.Tensor:
        cache = self.layout.empty(-(-len(self.rows[layer]) // PAGE), PAGE, "cpu")
        slots = torch.arange(len(self.rows[layer]))
        mla_fp8.quantize_kv(self.rows[layer], slots, cache, layout=self.layout, page_size=PAGE)
        return cache

    def write(self, caches, request: int, positions, places) -> None:
        """Rows of the request, into every layer's cache."""
        for layer, cache in enumerate(caches):
            rows = self.rows[layer].view(REQUESTS, LONGEST, -1)[request, positions]
            mla_fp8.quantize_kv(rows, places, cache, layout=self.layout, page_size=PAGE)

    def admit(self, lengths: list[int]) -> None:
        """As staging leaves it: all rows on the host, the first ones in the hot buffer."""
        self.lens = lengths
        for r, n in enumerate(lengths):
            self.back_up(r, range(n))
            first = torch.arange(min(n, HOT))
            self.coordinator.req_device_buffer_tokens[:, r, : len(first)] = first.int()
            self.write(self.hot, r, first, self.place(r, first))

    def place(self, request: int, slots) -> torch.Tensor:
        return self.coordinator.req_device_buffer_token_locs[0, request, slots].long()

    def back_up(self, request: int, positions: range) -> None:
        at = torch.tensor(list(positions))
        self.coordinator.req_to_host_pool[request, at] = self.host_rows[request, at]
        self.write(self.host, request, at, self.host_rows[request, at])

    def grow(self) -> None:
        """A token more: its row goes to the GPU, that before it to the host."""
        for r, n in enumerate(self.lens):
            self.back_up(r, range(n - 1, n))
            slot = min(n, HOT)
            if n < HOT:
                self.coordinator.req_device_buffer_tokens[:, r, n] = n
            self.write(self.hot, r, torch.tensor([n]), self.place(r, torch.tensor([slot])))
        self.lens = [n + 1 for n in self.lens]

    def step(self, order: list[int], padding: int) -> None:
        """Layers choose entries, apart or, with a shared index, together."""
        c, real = self.coordinator, len(order)
        requests = torch.tensor(order + [order[0]] * padding)
        lens = torch.tensor([self.lens[r] for r in requests])
        c.num_real_reqs.fill_(real)
        chosen = None
        for layer in range(LAYERS):
            if chosen is None or not c.enable_prefetch:
                chosen = torch.full((len(requests), K), -1, dtype=torch.int32)
                for i, n in enumerate(lens.tolist()):
                    some = torch.randperm(n)[:K].int()
                    if n > K and i % 2:
                        some[0] = n - 1 if n - 1 not in some else some[0]
                    chosen[i, : len(some)] = some
            locs = c.swap_in_selected_pages(requests, lens, chosen, layer)
            assert (locs[real:] == -1).all()
            q = torch.randn(real, HEADS, self.layout.head_dim_qk).bfloat16()
            options = {"layout": self.layout, "page_size": PAGE, "sm_scale": 0.04}
            got, _ = mla_fp8.sparse_decode(q, self.hot[layer], locs[:real].contiguous(), **options)
            slots = chosen[:real] + requests[:real, None].int() * LONGEST
            slots = slots.where(chosen[:real] >= 0, -1)
            want, _ = mla_fp8.sparse_decode(q, self.whole[layer], slots, **options)
            assert torch.equal(got, want) and want.isfinite().all()


@pytest.mark.parametrize("name, shared", [("dsv32", False), ("dsv32", True), ("bf16", True), ("dsv4", False)])
def test_decode_over_the_hot_buffer_has_the_bits_of_decode_over_all_rows(name, shared):
    """Short requests grow beyond their buffers; with a shared index a layer plans for those behind it."""
    torch.manual_seed(0)
    server = Server(name, shared)
    server.admit([9, HOT - 2, 70, 150, HOT])
    for step in range(6):
        server.grow()
        server.step([3, 0, 2, 1, 4] if step % 2 else [2, 1, 4], padding=0 if step % 2 else 2)


def test_an_engine_says_how_many_rows_were_loaded(monkeypatch):
    coordinator = hisparse_coordinator.HiSparseCoordinator
    monkeypatch.setattr(coordinator, "request_finished", lambda self, req: None)
    monkeypatch.setattr(sglang_hisparse, "resolve_hot_rows", sglang_hisparse.resolve_hot_rows)
    spies.count_sglang_host_rows()
    server = Server("dsv4", False)
    server.admit([9, HOT - 2, 70, 150, HOT])
    server.grow()
    server.step([0, 1], padding=2)
    server.coordinator.request_finished(None)
    assert not spies.CALLS[spies.FOUND] + spies.CALLS[spies.LOADED]  # short ones are where they were written
    server.step([3, 2], padding=2)
    server.coordinator.request_finished(None)
    both = spies.CALLS[spies.FOUND], spies.CALLS[spies.LOADED]
    assert all(both) and sum(both) >= LAYERS * 2 * (K - 1)  # but the last ones


def test_rows_of_v4_go_to_the_host_and_back_by_our_copies():
    caches = [
        [torch.randint(0, 256, (3, LAYOUTS["dsv4"].page_bytes(PAGE)), dtype=torch.uint8) for _ in range(2)]
        for _ in range(2)
    ]
    device, host = caches
    pool = DeepSeekV4PagedHostPool.__new__(DeepSeekV4PagedHostPool)
    addresses = [torch.tensor([x.data_ptr() for x in side], dtype=torch.uint64) for side in caches]
    vars(pool).update(
        device_ptrs=addresses[0], data_ptrs=addresses[1], page_aligned_only=False, slot_page_size=PAGE,
        layer_num=2, layout="layer_first",
    )  # fmt: skip
    at, to = torch.randperm(3 * PAGE)[:50], torch.randperm(3 * PAGE)[:50]
    pool.backup_from_device_all_layer(None, to, at, "kernel")

    def rows(cache, slots):
        return mla_fp8.dequantize_kv(cache, slots, layout="dsv4", page_size=PAGE).view(torch.int16)

    wanted = [rows(x, at) for x in device]
    assert [torch.equal(rows(x, to), w) for x, w in zip(host, wanted, strict=True)] == [True, True]
    device[1].fill_(0xFF)
    pool.load_to_device_per_layer(None, to, at, 1, "kernel")
    assert torch.equal(rows(device[1], at), wanted[1])


def test_what_ours_does_not_know_reaches_sglangs_own_kernel_and_is_said(monkeypatch, caplog):
    log.say_once.cache_clear()
    monkeypatch.setattr(log, "logger", lambda: logging.getLogger("said"))
    caplog.set_level("INFO", logger="said")
    calls = []
    for name, function in (
        ("_jit_sparse_module", "load_cache_to_device_buffer"),
        ("_jit_copy_planned_module", "copy_cache_planned"),
    ):
        module = SimpleNamespace(**{function: lambda *args, name=name: calls.append(name)})
        monkeypatch.setattr(kernels, name, lambda *args, module=module, **options: module)
    server = Server("dsv32", True)
    server.admit([70] * REQUESTS)
    c = server.coordinator
    c.item_size_bytes = 99
    server.coordinator.swap_in_selected_pages(
        torch.arange(2), torch.tensor([70, 70]), torch.zeros(2, K).int(), 0
    )
    c.is_dsv4_hisparse, c.item_size_bytes = True, 99
    c._run_swap_in_kernel(torch.arange(2), torch.tensor([70, 70]), torch.zeros(2, K).int(), 0)
    assert calls == ["_jit_sparse_module", *["_jit_copy_planned_module"] * 2, "_jit_sparse_module"]
    assert [record.getMessage() for record in caplog.records] == [
        "mla_fp8: load_cache_to_device_buffer_mla stays the engine's for rows of 99 bytes",
        "mla_fp8: copy_cache_planned_mla stays the engine's for rows of 99 bytes",
        "mla_fp8: load_cache_to_device_buffer_dsv4_mla stays the engine's for entries of 99 bytes in pages "
        f"of {LAYOUTS['dsv32'].bytes_per_token}",
    ]


def test_an_sglang_whose_function_takes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "copy_cache_planned_mla", lambda *, miss_src, something: None)
    assert hisparse.why_not_sglang() == "copy_cache_planned_mla takes something, which ours does not"
