"""mla_fp8_layer_ops in SGLang's own layer of DeepSeek V3.2 and GLM-5, without a GPU (probe.py).

The layer's projections are small matrices; SGLang's method is ours, its Indexer goes its own way through the
methods that we hook, up to where it would ask DeepGEMM for logits.
"""

import without_gpu

without_gpu.pretend_sglang()

import contextlib
import os
from importlib import import_module
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_layer_ops"

import pytest
import torch
import v32_layer
from sglang.srt.plugins.hook_registry import HookRegistry
from v32_layer import HEADS, INDEX, INDEX_HEADS, LATENT, NOPE, QA, ROPE, V, Weights, relative

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS
from mla_fp8.integrations import layer_ops, sglang_layer

LAYERS, INDEXER = import_module(sglang_layer._LAYERS), import_module(sglang_layer._INDEXER)
POOL = import_module(sglang_layer._POOL)
PAGE, TOPK, LENS, LAYER = 64, 128, (40, 70), 5
ROW, ENTRY = KV_LAYOUTS["dsv32"], INDEX_LAYOUTS["index_fp8"]
FP8 = 0.1  # of what three bits of mantissa err; a wrong rotation errs more than 0.5
CHOSEN = "the choice"


@pytest.fixture(scope="module", autouse=True)
def plugged():
    layer_ops.register_sglang()
    HookRegistry.apply_hooks()


def linear(weight):
    return lambda x: ((x.float() @ weight.float()).bfloat16(), None)


class Mode:
    def __init__(self, decode: bool) -> None:
        self.decode = decode

    def __getattr__(self, name):
        return lambda: {"is_decode_or_idle": self.decode, "is_extend": not self.decode}.get(name, False)


class Layer:
    """SGLang's layer with its pool, and what it asks around it."""

    def __init__(self, monkeypatch, w: Weights, fused: bool, **changes) -> None:
        self.w, self.asked = w, []
        self.pool = POOL.DSATokenToKVPool.__new__(POOL.DSATokenToKVPool)
        self.rows = torch.zeros(4 * PAGE, 1, ROW.bytes_per_token, dtype=torch.uint8)
        self.keys = ENTRY.empty(4, PAGE, "cpu").zero_()
        vars(self.pool).update(index_page_size=PAGE, index_kpool=1)
        monkeypatch.setattr(POOL.DSATokenToKVPool, "get_key_buffer", lambda pool, layer_id: self.rows)
        monkeypatch.setattr(
            POOL.DSATokenToKVPool, "get_index_k_with_scale_buffer", lambda pool, layer_id: self.keys
        )
        backend = SimpleNamespace(get_indexer_metadata=lambda *args: SimpleNamespace())
        for module in (LAYERS, INDEXER):
            monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: self.pool)
            monkeypatch.setattr(module, "get_attn_backend", lambda: backend)
        for name in ("is_in_prefill_graph_scope", "is_interleave_extend", "kv_b_lora_correction"):
            monkeypatch.setattr(LAYERS, name, lambda *args: False)
        monkeypatch.setattr(INDEXER, "is_cp_active", lambda *args: False)
        monkeypatch.setattr(INDEXER, "_is_cuda", True)
        latent = SimpleNamespace(fetch_qkv_latent=lambda: linear(w.qkv_a)(self.hidden)[0])
        monkeypatch.setattr(LAYERS, "get_attn_tp_context", lambda: latent)
        self.indexer = self._indexer(fused)
        self.layer = layer = SimpleNamespace(
            rotary_emb=SimpleNamespace(cos_sin_cache=w.table, is_neox_style=False), indexer=self.indexer,
            use_dsa=True, q_lora_rank=QA, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
            qk_head_dim=NOPE + ROPE, dcp_size=1, use_deep_gemm_bmm=False, w_kc=w.w_uk, alt_stream=None,
            layer_id=LAYER, should_run_indexer=lambda prev: prev is None,
            _fuse_rope_for_trtllm_mla=lambda batch: False,
            q_a_layernorm=SimpleNamespace(weight=w.q_norm, variance_epsilon=1e-6),
            kv_a_layernorm=SimpleNamespace(weight=w.kv_norm, variance_epsilon=1e-6),
            q_b_proj_forward=lambda x: linear(w.q_b)(x)[0].view(-1, HEADS, NOPE + ROPE),
        )  # fmt: skip
        vars(layer).update(changes)

    def _indexer(self, fused: bool):
        w = self.w
        made = INDEXER.Indexer.__new__(INDEXER.Indexer)
        torch.nn.Module.__init__(made)
        both = torch.cat([w.wk, w.weights], 1)
        vars(made).update(
            n_heads=INDEX_HEADS, head_dim=INDEX, rope_head_dim=ROPE, index_topk=TOPK, q_lora_rank=QA,
            use_dsa_indexer_fusion=fused, softmax_scale=INDEX**-0.5, scale_fmt="ue8m0", is_neox_style=w.neox,
            rotary_emb=SimpleNamespace(cos_sin_cache=w.table, is_neox_style=w.neox),
            dsa_enable_prefill_cp=False,
            k_norm=SimpleNamespace(weight=w.k_norm, bias=w.k_bias, variance_epsilon=1e-6),
            wq_b=linear(w.wq_b), alt_stream=None, block_size=128, use_aiter_fused_fp8_writer=False,
            use_gfx950_fused_indexer=False,
            _get_topk_paged=self._choose, _get_topk_ragged=lambda stream, *args: self._choose(*args),
            _should_skip_logits_computation=lambda batch: False, _forward_method=made.forward_cuda,
        )  # fmt: skip
        if fused:
            vars(made).update(wk_weights_proj=linear(both))
        else:
            vars(made).update(
                wk=linear(w.wk), weights_proj=SimpleNamespace(weight=w.weights.T, set_lora=False),
                _weights_proj_bf16_in_fp32_out=lambda x: x.float() @ w.weights.float(),
            )  # fmt: skip
        return made

    def _choose(self, batch, layer_id, q, weights, metadata):
        assert layer_id == LAYER
        self.asked.append((q, weights))
        return CHOSEN

    def run(self, hidden, requests, positions, prompts, previous=None):
        """What SGLang's method returns, and its batch."""
        self.hidden = hidden
        slots = requests * 2 * PAGE + positions
        batch = SimpleNamespace(
            forward_mode=Mode(not prompts), out_cache_loc=slots, attn_cp_metadata=None,
            seq_lens=torch.ones(2), seq_lens_cpu=None,
        )  # fmt: skip
        method = LAYERS.DeepseekMLAForwardMixin.forward_absorb_prepare
        with torch.no_grad():
            found = method(self.layer, positions, hidden, batch, None, None, previous)
        return found, batch, slots


