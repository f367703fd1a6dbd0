"""mla_fp8_context_parallel in SGLang's own attention of DSA, without a GPU (probe.py): attention to a rank's
keys and the exchange of two and four ranks, processes that talk by gloo, against one rank.
"""

import without_gpu

without_gpu.pretend_sglang()

import os
from functools import cache
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_context_parallel"

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.plugins.hook_registry import HookRegistry
from torch import Tensor

import mla_fp8
from mla_fp8.integrations import sglang as plugin
from mla_fp8.integrations import sglang_context_parallel

PAGE, TOPK, LATENT, ROPE, V, HEADS, ROWS, SLOTS = 64, 128, 512, 64, 16, 64, 6, 2000
BACKENDS = {"flashmla_kv": mla_fp8.KV_LAYOUTS["dsv32"], "flashmla_sparse": mla_fp8.KV_LAYOUTS["bf16"]}
MODES = {"decode": ForwardMode.DECODE, "prompts": ForwardMode.EXTEND, "verify": ForwardMode.TARGET_VERIFY}
WORLDS = [2, 4]


class Layer(forward_mla.DeepseekMLAForwardMixin):
    """What forward_absorb_core asks of a layer."""

    learnable_sink_param = next_skip_topk = rotary_emb = None
    current_attention_backend, use_dsa, use_deep_gemm_bmm = "dsa", True, False
    kv_lora_rank, v_head_dim = LATENT, V


