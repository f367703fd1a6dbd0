"""Every public function under torch.compile: one graph, the same bits, arguments written in place."""

import copy
import inspect

import pytest
import torch
from assertions import assert_same
from op_samples import (
    LAYOUT,
    SAMPLES,
    Size,
    index_workspace,
    layout_id,
    sparse_prefill_entries,
    tensors_of,
)

import mla_fp8
from mla_fp8.compat import aiter, flash_mla, sglang


def clones(values):
    """Copies with the same strides."""
    return [copy.deepcopy(x) for x in values]


SIZES = (Size(), Size(num_tokens=4, heads=12, topk=24), Size(num_tokens=8, heads=32, topk=40))
ENGINES_NAME = {"layout": "fp8_ds_mla"}


def engines_name(op):
    """The op as an engine calls it, which has another name for the layout."""

    def sample(device, size):
        tensors, options = SAMPLES[op](device, size)
        return tensors, options | ENGINES_NAME

    return getattr(mla_fp8, op), sample


def flash_mla_decode(device, size):
    (q, cache, indices), options = SAMPLES["sparse_decode"](device, size)
    pages = mla_fp8.KV_LAYOUTS[LAYOUT].flash_mla_view(cache, options["page_size"])
    extra = {"extra_k_cache": pages, "extra_indices_in_kvcache": indices[:, None]}
    arguments = (q[:, None], pages, None, None, 512, None)
    return arguments, extra | {"is_fp8_kvcache": True, "indices": indices[:, None]}


def flash_mla_prefill(device, size):
    (q, kv, indices), _ = SAMPLES["sparse_prefill"](device, size)
    return (q, kv[:, None], indices[:, None], 0.04), {}


def aiter_ragged(device, size):
    (q, k, v, indptr, pages, last), options = SAMPLES["paged_attention_ragged"](device, size)
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    caches = (torch.empty_like(q), workspace, q, k, v)
    rest = (k.shape[1], 4, None, "auto", "NHD", 0.0, None, None)
    return (*caches, options["sm_scale"], indptr, pages, last, *rest), {}


def sglang_combine(device, size):
    tensors, options = SAMPLES["combine_topk_swa_indices"](device, size)
    return tensors, options


def sglang_build(device, size):
    tensors, options = SAMPLES["build_swa_token_ids"](device, size)
    return (*tensors, options["window_size"], options["capacity"]), {}


def sglang_dequantize(device, size):
    (cache, slots), options = SAMPLES["dequantize_kv"](device, size)
    return (cache, slots, options["page_size"]), {}


FUNCTIONS = {name: (getattr(mla_fp8, name), sample) for name, sample in SAMPLES.items()} | {
    "sparse_prefill_window-entries": (mla_fp8.sparse_prefill_window, sparse_prefill_entries),
    "engines_name-sparse_decode": engines_name("sparse_decode"),
    "engines_name-sparse_prefill_paged": engines_name("sparse_prefill_paged"),
    "engines_name-sparse_prefill_window": engines_name("sparse_prefill_window"),
    "flash_mla_with_kvcache": (flash_mla.flash_mla_with_kvcache, flash_mla_decode),
    "flash_mla_sparse_fwd": (flash_mla.flash_mla_sparse_fwd, flash_mla_prefill),
    "aiter-paged_attention_ragged": (aiter.paged_attention_ragged, aiter_ragged),
    "sglang-combine_topk_swa_indices": (sglang.combine_topk_swa_indices, sglang_combine),
    "sglang-build_swa_token_ids": (sglang.build_swa_token_ids, sglang_build),
    "sglang-dequantize_k_cache_paged": (sglang.dequantize_k_cache_paged, sglang_dequantize),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(7)
def test_fullgraph_gives_the_same_at_every_size_in_one_process(name, dynamic, device):
    """Tokens, heads, widths and lengths change from call to call."""
    function, sample = FUNCTIONS[name]
    torch._dynamo.reset()
    # aot_eager: functionalisation and the fakes, without a C++ compiler at test time
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in SIZES:
        tensors, options = sample(device, size)
        eager, traced = clones(tensors), clones(tensors)
        want, got = function(*eager, **options), compiled(*traced, **options)
        assert_same(got, want)
        assert_same(tensors_of(traced), tensors_of(eager))


def out_form(name, device):
    """(torch.ops.mla_fp8.<name>_out, arguments for it with buffers of the right shapes)."""
    op, wrapper = getattr(torch.ops.mla_fp8, f"{name}_out").default, getattr(mla_fp8, name)
    tensors, options = SAMPLES[name](device)
    given = dict(zip(inspect.signature(wrapper).parameters, tensors, strict=False)) | options
    if "layout" in given:
        given["layout"] = layout_id(given["layout"])
    results = wrapper(*clones(tensors), **options)
    results = [results] if isinstance(results, torch.Tensor) else results
    schema = op._schema.arguments
    written = [a.name for a in schema if a.alias_info is not None and a.name not in given]
    buffers = [torch.full_like(x, 1, memory_format=torch.contiguous_format) for x in results]
    given |= dict(zip(written, buffers, strict=False))
    if device == "cuda" and name.startswith("index_topk"):
        given["workspace"] = index_workspace(tensors, options, device)
    return op, {a.name: given[a.name] for a in schema if a.name in given}


@pytest.mark.parametrize("name", [x for x in SAMPLES if hasattr(torch.ops.mla_fp8, f"{x}_out")])
def test_an_out_form_is_one_graph_and_writes_the_same(name, device):
    """Into contiguous buffers: torch traces no others by the name of ``out``."""
    op, given = out_form(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    eager, traced = copy.deepcopy(given), copy.deepcopy(given)
    op(**eager)
    compiled(**traced)
    for key in given:
        if isinstance(given[key], torch.Tensor) and key != "workspace":
            assert_same(traced[key], eager[key])


def test_one_dynamic_graph_serves_every_number_of_tokens(device):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def roundtrip(latent, slots, kv_cache):
        mla_fp8.quantize_kv(latent, slots, kv_cache, layout="dsv4", page_size=4)
        return mla_fp8.dequantize_kv(kv_cache, slots, layout="dsv4", page_size=4)

    torch._dynamo.reset()
    compiled = torch.compile(roundtrip, fullgraph=True, dynamic=True, backend=count)
    (latent, _, kv_cache), _ = SAMPLES["quantize_kv"](device)
    for n in (2, 3, 5):
        slots = torch.arange(n, device=device)
        other = kv_cache.clone()
        assert_same(compiled(latent[:n], slots, kv_cache), roundtrip(latent[:n], slots, other))
        assert torch.equal(kv_cache, other)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "name", ["sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window", "sparse_decode"]
)
def test_one_dynamic_graph_serves_every_number_of_heads_that_selection_treats_alike(name, device):
    function = getattr(mla_fp8, name)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for heads in (8, 12, 16):
            tensors, options = SAMPLES[name](device, Size(heads=heads))
            assert_same(compiled(*tensors, **options), function(*tensors, **options))


def test_inductor_compiles_a_round_trip(device):
    """The default backend, around ordinary PyTorch code."""

    def roundtrip(latent, slots, kv_cache):
        mla_fp8.quantize_kv(latent, slots, kv_cache, layout="dsv4", page_size=4)
        return mla_fp8.dequantize_kv(kv_cache, slots, layout="dsv4", page_size=4)

    torch._dynamo.reset()
    tensors, _ = SAMPLES["quantize_kv"](device)
    other = clones(tensors)
    assert_same(torch.compile(roundtrip, fullgraph=True)(*tensors), roundtrip(*other))
    assert torch.equal(tensors[2], other[2])