def batches():
    hidden = [v32_layer.random(n + 1, v32_layer.HIDDEN) for n in LENS]
    yield hidden, [(r, p) for r, n in enumerate(LENS) for p in range(n)], True
    yield hidden, [(r, n) for r, n in enumerate(LENS)], False


def inputs(hidden, tokens):
    requests, positions = torch.tensor(tokens).T.contiguous()
    return torch.stack([hidden[r][p] for r, p in tokens]), requests, positions


models = pytest.mark.parametrize("neox, fused", [(True, False), (False, True)], ids=["V3.2", "GLM-5"])


@models
def test_queries_and_rows_are_the_models(neox, fused, monkeypatch):
    """Attention over them is exact attention, but for FP8 rows; nobody concatenates."""
    w = Weights(neox)
    layer = Layer(monkeypatch, w, fused)
    for hidden, tokens, prompts in batches():
        x, requests, positions = inputs(hidden, tokens)
        found, batch, _ = layer.run(x, requests, positions, prompts)
        q_pe, k_pe, q_nope, k_nope, *_, chosen, scaling, plan = found
        assert (
            chosen == CHOSEN and scaling is plan is None and getattr(batch, sglang_layer._WRITTEN) == {LAYER}
        )
        concat = import_module(sglang_layer._CONCAT).concat_mla_absorb_q_general
        q = concat(q_nope, q_pe)
        assert q.data_ptr() == q_nope.data_ptr() and q.is_contiguous()
        assert relative(torch.cat([k_nope, k_pe], -1)[:, 0], w.latents(x, positions)) < 0.01
        for i in range(0, len(tokens), 9):
            r, p = tokens[i]
            at, slots = torch.arange(p + 1), (torch.arange(p + 1) + r * 2 * PAGE)[None].int()
            out, _ = mla_fp8.sparse_decode(
                q[i : i + 1], layer.rows, slots, layout=ROW, page_size=1, sm_scale=w.scale
            )
            got = torch.einsum("hl,hlv->hv", out[0].double(), w.w_uv.double()).flatten()
            want = w.attend(hidden[r][: p + 1], at, w.latents(hidden[r][: p + 1], at), p + 1)
            assert got.shape == (HEADS * V,) and relative(got, want) < FP8