class Rank:
    def __init__(self, world: int, rank: int, kind: str) -> None:
        torch.manual_seed(0)
        self.world, self.rank, self.kind, self.heads = world, rank, kind, HEADS // world
        self.q = torch.randn(ROWS, HEADS, LATENT + ROPE).bfloat16()
        self.w_vc = (torch.randn(HEADS, LATENT, V) * 0.05).bfloat16()
        rows = torch.randn(SLOTS, LATENT + ROPE).bfloat16()
        chosen = torch.rand(ROWS, SLOTS).argsort(1)[:, :TOPK]
        for row, count in enumerate((TOPK, 100, 1, 0)):  # then holes, as SGLang pads
            chosen[row, count:] = -1
        chosen[4] = torch.arange(TOPK) * 4  # of one rank
        self.slots = chosen.int()
        own = rows[torch.arange(SLOTS) % world == rank]
        own = torch.cat([own, own.new_full((-len(own) % PAGE, LATENT + ROPE), float("nan"))])
        layout = BACKENDS[kind]
        if kind == "flashmla_kv":
            cache, (nope, rope) = layout.empty(len(own) // PAGE, PAGE, "cpu"), own.split([LATENT, ROPE], 1)
            options = {"rope": rope.contiguous(), "layout": layout, "page_size": PAGE}
            mla_fp8.quantize_kv(nope.contiguous(), torch.arange(len(own)), cache, **options)
            own = cache.view(-1, 1, layout.bytes_per_token)
        self.backend = self._backend(own.view(len(own), 1, -1))
        parallel = SimpleNamespace(
            dcp_group=SimpleNamespace(device_group=None if world == 1 else dist.group.WORLD),
            dcp_comm_backend="a2a", attn_dcp_rank=rank, dcp_replicate_q_proj=False,
        )  # fmt: skip
        for module in (forward_mla, sglang_context_parallel.import_module("sglang.srt.runtime_context")):
            module.get_parallel = lambda: parallel
        forward_mla.get_in_autotune_dummy_run = lambda: False
        dsa_backend.concat_mla_absorb_q_general = lambda nope, rope: torch.cat([nope, rope], -1)
        sglang_context_parallel.init_cuda_graph_state(lambda *args: None, self.backend, 3, ROWS)

    def _backend(self, keys: Tensor):
        cls = dsa_backend.DeepseekSparseAttnBackend
        backend = cls.__new__(cls)
        width = keys.shape[-1]
        vars(backend).update(
            dcp_size=self.world, dcp_rank=self.rank, num_dcp_q_heads=HEADS, device="cpu",
            dsa_decode_impl=self.kind, dsa_prefill_impl=self.kind, use_mha=False, use_fused_topk=True,
            dsa_topk_backend=SimpleNamespace(is_sgl_kernel=lambda: True), hisparse_coordinator=None,
            dsa_kv_cache_store_fp8=self.kind == "flashmla_kv", kv_cache_dim=width, physical_page_size=PAGE,
            flashmla_kv_format="V32", dsa_index_topk=TOPK, speculative_num_draft_tokens=2,
            token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer: keys), dsa_index_kpool=1,
            forward_metadata=SimpleNamespace(
                dsa_cache_seqlens_int32=torch.full((ROWS,), TOPK, dtype=torch.int32),
                cache_seqlens_int32=torch.full((ROWS // 2,), TOPK, dtype=torch.int32),
            ),
        )  # fmt: skip
        return backend

    def attend(self, mode: str, replicated: bool) -> Tensor:
        """[rows, heads of this rank, V]. ``replicated``: all heads' queries are there."""
        mine = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        batch = SimpleNamespace(forward_mode=MODES[mode], batch_size=ROWS // 2)
        of_all = SimpleNamespace(
            tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, layer_id=0, scaling=0.05,
            is_cross_attention=False,
        )  # fmt: skip
        forward = self.backend.forward_decode if mode == "decode" else self.backend.forward_extend

        def attention(q, k, v, batch, **options):
            return forward(q, None, None, of_all, batch, save_kv_cache=False, **options)

        layer = Layer()
        vars(layer).update(
            dcp_size=self.world, num_local_heads=self.heads, attn_mqa=attention, w_vc=self.w_vc[mine],
            attn_mqa_for_dcp_decode=attention, o_proj=lambda x: (x, None),
        )  # fmt: skip
        q = self.q if replicated else self.q[:, mine]
        q_nope, q_pe = (x.contiguous() for x in q.split([LATENT, ROPE], -1))
        if not replicated:
            q_nope, q_pe = forward_mla.all_gather_q_for_mla_decode(q_nope, q_pe)
            assert sglang_context_parallel._state.exchange.merge_is_due
        out = layer.forward_absorb_core(q_pe, None, q_nope, None, batch, None, None, self.slots, None)
        return out.view(ROWS, self.heads, V)


@cache
def of_ranks(world: int) -> list[dict]:
    def run(rank: int) -> dict:
        plugin.register()
        sglang_context_parallel.register()
        HookRegistry.apply_hooks()
        found = {}
        for kind in BACKENDS:
            made = Rank(world, rank, kind)
            for mode in MODES:
                found[kind, mode] = made.attend(mode, True).float().numpy()
                if world > 1:
                    gathered = made.attend(mode, False).float().numpy()
                    assert (gathered == found[kind, mode]).all()
        return found

    return forked_ranks.of_ranks(world, run)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_attend_as_one_rank_does(mode, kind, world):
    want = torch.from_numpy(of_ranks(1)[0][kind, mode])
    got = torch.cat([torch.from_numpy(rank[kind, mode]) for rank in of_ranks(world)], 1)
    assert (got[3] == 0).all() and (want[3] == 0).all()  # no keys
    errors = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2)).clamp_min(1e-9)  # parts of ranks are bf16
    assert errors.max() < 8e-3


def test_nothing_that_we_build_on_is_missing():
    assert sglang_context_parallel.why_not() is None


def test_rows_that_flashmla_sparse_would_gather_are_refused(monkeypatch):
    monkeypatch.setattr(sglang_context_parallel._state, "on", True)
    backend = SimpleNamespace(dcp_size=2, dsa_kv_cache_store_fp8=True)
    with pytest.raises(ValueError, match="expected --dsa-prefill-backend flashmla_kv over FP8 pages"):
        plugin._forward_flashmla_sparse(None, backend, None, None, 512, None, 1.0)
