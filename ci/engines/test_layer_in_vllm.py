"""mla_fp8_layer_ops in vLLM's own layer of DeepSeek V3.2 and GLM-5, without a GPU (probe.py).

The layer's projections are small matrices; all that lies between is vLLM's Python and our kernels: prompts,
then decode over the caches that they left.
"""

import without_gpu

without_gpu.pretend_vllm()

from types import SimpleNamespace

import engine_standins
import pytest
import torch
import v32_layer
import vllm
from v32_layer import HEADS, INDEX, INDEX_HEADS, LATENT, NOPE, QA, ROPE, V, Weights, relative
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import sparse_attn_indexer as indexer_layer
from vllm.v1.attention.backends.mla import flashmla_sparse, indexer
from vllm.v1.worker import workspace
from vllm_prompt_cases import prompts_of_many_heads

import mla_fp8_plugins
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS
from mla_fp8.integrations import (
    layer_ops,
    vllm_context_parallel,
    vllm_indexer,
    vllm_layer,
    vllm_slots,
    vllm_sparse,
)
from mla_fp8.integrations import vllm as plugin
from mla_fp8.testing import assert_within_flash_mla_tolerance

attention = pytest.importorskip(vllm_layer.MODULE)

PAGE, TOPK, NAME, KEYS = 64, 128, "layer.attn", "layer.indexer.k_cache"
LENS = (40, 70)  # of the prompts
ROW, ENTRY = KV_LAYOUTS["dsv32"], INDEX_LAYOUTS["index_fp8"]
FP8 = 0.1  # of what three bits of mantissa err; a wrong rotation errs more than 0.5


@pytest.fixture(scope="module", autouse=True)
def plugins():
    vllm.envs.VLLM_PLUGINS = ["mla_fp8", vllm_indexer.NAME, layer_ops.NAME]
    for _ in range(2):
        mla_fp8_plugins.vllm()
        vllm_indexer.register()
        layer_ops.register_vllm()


def linear(weight):
    return lambda x: ((x.float() @ weight.float()).bfloat16(), None)


