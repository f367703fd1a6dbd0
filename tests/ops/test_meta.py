"""Meta tensors: all of them give shapes; one among others is a wrong device."""

import pytest
import torch
from op_samples import SAMPLES, tensors_of

import mla_fp8

every_op = pytest.mark.parametrize("name", SAMPLES)


def to_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def shapes(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(x.shape, x.dtype) for x in tensors_of(results)]


@every_op
def test_meta_tensors_give_meta_results_of_the_same_shapes(name, device):
    function = getattr(mla_fp8, name)
    tensors, options = SAMPLES[name](device)
    on_meta = function(*map(to_meta, tensors), **{key: to_meta(x) for key, x in options.items()})
    results = on_meta if isinstance(on_meta, tuple) else (on_meta,)
    assert all(x.is_meta for x in tensors_of(results))
    assert shapes(on_meta) == shapes(function(*tensors, **options))


@every_op
def test_one_meta_tensor_among_others_is_a_wrong_device(name, device):
    """Its kernel would be that of all, and the result memory that nobody wrote."""
    tensors, options = SAMPLES[name](device)
    optional = {key: x for key, x in options.items() if isinstance(x, torch.Tensor)}
    message = rf"mla_fp8.{name}: .* must be on .* like .*, got .*"
    for i in range(len(tensors)):
        changed = [to_meta(x) if i == j else x for j, x in enumerate(tensors)]
        with pytest.raises(RuntimeError, match=message):
            getattr(mla_fp8, name)(*changed, **options)
    for key, x in optional.items():
        with pytest.raises(RuntimeError, match=message):
            getattr(mla_fp8, name)(*tensors, **options | {key: to_meta(x)})


def test_a_meta_buffer_for_results_is_a_wrong_device(device):
    (cache, slots), options = SAMPLES["dequantize_kv"](device)
    out = torch.empty(len(slots), 512, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match=f"mla_fp8.dequantize_kv: out must be on {device}.* got meta"):
        mla_fp8.dequantize_kv(cache, slots, **options, out=out)


@pytest.mark.parametrize("group", [2, 3, 8, 1 << 16])
def test_meta_tokens_have_as_many_lists_as_others(group, device):
    indices = torch.zeros(3, 2048, dtype=torch.int32, device=device)
    options = {"query_groups": group, "num_q_heads": 8, "layout": "dsv4", "num_slots": 10}
    for tokens in (1, 2, 3):
        for starts in (None, torch.zeros(3, dtype=torch.int32, device=device)):
            lists = mla_fp8.plan_shared_keys(indices[:tokens], **options, query_start_loc=starts)
            meta = [None if x is None else x.to("meta") for x in (indices[:tokens], starts)]
            shape = mla_fp8.plan_shared_keys(meta[0], **options, query_start_loc=meta[1]).shape
            assert shape == lists.shape
