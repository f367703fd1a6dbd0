"""No op has derivatives: what autograd follows is refused at the call, by every public op."""

import inspect

import pytest
import torch
from op_samples import SAMPLES
from torch.autograd import forward_ad

import mla_fp8

DIFFERENTIABLE = {  # the samples with tensors that autograd could follow, and the first of those
    "quantize_kv": "latent",
    "k_norm_rope_insert": "kv",
    "qk_norm_rope_insert": "q",
    "pad_q_heads": "q",
    "compress_kv": "kv_score",
    "inverse_rope": "o",
    "inverse_rope_quantize": "o",
    "sparse_prefill": "q",
    "sparse_prefill_paged": "q",
    "sparse_prefill_window": "q",
    "sparse_decode": "q",
    "paged_attention_ragged": "q",
    "paged_attention_ragged_latent": "q",
    "merge_attention_states": "out_a",
    "merge_partial_states": "outs",
    "quantize_index_k": "k",
    "pool_index_k": "k",
    "prepare_keys": "kv",
    "prepare_queries": "q_pe",
    "index_logits": "q",
    "index_logits_ragged": "q",
    "index_topk": "q",
    "index_topk_ragged": "q",
    "index_topk_blocks": "q",
    "index_topk_ragged_blocks": "q",
    "merge_topk": "scores",
}
every_op = pytest.mark.parametrize("name", DIFFERENTIABLE)


def call(name, device, change):
    """The sample with its first tensor changed."""
    (x, *others), options = SAMPLES[name](device)
    return getattr(mla_fp8, name)(change(x), *others, **options)


def refused(name):
    return pytest.raises(RuntimeError, match=f"mla_fp8.{name}: {DIFFERENTIABLE[name]} must not require grad")


def test_every_op_that_reads_floats_is_listed(device):
    of_integers = {name for name in SAMPLES if name not in DIFFERENTIABLE}
    for name in of_integers:
        tensors, _ = SAMPLES[name](device)
        assert not any(x.is_floating_point() for x in tensors), name


@every_op
def test_a_tensor_that_requires_grad_is_refused(name, device):
    with refused(name):
        call(name, device, lambda x: x.clone().requires_grad_())
    with refused(name):
        torch.func.grad(lambda x: call(name, device, lambda _: x)[0].float().sum())(
            SAMPLES[name](device)[0][0]
        )


@every_op
def test_so_is_every_other_tensor_of_floats(name, device):
    tensors, options = SAMPLES[name](device)
    parameters = list(inspect.signature(getattr(mla_fp8, name)).parameters)
    given = dict(zip(parameters, tensors, strict=False)) | options
    floats = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for n in floats:
        with pytest.raises(RuntimeError, match=f"mla_fp8.{name}: {n} must not require grad"):
            getattr(mla_fp8, name)(**given | {n: given[n].clone().requires_grad_()})


@every_op
def test_forward_mode_is_refused(name, device):
    x = SAMPLES[name](device)[0][0]
    with refused(name):
        torch.func.jvp(lambda x: call(name, device, lambda _: x), (x,), (x,))
    with forward_ad.dual_level():
        call(name, device, lambda x: x)  # nothing here has a tangent
        with refused(name):
            call(name, device, lambda x: forward_ad.make_dual(x, x))


@every_op
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_the_same_tensor_is_taken(name, guard, device):
    x = SAMPLES[name](device)[0][0].clone().requires_grad_()
    with guard():
        call(name, device, lambda _: x)


@pytest.mark.parametrize("name", ["attn_sink", "extra_kv_cache", "scale"])
def test_options_are_looked_at_too(name):
    (q, _, indices), options = SAMPLES["sparse_decode"]("cpu")
    spoilt = {
        "attn_sink": torch.zeros(8, requires_grad=True),
        "extra_kv_cache": torch.zeros(3, 512, requires_grad=True),
        "scale": torch.ones(1, requires_grad=True),
    }
    with pytest.raises(RuntimeError, match=f"{name} must not require grad"):
        mla_fp8.sparse_decode(q, q, indices, **options | {name: spoilt[name]})


def test_a_result_of_the_op_itself_claims_no_gradient(device):
    (q, *others), options = SAMPLES["sparse_decode"](device)
    options = options | {"layout": mla_fp8.KV_LAYOUTS[options["layout"]].id}
    out, lse = torch.ops.mla_fp8.sparse_decode(q.requires_grad_(), *others, **options)
    assert not out.requires_grad and not lse.requires_grad