def convert(req_id, block_table, positions, **options):
    valid = positions >= 0
    at = positions.where(valid, 0).long()
    slots = block_table[req_id[:, None].long(), at // PAGE] * PAGE + at % PAGE
    return slots.where(valid, -1).int()


class Step:
    """A layer with its caches, and a step's metadata."""

    def __init__(self, monkeypatch, w: Weights, **changes) -> None:
        self.w, self.monkeypatch = w, monkeypatch
        self.table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        self.rows = torch.zeros(4, PAGE, ROW.bytes_per_token, dtype=torch.uint8)
        self.keys = torch.zeros(4, PAGE, ENTRY.bytes_per_entry, dtype=torch.uint8)
        self.buffer = torch.full((200, TOPK), -5, dtype=torch.int32)
        kind = vllm_sparse.make_backend(plugin.__name__).get_impl_cls()
        impl = kind.__new__(kind)
        vars(impl).update(
            softmax_scale=w.scale, dcp_world_size=1, index_group=None, num_heads=HEADS,
            kv_cache_dtype="fp8_ds_mla", kv_lora_rank=LATENT, q_head_size=LATENT + ROPE,
            need_to_return_lse_for_decode=False, pcp_dcp_kv_gather=False,
        )  # fmt: skip
        impl.topk_indices_buffer = self.buffer
        monkeypatch.setattr(
            flashmla_sparse, "triton_convert_req_index_to_global_index",
            lambda *args, **options: self.converted.append(args[2]) or convert(*args, **options),
        )  # fmt: skip
        self.converted = []

        def convert_once(impl, topk, m, **options):
            self.converted.append(topk)
            return convert(m.req_id_per_token[: len(topk)], m.block_table, topk)

        monkeypatch.setattr(kind, "_convert_logical_to_physical_topk", convert_once)
        table = SimpleNamespace(cos_sin_cache=w.table, is_neox_style=False)
        self.layer = layer = attention.DeepseekV32Attention.__new__(attention.DeepseekV32Attention)
        torch.nn.Module.__init__(layer)
        of_indexer = SimpleNamespace(
            head_dim=INDEX, n_head=INDEX_HEADS, softmax_scale=INDEX**-0.5, topk_tokens=TOPK,
            wk_weights_proj=linear(torch.cat([w.wk, w.weights], 1)), wq_b=linear(w.wq_b),
            k_norm=SimpleNamespace(weight=w.k_norm, bias=w.k_bias, eps=1e-6), quant_block_size=128,
            k_cache=SimpleNamespace(kv_cache=self.keys, prefix=KEYS, uses_shuffled_layout=False),
            scale_fmt="ue8m0", max_model_len=256, max_total_seq_len=256,
            indexer_op=SimpleNamespace(topk_backend="auto"),
        )  # fmt: skip
        vars(layer).update(
            fused_qkv_a_proj=linear(w.qkv_a), q_b_proj=linear(w.q_b), W_UK_T=w.w_uk, W_UV=w.w_uv,
            q_a_layernorm=SimpleNamespace(weight=w.q_norm, variance_epsilon=1e-6),
            kv_a_layernorm=SimpleNamespace(weight=w.kv_norm, variance_epsilon=1e-6), rotary_emb=table,
            indexer_rope_emb=table, o_proj=lambda x: (x, None), indexer=of_indexer, skip_topk=False,
            impl=impl, hisparse_cache=None, use_pcp=False, _fp8_query=False, _fp8_kv_needs_view=False,
            kv_cache_dtype="fp8_ds_mla", _index_rope_interleave=not w.neox, layer_name=NAME,
            num_local_heads=HEADS, num_heads=HEADS, kv_lora_rank=LATENT, q_lora_rank=QA,
            qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, qk_head_dim=NOPE + ROPE, v_head_dim=V,
            topk_indices_buffer=self.buffer, kv_cache=self.rows,
            dcp_manager=None, _dense_mha_metadata_layer_name="", _k_scale=None, _k_scale_float=1.0,
            pcp_shard_decode_requests=False,
            _vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)),
        )  # fmt: skip
        vars(layer).update(changes)

    def slots(self, requests, positions):
        return self.table[requests, positions // PAGE].long() * PAGE + positions % PAGE

    def run(self, hidden, requests, positions, prompts: bool):
        """The layer's output."""
        n = len(hidden)
        slots, lens = self.slots(requests, positions), (positions + 1).int()
        metadata = SimpleNamespace(
            num_decode_tokens=0 if prompts else n, num_actual_tokens=n, req_id_per_token=requests.int(),
            block_table=self.table, block_size=PAGE, fp8_use_mixed_batch=True, prefill=None, num_decodes=n,
            decode_max_query_len=1,
        )  # fmt: skip
        of_keys = indexer.DeepseekV32IndexerMetadata(
            seq_lens=lens, max_seq_len=256, slot_mapping=slots, num_decodes=n, num_decode_tokens=n,
            num_prefills=0, num_prefill_tokens=0, prefill=None,
            decode=indexer.DeepSeekV32IndexerDecodeMetadata(
                block_table=self.table[requests] if prompts else self.table, seq_lens=lens[:, None],
                decode_lens=torch.ones(n, dtype=torch.int32), requires_padding=False,
                schedule_metadata=torch.empty(0),
            ),
        )  # fmt: skip
        context = SimpleNamespace(
            attn_metadata={NAME: metadata, KEYS: of_keys}, slot_mapping={NAME: slots, KEYS: slots},
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        )  # fmt: skip
        workspace.init_workspace_manager(torch.device("cpu"))
        for module in (attention, indexer_layer):
            self.monkeypatch.setattr(module, "get_forward_context", lambda: context)
        found = (metadata, self.layer, self.rows, slots)
        self.monkeypatch.setattr(attention, "get_attention_context", lambda name: found)
        with torch.no_grad():
            return attention.DeepseekV32Attention.forward(self.layer, positions, hidden)


def batches():
    """Hidden states, requests and positions of the prompts and of three steps of decode behind them."""
    hidden = [v32_layer.random(n + 3, v32_layer.HIDDEN) for n in LENS]
    first = [(r, p) for r, n in enumerate(LENS) for p in range(n)]
    yield hidden, first, True
    for i in range(3):
        yield hidden, [(r, n + i) for r, n in enumerate(LENS)], False


@pytest.mark.parametrize("neox", [True, False], ids=["V3.2", "GLM-5"])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_attends_as_the_model_does(neox, table, monkeypatch):
    """Every key is chosen: the output is exact attention, but for FP8 rows."""
    w = Weights(neox, table)
    step = Step(monkeypatch, w)
    for hidden, tokens, prompts in batches():
        requests, positions = torch.tensor(tokens).T.contiguous()
        x = torch.stack([hidden[r][p] for r, p in tokens])
        got = step.run(x, requests, positions, prompts)
        for i in range(0, len(tokens), 7):
            r, p = tokens[i]
            at = torch.arange(p + 1)
            want = w.attend(hidden[r][: p + 1], at, w.latents(hidden[r][: p + 1], at), p + 1)
            assert relative(got[i], want) < FP8
        chosen = step.buffer[: len(tokens)]
        lens = (positions + 1).clamp_max(TOPK)
        assert torch.equal((chosen >= 0).sum(1), lens) and (chosen.max(1).values == lens - 1).all()


@pytest.mark.parametrize("neox", [True, False], ids=["V3.2", "GLM-5"])
def test_index_keys_and_queries_are_the_models(neox, monkeypatch):
    w, seen = Weights(neox), {}
    step = Step(monkeypatch, w)
    original = indexer_layer.sparse_attn_indexer

    def spied(*args, **options):
        seen["q"], seen["weights"] = args[3], args[6]
        return original(*args, **options)

    monkeypatch.setattr(attention, "sparse_attn_indexer", spied)
    hidden, tokens, _ = next(batches())
    requests, positions = torch.tensor(tokens).T.contiguous()
    x = torch.stack([hidden[r][p] for r, p in tokens])
    step.run(x, requests, positions, True)
    q, weights = w.index_queries(x, positions)
    assert seen["q"].dtype is torch.float8_e4m3fn and seen["weights"].dtype is torch.float32
    # the scale is in the weight: products of both are compared
    product = seen["q"].double() * seen["weights"].double()[..., None]
    assert relative(product, q * weights[..., None]) < FP8
    values, scales = ENTRY.views(step.keys.flatten(1), PAGE)
    keys = (values.double() * scales.double()).flatten(0, 1)[step.slots(requests, positions)]
    assert relative(keys, w.index_keys(x, positions)) < FP8


def test_a_layer_without_an_indexer_takes_the_choice_that_is_there(monkeypatch):
    w = Weights(True)
    step = Step(monkeypatch, w, indexer=None)
    hidden, tokens, _ = next(batches())
    requests, positions = torch.tensor(tokens).T.contiguous()
    step.buffer[: len(tokens)] = torch.where(
        torch.arange(TOPK) <= positions[:, None], torch.arange(TOPK), -1
    ).int()
    x = torch.stack([hidden[r][p] for r, p in tokens])
    got = step.run(x, requests, positions, True)
    r, p = tokens[-1]
    at = torch.arange(p + 1)
    want = w.attend(hidden[r][: p + 1], at, w.latents(hidden[r][: p + 1], at), p + 1)
    assert relative(got[-1], want) < FP8
    assert (step.keys == 0).all()


def test_nobody_concatenates(monkeypatch):
    """Attention's queries are one tensor, and no kernel copies them."""
    step, seen = Step(monkeypatch, Weights(True)), []
    over = vllm_sparse.attend.over_pages
    monkeypatch.setattr(
        vllm_sparse.attend, "over_pages", lambda q, *a, **o: seen.append(q) or over(q, *a, **o)
    )
    _, (hidden, tokens, prompts), *_ = batches()
    requests, positions = torch.tensor(tokens).T.contiguous()
    step.run(torch.stack([hidden[r][p] for r, p in tokens]), requests, positions, prompts)
    assert seen[0].shape == (2, HEADS, LATENT + ROPE) and seen[0].is_contiguous()


@pytest.mark.parametrize("layers", [1, 2])
def test_nobody_converts_positions_of_decode(layers, monkeypatch):
    """Attention's slots are those that index_topk found, of all layers of a group; unless the choice is of
    another table, of other rows, or was moved."""
    step, seen = Step(monkeypatch, Weights(True)), []
    impl, converted, of = step.layer.impl, step.converted, vllm_slots.of
    impl.index_group = SimpleNamespace(
        num_layers=layers, has_indexer=True, set_logical_topk_ready=lambda layer: None,
        prepare_for_batch=lambda layer, m: None,
    )  # fmt: skip
    impl.index_group_index = 0
    over = vllm_sparse.attend.over_pages
    monkeypatch.setattr(
        vllm_sparse.attend,
        "over_pages",
        lambda *args, **o: seen.append(args[2]) or over(*args, **o),
    )
    for hidden, tokens, prompts in batches():
        requests, positions = torch.tensor(tokens).T.contiguous()
        converted.clear()
        step.run(torch.stack([hidden[r][p] for r, p in tokens]), requests, positions, prompts)
        assert len(converted) == prompts
        if layers == 2 and not prompts:  # the other layer of the group, which has no indexer
            impl.index_group_index, step.layer.skip_topk = 1, True
            step.run(torch.stack([hidden[r][p] for r, p in tokens]), requests, positions, prompts)
            impl.index_group_index, step.layer.skip_topk = 0, False
            assert not converted and seen[-1] is seen[-2]
        assert torch.equal(seen[-1], convert(requests, step.table, step.buffer[: len(tokens)]))
    table, rows = step.table, len(seen[-1])
    again = of(impl.index_group, rows, table, PAGE)
    assert (again is None) == (layers == 1)
    assert of(impl.index_group, rows + 1, table, PAGE) is of(impl.index_group, rows, table[1:], PAGE) is None
    vllm_slots.room(step.buffer[:rows], table, PAGE)
    with pytest.raises(AttributeError):  # of None
        indexer_layer.unpack_seq_triton(None, None)
    vllm_slots.take(impl.index_group, 0)
    assert of(impl.index_group, rows, table, PAGE) is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"use_pcp": True}, "prefill context parallelism"),
        ({"_fp8_query": True}, "FP8 queries"),
        ({"kv_cache_dtype": "fp8"}, "caches of fp8"),
        ({"q_lora_rank": 4096}, "queries' latents of 4096 dims"),
        ({"hisparse_cache": object()}, "HiSparse"),
        ({"impl": object()}, "attention of object"),
    ],
)
def test_what_a_layer_refuses_stays_vllms(changes, reason, monkeypatch):
    layer = Step(monkeypatch, Weights(True), **changes).layer
    assert vllm_layer.why_not_layer(layer) == reason
    called = []
    out = vllm_layer.forward(
        lambda *args: called.append(args) or "theirs", layer, None, torch.zeros(1).bfloat16()
    )
    assert out == "theirs" and len(called) == 1