@models
def test_index_keys_and_queries_are_the_models(neox, fused, monkeypatch):
    """V3.2 rotates both by Hadamard, which keeps their products."""
    w = Weights(neox)
    layer = Layer(monkeypatch, w, fused)
    hidden, tokens, prompts = next(batches())
    x, requests, positions = inputs(hidden, tokens)
    _, _, slots = layer.run(x, requests, positions, prompts)
    ((q, weights),) = layer.asked
    assert q.dtype is torch.float8_e4m3fn and weights.shape == (*q.shape[:2], 1)
    values, scales = ENTRY.views(layer.keys, PAGE)
    keys = (values.double() * scales.double()).flatten(0, 1)[slots]
    want_q, want_weights = w.index_queries(x, positions)
    got = (q.double() * weights.double()) @ keys.T
    want = (want_q * want_weights[..., None]) @ w.index_keys(x, positions).T
    assert relative(got, want) < FP8
    assert layer.indexer.use_dsa_indexer_fusion is fused and not hasattr(layer.indexer, sglang_layer._READY)


def test_a_choice_that_is_carried_over_is_kept(monkeypatch):
    layer = Layer(monkeypatch, Weights(True), False)
    hidden, tokens, prompts = next(batches())
    found, *_ = layer.run(*inputs(hidden, tokens), prompts, previous="that of the layer before")
    assert found[7] == "that of the layer before" and not layer.asked and (layer.keys == 0).all()


def test_rows_are_written_once(monkeypatch):
    """RadixAttention does not write a layer's rows again, and writes those of others."""
    attention = import_module(sglang_layer._ATTENTION)
    seen = []
    backend = SimpleNamespace(forward=lambda q, k, v, layer, batch, save, **more: seen.append(save))
    monkeypatch.setattr(attention, "get_attn_backend", lambda: backend)
    for name in ("is_in_breakable_cuda_graph", "is_in_full_prefill_graph", "is_in_prefill_graph_scope"):
        monkeypatch.setattr(attention, name, lambda: False)
    monkeypatch.setattr(attention, "padded_extend_real_tokens", lambda *args: None)
    batch = SimpleNamespace(**{sglang_layer._WRITTEN: {LAYER}})
    for layer_id in (LAYER, LAYER + 1):
        layer = SimpleNamespace(layer_id=layer_id, use_prefill_attention_wrapper=False)
        attention.RadixAttention.forward(layer, None, None, None, batch)
    assert seen == [False, True]


class Prompts:
    """What SGLang's _get_topk_ragged asks: logits of any ``rows`` are their numbers, chunks have ``most``."""

    def __init__(self, monkeypatch, rows: int, most: int | None) -> None:
        self.rows, self.chosen = rows, []
        table = torch.zeros(1, 1, dtype=torch.int32)
        self.attn_metadata = SimpleNamespace(topk_indices_offset=None)
        for name, found in {
            "get_logical_page_table": table, "get_indexer_seq_len_cpu": torch.tensor([rows]),
            "get_indexer_seq_len": torch.tensor([rows]), "get_token_to_batch_idx": torch.zeros(rows).int(),
            "get_indexer_kvcache_range": (torch.zeros(rows).int(), torch.arange(rows).int()),
            "get_seqlens_expanded": torch.arange(rows).int(),
        }.items():  # fmt: skip
            setattr(self, name, lambda found=found: found)
        keys = torch.zeros(rows, INDEX, dtype=torch.uint8), torch.zeros(rows, 4, dtype=torch.uint8)
        pool = SimpleNamespace(index_page_size=PAGE, get_index_k_scale_buffer=lambda *args: keys)
        logits = lambda q, *args, **options: q[:, 0, :1].float().expand(-1, rows)  # noqa: E731
        bytes_of_row = rows * INDEXER.Indexer._MQA_LOGITS_BYTES_PER_ELEM
        for name, value in {
            "get_token_to_kv_pool": lambda: pool, "resolve_fp8_mqa_logits_fn": lambda: logits,
            "mqa_logits_should_chunk": lambda **given: (most is not None, (most or 0) * bytes_of_row),
        }.items():  # fmt: skip
            monkeypatch.setattr(INDEXER, name, value)

    def topk_transform(self, logits, topk, **unused):
        self.chosen.append(logits[:, :1].int().expand(-1, topk).contiguous())
        return self.chosen[-1]


