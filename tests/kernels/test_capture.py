"""What a serving engine needs of ops on a GPU: its own stream, no synchronisation, no allocation, and CUDA
graphs whose replays see new lengths, slots and data. The CPU kernels say what is right.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pool_cases
import pytest
import torch

from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")

PAGE_SIZE, NUM_PAGES = 64, 9
LAYOUT = KV_LAYOUTS["dsv4"]
INDEX = INDEX_LAYOUTS["index_fp8"]


@dataclass
class Case:
    """`inputs(seed)` makes CPU tensors of the same shapes for every seed, `run` writes some: `outputs`."""

    name: str
    inputs: Callable[[int], dict[str, torch.Tensor]]
    run: Callable[[dict[str, torch.Tensor]], None]
    outputs: tuple[str, ...]
    exact: bool = True


def ints(*shape, low=0, high):
    return torch.randint(low, high, shape, dtype=torch.int32)


def poison(*shape, dtype=torch.int32):
    return torch.full(shape, 1 << 30, dtype=torch.int32).to(dtype)


def random_cache():
    return ints(NUM_PAGES, LAYOUT.page_bytes(PAGE_SIZE), high=256).to(torch.uint8)


def quantize_inputs(seed):
    torch.manual_seed(seed)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)[:100]
    slots[seed::9] = -1
    kv_cache = torch.full((NUM_PAGES, LAYOUT.page_bytes(PAGE_SIZE)), 0xA5, dtype=torch.uint8)
    return {"latent": torch.randn(100, 512).bfloat16(), "slot_mapping": slots, "kv_cache": kv_cache}


def insert_inputs(seed):
    inputs = quantize_inputs(seed)
    cos, sin = torch.rand(2, 50, 32)
    return {
        "q": torch.randn(100, 8, 512).bfloat16(),
        "kv": inputs["latent"],
        "kv_weight": torch.rand(512),
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(-2, 52, (100,)),
        "slot_mapping": inputs["slot_mapping"],
        "kv_cache": inputs["kv_cache"],
        "out_q": poison(100, 16, 512, dtype=torch.bfloat16),
    }


def query_inputs(seed):
    inputs, n = insert_inputs(seed), 100
    return {
        "positions": inputs["positions"],
        "cos": inputs["cos"],
        "sin": inputs["sin"],
        "q_pe": torch.randn(n, 16, 64).bfloat16(),
        "index_q": torch.randn(n, 64, 128).bfloat16(),
        "index_weights": torch.randn(n, 64),
        "out_q_pe": poison(n, 16, 64, dtype=torch.bfloat16),
        "out_index_q": poison(n, 64, 128, dtype=torch.float32).to(torch.float8_e4m3fn),
        "out_index_weights": poison(n, 64, dtype=torch.float32),
    }


def inverse_inputs(seed):
    inputs = insert_inputs(seed)
    more = {
        "out": poison(100, 2, 2048, dtype=torch.float32).to(torch.float8_e4m3fn),
        "out_scale": poison(100, 2, 16, dtype=torch.float32),
    }
    return {"o": inputs["q"]} | {name: inputs[name] for name in ("cos", "sin", "positions")} | more


def compress_inputs(seed):
    """Decode, verify and prefill in one call, from a state of random rows."""
    inputs = insert_inputs(seed)
    lens = torch.tensor([0, 1, 1, 5, 93]) if seed % 2 else torch.tensor([0, 40, 1, 58, 1])
    return {
        "kv_score": torch.randn(100, 2048),
        "query_start_loc": lens.cumsum(0).int(),
        "start_pos": ints(4, high=40),
        "state": torch.randn(6, 12, 2048),
        "state_slots": torch.randperm(6)[:4],
        "ape": torch.randn(4, 1024),
        "norm_weight": inputs["kv_weight"],
        "cos": inputs["cos"],
        "sin": inputs["sin"],
        "slot_mapping": inputs["slot_mapping"],
        "kv_cache": inputs["kv_cache"],
        "out_latent": poison(100, 512, dtype=torch.bfloat16),
    }


def dequantize_inputs(seed):
    torch.manual_seed(seed)
    slots = ints(100, low=-9, high=NUM_PAGES * PAGE_SIZE)
    return {"kv_cache": random_cache(), "slots": slots, "out": poison(100, 512, dtype=torch.bfloat16)}


def paged_inputs(seed):
    torch.manual_seed(seed)
    seq_lens = ints(4, high=200)
    return {
        "kv_cache": random_cache(),
        "page_table": ints(4, 4, low=-1, high=NUM_PAGES),
        "seq_lens": seq_lens,
        "gather_lens": torch.minimum(ints(4, high=50), seq_lens),
        "row_offsets": torch.arange(4, dtype=torch.int32) * 50,
        "out": poison(200, 512, dtype=torch.bfloat16),
    }


COMBINE = {"window_size": 128, "compress_ratio": 4, "topk": 64}


def combine_inputs(seed):
    torch.manual_seed(seed)
    lens = ints(3, high=40)
    seq_lens = lens + ints(3, high=900)
    return {
        "topk_indices": ints(100, 64, low=-1, high=200),
        "query_start_loc": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
        "seq_lens": seq_lens,
        "gather_lens": torch.minimum(lens + 127, seq_lens),
        "compressed_base": ints(3, high=10000),
        "swa_base": ints(3, high=10000),
    }


def dense_inputs(seed):
    return combine_inputs(seed) | {"out_indices": poison(100, 256), "out_lens": poison(100)}


def ragged_inputs(seed):
    return combine_inputs(seed) | {"out_indptr": poison(101), "out_indices": poison(100 * 192)}


def swa_inputs(seed):
    torch.manual_seed(seed)
    extend = ints(5, high=30)
    return {
        "seq_lens": extend + ints(5, high=200),
        "extend_seq_lens": extend,
        "req_pool_indices": torch.randperm(8)[:5],
        "req_to_token": ints(8, 256, high=5000),
        "full_to_swa": torch.randperm(5000),
        "out_ids": poison(900),
        "out_first_pos": poison(5),
        "out_gather_lens": poison(5),
        "out_offsets": poison(6),
    }


def pad_inputs(seed):
    torch.manual_seed(seed)
    return {
        "q": torch.randn(7, 8, 576).bfloat16(),
        "attn_sink": torch.randn(8),
        "out_q": poison(7, 64, 576, dtype=torch.bfloat16),
        "out_attn_sink": poison(64, dtype=torch.float32),
    }


def merge_inputs(seed):
    torch.manual_seed(seed)
    states = {f"out_{x}": torch.randn(7, 8, 512).bfloat16() for x in "ab"}
    states |= {f"lse_{x}": torch.randn(7, 8) for x in "ab"}
    return states | {"out": poison(7, 8, 512, dtype=torch.bfloat16), "lse": poison(7, 8, dtype=torch.float32)}


def index_key_inputs(seed):
    torch.manual_seed(seed)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)[:100]
    slots[seed::9] = -1
    cache = torch.full((NUM_PAGES, INDEX.page_bytes(PAGE_SIZE)), 0xA5, dtype=torch.uint8)
    return {"k": torch.randn(100, 128).bfloat16(), "slot_mapping": slots, "index_cache": cache}


def small(*shape):
    """Integers whose products every device sums exactly, in e4m3, as bytes."""
    return torch.randint(-2, 3, shape).to(torch.float8_e4m3fn).view(torch.uint8)


def index_inputs(seed):
    """Lengths change from call to call; logits are exact, with many ties."""
    torch.manual_seed(seed)
    scales = 2.0 ** torch.randint(-2, 3, (40, PAGE_SIZE))
    values = small(40, PAGE_SIZE * 128)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    size = torch.ops.mla_fp8.index_topk_workspace(12, 100, sms)
    return {
        "q": small(12, 64, 128),
        "weights": torch.randint(-2, 3, (12, 64)).float(),
        "index_cache": torch.cat([values, scales.view(torch.uint8).view(40, -1)], 1),
        "page_table": ints(4, 30, low=-1, high=41),
        "seq_lens": ints(4, high=[30, 1900, 700][seed]) + 1,
        "out_positions": poison(12, 100),
        "out_slots": poison(12, 100),
        "out_lens": poison(12),
        "workspace": torch.full((size,), 0xFF, dtype=torch.uint8),
    }


def index_topk(x):
    options = {"layout": INDEX.id, "page_size": PAGE_SIZE, "next_n": 3, "topk": 100}
    q = x["q"].view(torch.float8_e4m3fn)
    torch.ops.mla_fp8.index_topk_out(**{**x, "q": q}, **options)


def topk_slot_inputs(seed):
    torch.manual_seed(seed)
    return {
        "positions": ints(12, 100, low=-3, high=500),
        "page_table": ints(4, 9, low=-1, high=99),
        "token_lens": ints(12, high=500),
        "out_slots": poison(12, 403),
        "out_lens": poison(12),
    }


def op(name: str, **options):
    return lambda x: getattr(torch.ops.mla_fp8, name)(**x, **options)


CACHE, KEYS = ({"layout": x.id, "page_size": PAGE_SIZE} for x in (LAYOUT, INDEX))
CASES = [
    Case("quantize_kv", quantize_inputs, op("quantize_kv", **CACHE), ("kv_cache",)),
    Case(
        "qk_norm_rope_insert",
        insert_inputs,
        op("qk_norm_rope_insert_out", **CACHE, eps=1e-6, norm_q=True, num_heads=16),
        ("kv_cache", "out_q"),
    ),
    Case(
        "prepare_queries",
        query_inputs,
        op(
            "prepare_queries_out", index_neox=True, index_rope_first=True, hadamard=True, out_index_scale=None
        ),
        ("out_q_pe", "out_index_q", "out_index_weights"),
    ),
    Case(
        "inverse_rope_quantize",
        inverse_inputs,
        op("inverse_rope_quantize_out", num_groups=2),
        ("out", "out_scale"),
    ),
    Case("quantize_index_k", index_key_inputs, op("quantize_index_k", **KEYS), ("index_cache",)),
    Case("pool_index_k", pool_cases.inputs, op("pool_index_k", page_size=PAGE_SIZE), pool_cases.WRITTEN),
    Case("index_topk", index_inputs, index_topk, ("out_positions", "out_slots", "out_lens")),
    Case(
        "topk_to_slots",
        topk_slot_inputs,
        op("topk_to_slots_out", page_size=PAGE_SIZE, next_n=3, group_size=4),
        ("out_slots", "out_lens"),
    ),
    Case(
        "compress_kv",
        compress_inputs,
        op("compress_kv", **CACHE, ratio=4, eps=1e-6),
        ("kv_cache", "state", "out_latent"),
    ),
    Case("dequantize_kv", dequantize_inputs, op("dequantize_kv_out", **CACHE), ("out",)),
    Case("dequantize_kv_paged", paged_inputs, op("dequantize_kv_paged_out", **CACHE), ("out",)),
    Case("combine", dense_inputs, op("combine_topk_swa_indices_out", **COMBINE), ("out_indices", "out_lens")),
    Case(
        "combine_ragged",
        ragged_inputs,
        op("combine_topk_swa_indices_ragged_out", **COMBINE),
        ("out_indptr", "out_indices"),
    ),
    Case(
        "build_swa_token_ids",
        swa_inputs,
        op("build_swa_token_ids_out", window_size=128, capacity=900),
        ("out_ids", "out_first_pos", "out_gather_lens", "out_offsets"),
    ),
    Case("pad_q_heads", pad_inputs, op("pad_q_heads_out", num_heads=64), ("out_q", "out_attn_sink")),
    Case(
        "merge_attention_states", merge_inputs, op("merge_attention_states_out"), ("out", "lse"), exact=False
    ),
]
all_ops = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def on_cuda(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def assert_right(case, inputs, device_inputs, calls=1):
    """The CPU makes as many calls: compress_kv reads the state that the call before it left."""
    for _ in range(calls):
        case.run(inputs)
    for name in case.outputs:
        got, want = device_inputs[name].cpu(), inputs[name]
        if case.exact:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
        else:
            torch.testing.assert_close(got, want)


@all_ops
def test_a_graph_replay_sees_new_inputs(case):
    x = on_cuda(case.inputs(0))
    case.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(x)
    for seed in (1, 2):
        fresh = case.inputs(seed)
        for name, tensor in x.items():
            tensor.copy_(fresh[name])
        graph.replay()
        assert_right(case, fresh, x)


@all_ops
def test_a_graph_orders_an_op_behind_its_producers(case):
    """Launches overlap (programmatic dependent launch): the op still has to wait for the copies before it."""
    x, source = on_cuda(case.inputs(0)), on_cuda(case.inputs(1))
    case.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, tensor in x.items():
            tensors = source[name], tensor
            if tensor.is_floating_point():  # of which e4m3 cannot be multiplied
                tensors = [t.view(torch.uint8) for t in tensors]
            torch.mul(tensors[0], 1, out=tensors[1])  # a kernel, where copy_ would be a memcpy
        case.run(x)
        case.run(x)
    graph.replay()
    assert_right(case, case.inputs(1), x, calls=2)


@all_ops
def test_runs_on_the_callers_stream(case):
    x, late = on_cuda(case.inputs(0)), on_cuda(case.inputs(1))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # an op on any other stream would run before the inputs are there
        for name, tensor in x.items():
            tensor.copy_(late[name])
        case.run(x)
    stream.synchronize()
    assert_right(case, case.inputs(1), x)


@all_ops
def test_neither_synchronises_nor_allocates(case):
    x = on_cuda(case.inputs(0))
    case.run(x)
    torch.cuda.synchronize()
    # The portable kernel splits queries with a workspace, which it gives back.
    portable = case.name.startswith("sparse") and torch.cuda.get_device_capability()[0] != 9
    stat = "allocation.all.current" if portable else "allocation.all.allocated"
    allocations = torch.cuda.memory_stats()[stat]
    busy = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(x)
        returned_before_the_device = not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_before_the_device
    assert torch.cuda.memory_stats()[stat] == allocations


@all_ops
def test_repeats_bitwise(case):
    runs = [on_cuda(case.inputs(0)) for _ in range(3)]
    for x in runs:
        case.run(x)
    for x in runs[1:]:
        for name in case.outputs:
            assert torch.equal(x[name].view(torch.uint8), runs[0][name].view(torch.uint8))