def test_a_layer_of_ranks_stays_vllms_unless_they_exchange_by_us(monkeypatch):
    layer = Step(monkeypatch, Weights(True)).layer
    layer.impl.dcp_world_size, layer.impl.pcp_world_size = 2, 1
    alone = "decode context parallelism without mla_fp8_context_parallel"
    assert vllm_layer.why_not_layer(layer) == alone
    monkeypatch.setattr(vllm_context_parallel._state, "on", True)
    assert vllm_layer.why_not_layer(layer) == alone  # a class of attention that was made before
    kind = vllm_sparse.make_backend(plugin.__name__).get_impl_cls()
    impl = kind.__new__(kind)
    vars(impl).update(vars(layer.impl))
    layer.impl = impl
    config = layer._vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(num_ubatches=1), model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    assert vllm_layer.why_not_layer(layer) is None
    config.parallel_config.num_ubatches = 2
    assert vllm_layer.why_not_layer(layer) == "an exchange of ranks by vLLM"


def test_queries_of_ranks_are_whole(monkeypatch):
    """What vLLM concatenates for the gather is the tensor that the layer has written."""
    step, seen = Step(monkeypatch, Weights(True)), []
    monkeypatch.setattr(vllm_layer, "why_not_layer", lambda layer: None)
    monkeypatch.setattr(vllm_layer, "_of_ranks", lambda layer: True)
    kind = attention.DeepseekV32Attention
    monkeypatch.setattr(kind, "_sparse_indexer_and_attn", lambda self, *args: seen.append(args[-3:]))
    hidden, tokens, prompts = next(batches())
    requests, positions = torch.tensor(tokens).T.contiguous()
    step.run(torch.stack([hidden[r][p] for r, p in tokens]), requests, positions, prompts)
    ((whole, rotated, _),) = seen
    got = torch.cat((whole[:5], rotated[:5]), dim=-1)
    assert type(got) is torch.Tensor and got.data_ptr() == whole.data_ptr()
    assert got.shape == (5, HEADS, LATENT + ROPE) and torch.equal(got[..., LATENT:], rotated[:5])


def test_prompts_of_many_heads_are_written_where_vllm_reads_them(monkeypatch):
    kind = vllm_sparse.make_backend(plugin.__name__).get_impl_cls()
    assert kind.knows_prompts
    impl = kind.__new__(kind)
    vars(impl).update(softmax_scale=0.1, dcp_world_size=1, index_group=None)
    torch.manual_seed(0)
    b = prompts_of_many_heads(impl, "cpu")
    convert = engine_standins.triton_convert_req_index_to_global_index
    for name, x in (b.replaced | {convert.__name__: convert}).items():
        monkeypatch.setattr(flashmla_sparse, name, x)
    out, lse = impl._forward_fp8_kv_separate_prefill_decode(*b.arguments)
    assert lse is None and out.data_ptr() == b.out.data_ptr()
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])


def test_the_layer_is_of_a_version_that_we_know():
    assert vllm_layer.why_not() is None
    assert attention.DeepseekV32Attention.forward.taken_over_by_mla_fp8