@pytest.mark.parametrize("padding, most", [(0, None), (3, None), (0, 4), (3, 4)])
def test_prompts_attend_to_what_the_topk_wrote(padding, most, monkeypatch):
    """The positions that SGLang's own method returns; not copied where they are whole."""
    rows = 10
    indexer = INDEXER.Indexer.__new__(INDEXER.Indexer)
    torch.nn.Module.__init__(indexer)
    vars(indexer).update(
        index_topk=TOPK, _with_real_sm_count=contextlib.nullcontext,
        _get_mqa_logits_budget_bytes=lambda index: 0, _mask_init_and_local_tokens=lambda *args: None,
        _pad_heads_for_deep_gemm=lambda q, weights: (q, weights, None),
    )  # fmt: skip
    numbers = torch.arange(rows + padding, dtype=torch.float32)[:, None, None]

    class Numbered(torch.Tensor):  # SGLang asks for the device's number
        device = property(lambda self: torch.device("cpu", 0))

    q = numbers.expand(-1, 1, INDEX).to(torch.float8_e4m3fn).as_subclass(Numbered)
    batch = SimpleNamespace(
        forward_mode=Mode(False), seq_lens_cpu=torch.ones(1), extend_seq_lens_cpu=torch.ones(1)
    )
    batch.forward_mode.is_extend_without_speculative = lambda: True
    prompts = Prompts(monkeypatch, rows, most)
    method = INDEXER.Indexer._get_topk_ragged
    got = method(indexer, False, batch, LAYER, q, torch.zeros(rows, 1, 1), prompts)
    want = torch.full((rows + padding, TOPK), -1, dtype=torch.int32)
    want[:rows] = torch.arange(rows)[:, None]
    assert got.dtype is torch.int32 and torch.equal(got, want)
    assert (got is prompts.chosen[0]) == (not padding and most is None)
    into = torch.full_like(want, -1)  # of a graph
    assert method(indexer, False, batch, LAYER, q, torch.zeros(rows, 1, 1), prompts, into) is into
    assert torch.equal(into, want)


def test_two_tensors_are_still_concatenated():
    calls = []
    original = lambda *parts: calls.append(parts) or torch.cat(parts, -1)  # noqa: E731
    a, b = torch.randn(3, 2, 512), torch.randn(3, 2, 64)
    assert sglang_layer.concat_mla_absorb_q_general(original, a, b).shape == (3, 2, 576) and len(calls) == 1
    whole = torch.randn(3, 2, 576)
    got = sglang_layer.concat_mla_absorb_q_general(original, whole[..., :512], whole[..., 512:])
    assert torch.equal(got, whole) and got.data_ptr() == whole.data_ptr() and len(calls) == 1
    for q in (whole[:, :1], whole[..., 8:520]):
        sglang_layer.concat_mla_absorb_q_general(original, q[..., :512], whole[:, : q.shape[1], 512:])
    assert len(calls) == 3


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"use_deep_gemm_bmm": True}, "FP8 batched GEMMs by DeepGEMM"),
        ({"q_lora_rank": None}, "queries without latents"),
        ({"use_dsa": False}, "attention without an indexer"),
        ({"rotary_emb": None}, "no RoPE, or another"),
    ],
)
def test_what_a_layer_refuses_stays_sglangs(changes, reason, monkeypatch):
    layer = Layer(monkeypatch, Weights(True), False, **changes).layer
    assert sglang_layer.why_not_layer(layer) == reason
    theirs = lambda *args: "theirs"  # noqa: E731
    assert sglang_layer.forward_absorb_prepare(theirs, layer, None, None, None, None) == "theirs"


def test_the_layer_is_of_a_version_that_we_know():
    assert sglang_layer.why_not() is None
    assert set(sglang_layer.HOOKS) <= HookRegistry._patched
