"""Every public function under torch.compile: one graph, the same bits, arguments written in place."""

import pytest
import torch
from op_samples import SAMPLES

import mla_fp8


def clones(values):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in values]


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_fullgraph_gives_the_same(name, device):
    function = getattr(mla_fp8, name)
    tensors, options = SAMPLES[name](device)
    eager, compiled = clones(tensors), clones(tensors)
    want = function(*eager, **options)
    torch._dynamo.reset()
    # aot_eager: functionalisation and the fakes, without a C++ compiler at test time
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*compiled, **options)
    assert_same(got, want)
    assert_same([x for x in compiled if x is not None], [x for x in eager if x is not None])


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
