"""mla_fp8_hisparse in vLLM's own HiSparse of DeepSeek V3.2 and GLM-5, without a GPU (probe.py).

vLLM's index group, caches and decode run as they are; its compiled ops are not here. Attention over the hot
buffer has the bits of attention over all rows.
"""

import without_gpu

without_gpu.pretend_vllm()

import ast
import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import engine
import engine_standins
import pytest
import torch
import vllm
from vllm.config.attention import AttentionConfig, HiSparseConfig
from vllm.config.kv_transfer import KVTransferConfig, hisparse_host_pool_gib
from vllm.v1.attention.backends.mla import flashmla_sparse, index_group
from vllm.v1.hisparse import runtime

import mla_fp8
from mla_fp8 import KV_LAYOUTS, probes
from mla_fp8.compat import vllm as compat
from mla_fp8.integrations import hisparse, log, same_bits, vllm_sparse
from mla_fp8.integrations import vllm as plugin

LAYOUTS = {"fp8_ds_mla": KV_LAYOUTS["dsv32"], "bfloat16": KV_LAYOUTS["bf16"]}
BLOCK, HOST_BLOCKS, PAGES, REQUESTS, LAYERS, K, HOT, HEADS = 16, 40, 9, 4, 3, 24, 64, 8
INTS = ("region_stride", "max_union_rows", "attention_block_stride", "source_block_size",
        "resident_block_size", "resident_null_block")  # fmt: skip
REFUSED: list[str] = []  # calls that reached vLLM's own ops


def schema(name: str) -> str:
    """Of an op that takes our parameters by their names."""
    kinds = {x: "int" if x in INTS else "Tensor?" for x in probes.parameters(getattr(compat, name))}
    return f"{name}({', '.join(f'{kind} {x}' for x, kind in kinds.items())}) -> ()"


@pytest.fixture(scope="module", autouse=True)
def ops():
    """vLLM's ops as its library registers them, and what takes them over, loaded twice."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    for name in hisparse.VLLM:
        library.define(schema(name))
        library.impl(name, lambda *args, name=name: REFUSED.append(name), "CompositeExplicitAutograd")
    vllm.envs.VLLM_PLUGINS = [hisparse.NAME]
    for _ in range(2):
        hisparse.register_vllm()
    yield library


class Stream(nullcontext):
    """Everything is done at once."""

    wait_event = wait_stream = record = lambda self, *args: None


@pytest.fixture(autouse=True)
def without_streams(monkeypatch):
    empty = torch.empty

    def not_pinned(*args, pin_memory=False, **options):
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", not_pinned)
    monkeypatch.setattr(torch, "Event", Stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(runtime, "current_platform", SimpleNamespace(device_type="cpu"))
    monkeypatch.setattr(runtime, "_create_copy_stream", Stream)
    monkeypatch.setattr(index_group, "_create_side_stream", Stream)
    for module in (runtime, index_group):
        monkeypatch.setattr(module, "current_stream", Stream)
        monkeypatch.setattr(module, "in_piecewise_cudagraph", lambda: False)
    REFUSED.clear()


def test_vllm_passes_as_many_arguments_as_ours_take():
    """By position: its own calls, in its source."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(runtime))):
        name = node.func.attr if isinstance(node, ast.Call) and hasattr(node.func, "attr") else None
        if name in hisparse.VLLM:
            assert not node.keywords
            found[name] = len(node.args)
    assert found == {name: len(probes.parameters(ours)) for name, (ours, _) in hisparse.VLLM.items()}
    assert runtime._has_hisparse_ops() and hisparse.why_not_vllm() is None
    assert all(getattr(torch.ops._C_cache_ops, name).taken_over_by_mla_fp8 for name in hisparse.VLLM)


def blocks_of(cache) -> torch.Tensor:
    """Of the host, [blocks, rows, width]."""
    return cache.runtime.host_cache.view(HOST_BLOCKS, BLOCK, -1)


def test_the_step_on_a_gpu_asks_for_hisparse_as_vllm_reads_it():
    args = engine.parse(["--out", "x", "--who", "hisparse", "--hot-rows", "4096"])
    given = engine.options(args, "folder")
    transfer = KVTransferConfig(**given["kv_transfer_config"])
    assert transfer.has_connector("HiSparseConnector")
    assert hisparse_host_pool_gib(transfer) == engine.HOST_GIB
    config = AttentionConfig(**given["attention_config"])
    assert config.hisparse_config.device_buffer_size == 4096


class Server:
    """A group of layers with one indexer; each has rows on the host, and a hot buffer in a common slab."""

    def __init__(self, cache_dtype: str, drafts: int) -> None:
        self.layout, self.drafts = LAYOUTS[cache_dtype], drafts
        config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=HiSparseConfig(device_buffer_size=HOT)),
            scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=64),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts - 1, parallel_drafting=False),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        buffer = torch.zeros(64, K, dtype=torch.int32)
        builder = index_group.SparseMLAIndexGroupBuilder(buffer, REQUESTS * drafts)
        for i in range(LAYERS):
            self.group, _ = builder.register_layer(i == 0, config, head_size=576, kv_cache_dtype=cache_dtype)
        assert isinstance(self.group, index_group.HiSparseMLAIndexGroup)
        order = torch.randperm(HOST_BLOCKS - 1) + 1
        self.table = order[: REQUESTS * PAGES].view(REQUESTS, PAGES).int()
        hot_blocks = HOT // BLOCK
        blocks = torch.randperm(REQUESTS * hot_blocks + 7) + 1
        hot_table = blocks[: REQUESTS * hot_blocks].view(REQUESTS, hot_blocks).int()
        self.free = blocks[REQUESTS * hot_blocks :].tolist()
        size = BLOCK * self.layout.bytes_per_token
        slab = torch.full(((len(blocks) + 1) * LAYERS * size,), 0xFF, dtype=torch.uint8)  # NaN
        self.resident = torch.zeros(REQUESTS + 1, PAGES, dtype=torch.int32)
        self.rows = torch.randn(LAYERS, HOST_BLOCKS * BLOCK, 576).bfloat16()
        self.host = []
        for i, cache in enumerate(self.group.caches):
            given = {
                "byte_offset": i * size, "block_stride": LAYERS * size, "num_blocks": len(blocks) + 1,
                "block_size": BLOCK,
            }  # fmt: skip
            cache.runtime.bind_hot_cache(slab, block_table=hot_table, **given)
            cache.bind_cache(slab, block_table=self.resident, slot_mapping=torch.zeros(64), **given)
            self.host.append(self.layout.empty(HOST_BLOCKS, BLOCK, "cpu").fill_(0xFF))
            self.write(i, torch.arange(len(self.rows[i])))
            typed = self.host[i].view(cache.runtime.kv_dtype).view(HOST_BLOCKS, BLOCK, -1)
            cache.runtime.bind_source_cache(typed, registered_host_pool=typed)
            cache.source_block_table = self.table
        runtime.initialize_hisparse_runtime_buffers(self.group.caches, max_num_reqs=REQUESTS)
        self.states = self.group.caches[0].runtime.request_state_indices
        self.states.copy_(torch.tensor([2, 0, 3, 1]))
        kind = vllm_sparse.make_backend(plugin.__name__).get_impl_cls()
        self.layers = [kind.__new__(kind) for _ in range(LAYERS)]
        for i, impl in enumerate(self.layers):
            vars(impl).update(
                softmax_scale=0.04, dcp_world_size=1, index_group=self.group, index_group_index=i,
                num_heads=HEADS, kv_cache_dtype=cache_dtype, pcp_dcp_kv_gather=False,
                need_to_return_lse_for_decode=False,
            )  # fmt: skip

    def write(self, layer: int, slots: torch.Tensor) -> None:
        mla_fp8.quantize_kv(
            self.rows[layer][slots], slots, self.host[layer], layout=self.layout, page_size=BLOCK
        )

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        page = self.table[requests[:, None].long(), positions.clamp_min(0).long() // BLOCK]
        return (page * BLOCK + positions % BLOCK).where(positions >= 0, -1)

    def make_resident(self, request: int, page: int) -> None:
        """A page of the request on the GPU, in every layer."""
        block = self.free.pop()
        self.resident[self.states[request], page] = block
        for cache in self.group.caches:
            cache.view.cache[block] = blocks_of(cache)[self.table[request, page]]

    def prompt_beside_decode(self, request: int, prompt: int, tokens: int) -> None:
        """A token of ``request``, and the last tokens of ``prompt``, as vLLM's steps mix them."""
        order = [request, prompt, *({*range(REQUESTS)} - {request, prompt})]
        table, n = self.table[order], 1 + tokens
        rows = torch.tensor([0] + [1] * tokens).int()
        positions = torch.stack([torch.randperm(PAGES * BLOCK)[:K] for _ in range(n)]).int()
        positions[:, -5:] = -1
        plan = runtime.build_hisparse_prefill_staging_plan(
            table[1:2], torch.tensor([PAGES * BLOCK]), block_size=BLOCK, staging_block_capacity=PAGES
        )
        metadata = SimpleNamespace(
            req_id_per_token=rows, block_table=table, block_size=BLOCK, num_actual_tokens=n,
            num_decode_tokens=1, num_decodes=1, num_reqs=2, max_query_len=tokens, decode_max_query_len=1,
            query_start_loc=torch.tensor([0, 1, n], dtype=torch.int32),
            prefill=SimpleNamespace(host_staging_plan=plan), fp8_extra_metadata=None,
        )  # fmt: skip
        for cache in self.group.caches:
            cache.source_block_table, cache.all_context_pages_resident = table, False
        states = self.states.clone()
        self.states.copy_(states[order])
        self.group.prepare_for_batch(0, metadata)
        q = torch.randn(n, HEADS, 576).bfloat16()
        for i, impl in enumerate(self.layers):
            out, _ = impl._forward_fp8_kv_separate_prefill_decode(
                q, blocks_of(self.group.caches[i]), positions, metadata
            )
            page = table[rows[:, None].long(), positions.clamp_min(0).long() // BLOCK]
            slots = (page * BLOCK + positions % BLOCK).where(positions >= 0, -1)
            want, _ = mla_fp8.sparse_decode(
                q, self.host[i], slots, layout=self.layout, page_size=BLOCK, sm_scale=0.04,
                batch_invariant=True,
            )  # fmt: skip
            assert torch.equal(out, want) and want.any()
        self.states.copy_(states)

    def step(self, requests: list[int], padding: int = 0) -> None:
        """Every layer attends to as many entries that its indexer chose, and to the same bits."""
        n = len(requests) * self.drafts
        tokens = torch.tensor(requests).repeat_interleave(self.drafts).int()
        rows = torch.cat([tokens, tokens.new_zeros(padding * self.drafts)])  # of a CUDA graph
        orders = [torch.randperm(PAGES * BLOCK) for _ in rows[:: self.drafts]]
        positions = torch.stack([  # drafts choose much the same
            torch.cat([order[:18], order[18 + 6 * draft :][: K - 18]])
            for order in orders for draft in range(self.drafts)
        ]).int()  # fmt: skip
        positions[:, -2:] = -1
        made = flashmla_sparse.FlashMLASparseMetadata
        parts = made.FP8SeparatePrefillDecode(
            num_decodes=len(rows) // self.drafts, num_decode_tokens=len(rows),
            decode=made.FP8SeparatePrefillDecode.Decode(None, None, self.drafts),
        )  # fmt: skip
        metadata = SimpleNamespace(
            req_id_per_token=rows, block_table=self.table, block_size=BLOCK, num_actual_tokens=len(rows),
            num_decode_tokens=len(rows), num_decodes=parts.num_decodes, num_reqs=parts.num_decodes,
            max_query_len=self.drafts, decode_max_query_len=self.drafts, fp8_extra_metadata=parts,
            query_start_loc=torch.tensor([0, n], dtype=torch.int32), prefill=None,
        )  # fmt: skip
        self.group.prepare_for_batch(0, metadata)
        q = torch.randn(len(rows), HEADS, 576).bfloat16()
        for i, impl in enumerate(self.layers):
            cache = blocks_of(self.group.caches[i])
            if impl.kv_cache_dtype == "fp8_ds_mla":
                out, _ = impl._forward_fp8_kv_separate_prefill_decode(q, cache, positions, metadata)
            else:
                out, _ = impl._forward_bf16_kv(q, cache, positions, metadata, HEADS)
            want, _ = mla_fp8.sparse_decode(
                q, self.host[i], self.slots(rows, positions), layout=self.layout, page_size=BLOCK,
                sm_scale=0.04,
            )  # fmt: skip
            assert torch.equal(out[:n], want[:n]) and want[:n].any()


@pytest.mark.parametrize("cache_dtype", LAYOUTS)
@pytest.mark.parametrize("drafts", [1, 2])
def test_decode_over_the_hot_buffer_has_the_bits_of_decode_over_all_rows(drafts, cache_dtype):
    """Step after step, with resident pages, padding, and slots of the host that serve again."""
    torch.manual_seed(0)
    server = Server(cache_dtype, drafts)
    server.make_resident(1, 3)
    for step in range(5):
        server.step([0, 1, 2, 3] if step % 2 else [2, 0], padding=step % 2 == 0)
        written = server.slots(torch.tensor([2]), torch.arange(20)[None])[0]
        for i, cache in enumerate(server.group.caches):
            server.rows[i][written] = torch.randn(20, 576).bfloat16()
            server.write(i, written)
            if cache.runtime.is_group_leader:
                cache.runtime.invalidate_written_slots(written, torch.full((20,), 2, dtype=torch.int32))
    hits, misses = server.group.hisparse_group.swap_stats.tolist()
    assert hits > 20 and misses > 2 * HOT and not REFUSED


def test_with_the_same_bits_prompts_are_attended_to_as_all_rows_would_be(monkeypatch):
    convert = engine_standins.triton_convert_req_index_to_global_index

    def of_rows(*args, BLOCK_STRIDE_ROWS, **options):
        assert BLOCK_STRIDE_ROWS == BLOCK
        return convert(*args, **options)

    monkeypatch.setattr(flashmla_sparse, convert.__name__, of_rows)
    same_bits.switch(True)
    try:
        torch.manual_seed(0)
        server = Server("fp8_ds_mla", 1)
        server.make_resident(1, 3)
        for _ in range(2):
            server.prompt_beside_decode(2, 1, 5)
    finally:
        same_bits.switch(None)
    assert not REFUSED


def test_prompts_are_staged_by_our_copies():
    server = Server("fp8_ds_mla", 1)
    leader = server.group.caches[0]
    table = server.table[[3, 1]]
    plan = runtime.build_hisparse_prefill_staging_plan(
        table, torch.tensor([100, 9]), block_size=BLOCK, staging_block_capacity=12
    )
    typed = blocks_of(leader)
    staged = leader.runtime.gather_prefill_cache(typed, plan)
    for request, length in enumerate((100, 9)):
        for page in range(-(-length // BLOCK)):
            got = staged[plan.block_table[request, page]]
            assert torch.equal(got, typed[table[request, page]])
    assert not REFUSED


def test_what_ours_does_not_know_reaches_vllms_own_op_and_is_said(monkeypatch, caplog):
    log.say_once.cache_clear()
    monkeypatch.setattr(log, "logger", lambda: __import__("logging").getLogger("said"))
    caplog.set_level("INFO", logger="said")
    server = Server("fp8_ds_mla", 1)
    rows, counts = torch.zeros(1, K, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    odd = torch.zeros(4, 144, dtype=torch.uint8)
    gather = torch.ops._C_cache_ops.hisparse_gather_compact
    gather(odd, odd.view(1, 4, 144), rows, rows, counts)
    resident = SimpleNamespace(block_table=server.resident, view=SimpleNamespace(block_size=2 * BLOCK))
    server.group.caches[0].runtime._resolve_residency(
        resident=resident, req_id_per_token=counts, block_table=server.table, topk_indices=rows,
        block_size=BLOCK, shared_rows=slice(0, 1),
    )  # fmt: skip
    assert REFUSED == ["hisparse_gather_compact", "hisparse_resolve_residency"]
    assert [record.getMessage() for record in caplog.records] == [
        "mla_fp8: hisparse_gather_compact stays the engine's for rows of 144 bytes",
        "mla_fp8: hisparse_resolve_residency stays the engine's for resident blocks of 32 rows, "
        "of which 0 is none",
    ]


def test_a_vllm_whose_op_takes_something_else_is_refused(ops, monkeypatch):
    ops.define("another(Tensor? host_cache, int something) -> ()")
    monkeypatch.setitem(hisparse.VLLM, "another", hisparse.VLLM["hisparse_gather_compact"])
    assert hisparse.why_not_vllm() == "another takes host_cache, something (another version)"
    monkeypatch.setitem(hisparse.VLLM, "nothing", hisparse.VLLM["hisparse_gather_compact"])
    del hisparse.VLLM["another"]
    assert hisparse.why_not_vllm() == "it has no op nothing"
