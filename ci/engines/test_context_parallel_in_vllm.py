"""mla_fp8_context_parallel in vLLM's own layer of DeepSeek V3.2, without a GPU (probe.py): indexer, gather of
queries, attention and exchange of two and four ranks, processes that talk by gloo, against one rank.
"""

import without_gpu

without_gpu.pretend_vllm()

import os
from functools import cache
from types import SimpleNamespace

import engine_standins
import forked_ranks
import pytest
import torch
import torch.distributed as dist
import vllm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.model_executor.layers import sparse_attn_indexer as indexer_layer
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.v1.attention.backends.mla import flashmla_sparse, indexer
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import dcp
from vllm.v1.worker import workspace
from vllm_indexer_cases import Keys

import mla_fp8
import mla_fp8_plugins
from mla_fp8.integrations import vllm as plugin
from mla_fp8.integrations import vllm_context_parallel, vllm_indexer, vllm_slots

attention = pytest.importorskip("vllm.models.deepseek_v32.attention")

PAGE, TOPK, LATENT, ROPE, V, MOST = 64, 128, 512, 64, 16, 64
NAME, KEYS = "layer.attn", "layer.indexer.k_cache"
# (length, query tokens) of requests, those of decode first: drafts of a request, then prompts.
STEPS = {
    "decode": ([(500, 1), (300, 1), (70, 1)], 3),
    "drafts": ([(500, 3), (130, 3), (4, 3)], 3),
    "one token": ([(1, 1)], 1),
    "at most topk": ([(TOPK, 2), (17, 2)], 2),
    "prompts": ([(300, 9), (1, 1), (140, 40)], 0),
    "mixed": ([(500, 1), (70, 1), (200, 30), (3, 3)], 2),
    "more tokens than memory": ([(190, 70)], 0),
}
GROUP = SimpleNamespace(
    num_layers=1, has_indexer=True, set_logical_topk_ready=lambda layer: None,
    prepare_for_batch=lambda layer, metadata: None,
)  # fmt: skip
LAYER_OPS = {"decode": [], "drafts": [], "mixed": ["slots"]}  # steps, and what is copied or converted in them
WORLDS = [(2, 1), (2, 64), (4, 16)]  # ranks, interleave
CACHES = ["fp8_ds_mla", "bfloat16"]
HEADS = 128  # of all ranks: 64 or 32 each, both beyond what vLLM's class takes


class Rank:
    """A layer with this rank's part of the keys."""

    def __init__(self, world: int, rank: int, interleave: int, kv_cache_dtype: str) -> None:
        self.world, self.rank, self.interleave, self.heads = world, rank, interleave, HEADS // world
        parallel_state._TP = SimpleNamespace(world_size=world, rank_in_group=rank)
        parallel_state._PCP = SimpleNamespace(world_size=1, rank_in_group=0)
        parallel_state._DCP = None if world == 1 else Group(world, rank)
        self.dtype, self.buffer = kv_cache_dtype, torch.full((200, TOPK), -5, dtype=torch.int32)
        self.config = self._config()
        for module in (flashmla_sparse, sparse_mla_attention, mla_attention):
            if hasattr(module, "get_current_vllm_config"):
                module.get_current_vllm_config = lambda: self.config
        self.layer = self._layer()
        if world > 1:
            kind = plugin.SparseBackend.get_builder_cls()
            self.config.compilation_config.static_forward_context[NAME] = self.layer
            given = SimpleNamespace(block_size=PAGE), [NAME], self.config, torch.device("cpu")
            with pytest.raises(NotImplementedError, match="num_heads < 32"):
                flashmla_sparse.FlashMLASparseMetadataBuilder(*given)
            assert kind(*given).fp8_use_mixed_batch and flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL == 32

    def _config(self):
        text = SimpleNamespace(
            index_topk=TOPK, q_lora_rank=64, kv_lora_rank=LATENT, qk_nope_head_dim=32, qk_rope_head_dim=ROPE,
            v_head_dim=V,
        )  # fmt: skip
        return SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=text, dtype=torch.bfloat16, max_model_len=1024,
                model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
                get_num_attention_heads=lambda parallel: self.heads,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=self.world, prefill_context_parallel_size=1,
                cp_kv_cache_interleave_size=self.interleave, num_ubatches=1, dcp_comm_backend="ag_rs",
                tensor_parallel_size=self.world,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=MOST, max_num_batched_tokens=200),
            cache_config=SimpleNamespace(cache_dtype=self.dtype, block_size=PAGE),
            attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_prefill_workspace_factor=5),
            compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=0),
            kernel_config=SimpleNamespace(enable_jit_warmup=False), num_speculative_tokens=0,
            speculative_config=None,
        )  # fmt: skip

    def _layer(self):
        workspace.init_workspace_manager(torch.device("cpu"))
        kind = plugin.SparseBackend.get_impl_cls()
        impl = kind(
            self.heads, LATENT + ROPE, 0.05, 1, None, None, self.dtype, None, "decoder", None,
            q_lora_rank=64, kv_lora_rank=LATENT, qk_nope_head_dim=32, qk_rope_head_dim=ROPE, qk_head_dim=96,
            v_head_dim=V, kv_b_proj=None, topk_indices_buffer=self.buffer,
        )  # fmt: skip
        assert impl.need_to_return_lse_for_decode == (self.world > 1)
        layer = attention.DeepseekV32Attention.__new__(attention.DeepseekV32Attention)
        torch.nn.Module.__init__(layer)
        of_indexer = SimpleNamespace(
            head_dim=128, topk_tokens=TOPK, k_cache=SimpleNamespace(prefix=KEYS), scale_fmt="ue8m0",
            quant_block_size=128, max_model_len=1024, max_total_seq_len=4096,
            indexer_op=SimpleNamespace(topk_backend="auto"),
        )  # fmt: skip
        vars(layer).update(
            indexer=of_indexer, skip_topk=False, impl=impl, use_pcp=False, hisparse_cache=None,
            _fp8_query=False, _fp8_kv_needs_view=False, layer_name=NAME, num_local_heads=self.heads,
            num_heads=self.heads, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, v_head_dim=V,
            pcp_shard_decode_requests=False, topk_indices_buffer=self.buffer, prefill_backend=None,
            _dense_mha_metadata_layer_name="", _vllm_config=self.config, dcp_manager=None,
        )  # fmt: skip
        if self.world > 1:
            manager = dcp.MLADCPManager(
                self.config, torch.device("cpu"), self.heads, LATENT + ROPE, LATENT, torch.bfloat16,
                torch.bfloat16, None, True, False,
            )  # fmt: skip
            vars(layer)["dcp_manager"] = manager
        return layer

    def own(self, length: int) -> Tensor:
        at = torch.arange(length)
        return at[at // self.interleave % self.world == self.rank]

    def local(self, lens: Tensor) -> Tensor:
        return get_dcp_local_seq_lens(lens, self.world, self.rank, self.interleave)

    def attend(self, step: "Step", whole: bool = False) -> tuple[Tensor, Tensor]:
        """(what the layer writes [tokens, heads of this rank, V], the positions that its indexer chose).

        ``whole``: queries come as mla_fp8_layer_ops makes them, and a layer takes slots.
        """
        vllm_slots.switch(whole)
        self.layer.impl.index_group = GROUP if whole else None
        keys, table, rows = step.of(self)
        mine = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        self.layer.W_UV = step.w_uv[mine]
        self.layer.indexer.k_cache.kv_cache = keys.cache
        metadata = SimpleNamespace(
            num_decode_tokens=step.first, num_actual_tokens=step.tokens, req_id_per_token=step.requests,
            block_table=table, block_size=PAGE, fp8_use_mixed_batch=True, prefill=None,
            num_decodes=step.decodes, decode_max_query_len=step.drafts, prefill_max_seq_len=0,
            cp_kv_cache_interleave_size=self.interleave,
        )  # fmt: skip
        context = SimpleNamespace(
            attn_metadata={NAME: metadata, KEYS: self._of_indexer(step, keys)},
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        )
        for module in (attention, indexer_layer):
            module.get_forward_context = lambda: context
        attention.get_attention_context = lambda name: (metadata, self.layer, rows, None)
        indexer_layer.ops.cp_gather_indexer_k_quant_cache = keys.gather
        flashmla_sparse.ops.concat_mla_q = lambda nope, pe, q: q[:, : nope.shape[1]].copy_(
            torch.cat([nope, pe], -1)
        )
        self.buffer.fill_(-1)  # as the kernel before it does
        out = torch.full((step.tokens, self.heads * V), float("nan")).bfloat16()
        q = step.q[:, mine]
        with torch.no_grad():
            attention.DeepseekV32Attention._sparse_indexer_and_attn(
                self.layer, None, q[:, 0], None, None, step.index_q, None, step.weights, None, None,
                q.clone().as_subclass(vllm_context_parallel.Whole) if whole else q[..., :LATENT],
                q[..., LATENT:], out,
            )  # fmt: skip
        return out.view(step.tokens, self.heads, V), self.buffer[: step.tokens].clone()

    def _of_indexer(self, step: "Step", keys: Keys):
        decode = prefill = None
        if step.first:
            lens = step.lens[: step.first].view(step.decodes, step.drafts)
            decode = indexer.DeepSeekV32IndexerDecodeMetadata(
                block_table=keys.table[: step.decodes], seq_lens=self.local(lens).contiguous(),
                decode_lens=torch.full((step.decodes,), step.drafts, dtype=torch.int32),
                requires_padding=False, schedule_metadata=torch.empty(0),
                global_seq_lens=None if self.world == 1 else lens[:, -1].contiguous(),
            )  # fmt: skip
        if step.first < step.tokens:
            counts = self.local(torch.tensor(step.lengths[step.decodes :]))
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
            ks = starts[(step.requests[step.first :] - step.decodes).long()]
            total = int(starts[-1])
            chunk = indexer.DeepseekV32IndexerPrefillChunkMetadata(
                block_table=keys.table[step.decodes :], cu_seqlen_ks=ks, cu_seq_lens=starts,
                cu_seqlen_ke=ks + self.local(step.lens[step.first :]), token_to_seq=torch.empty(0),
                total_seq_lens=total, max_seqlen_k=1024, token_start=step.first, token_end=step.tokens,
                num_reqs=len(counts), skip_kv_gather=False, local_cu_seq_lens=starts,
                local_total_seq_lens=total, max_local_total_seq_lens=total,
            )  # fmt: skip
            prefill = indexer.DeepseekV32IndexerPrefillMetadata(chunks=[chunk])
        return indexer.DeepseekV32IndexerMetadata(
            seq_lens=torch.empty(0), max_seq_len=1024, slot_mapping=torch.empty(step.tokens),
            num_decodes=step.decodes, num_decode_tokens=step.first,
            num_prefills=len(step.lengths) - step.decodes, num_prefill_tokens=step.tokens - step.first,
            decode=decode, prefill=prefill,
        )  # fmt: skip


class Step:
    """Queries, keys and rows of all ranks, alike in every process."""

    def __init__(self, requests: list[tuple[int, int]], decodes: int, kv_cache_dtype: str) -> None:
        torch.manual_seed(0)
        self.lengths, self.decodes, self.dtype = [n for n, _ in requests], decodes, kv_cache_dtype
        self.drafts = requests[0][1]
        self.first = sum(n for _, n in requests[:decodes])
        rows = [(r, n - count + 1 + j) for r, (n, count) in enumerate(requests) for j in range(count)]
        self.tokens = len(rows)
        self.requests, self.lens = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        self.keys = Keys(self.lengths)
        self.index_q, self.weights = self.keys.queries(self.tokens)
        self.q = torch.randn(self.tokens, HEADS, LATENT + ROPE).bfloat16()
        self.w_uv = (torch.randn(HEADS, LATENT, V) * 0.05).bfloat16()
        self.rows = [torch.randn(n, LATENT + ROPE).bfloat16() for n in self.lengths]

    def of(self, rank: Rank) -> tuple[Keys, Tensor, Tensor]:
        """What a rank has: index keys in their cache, and a table of pages with the cache of rows."""
        own = [rank.own(n) for n in self.lengths]
        keys = Keys([len(at) for at in own])
        keys.keys = [x[at] for x, at in zip(self.keys.keys, own, strict=True)]
        keys.scales = [x[at] for x, at in zip(self.keys.scales, own, strict=True)]
        for r in range(len(own)):
            pages = keys.table[r, : -(-len(own[r]) // PAGE)].tolist()
            for page, begin in zip(pages, range(0, len(own[r]), PAGE), strict=True):
                flat = keys.cache.as_strided((len(keys.cache), PAGE * 132), (keys.cache.stride(0), 1))
                for x, at in ((keys.keys[r], 0), (keys.scales[r], PAGE * 128)):
                    part = x[begin : begin + PAGE].view(torch.uint8).flatten()
                    flat[page, at : at + len(part)] = part
        rows = torch.cat([x[at] for x, at in zip(self.rows, own, strict=True)])
        slots = torch.cat(
            [
                keys.table[r, torch.arange(len(at)) // PAGE].long() * PAGE + torch.arange(len(at)) % PAGE
                for r, at in enumerate(own)
            ]
        )
        if self.dtype == "bfloat16":
            cache = torch.full((len(keys.cache), PAGE, LATENT + ROPE), float("nan")).bfloat16()
            cache.view(-1, LATENT + ROPE)[slots] = rows
            return keys, keys.table, cache
        layout = mla_fp8.KV_LAYOUTS["dsv32"]
        cache = torch.full((len(keys.cache), PAGE, layout.bytes_per_token), 255, dtype=torch.uint8)
        mla_fp8.quantize_kv(
            rows[:, :LATENT].contiguous(), slots, cache, rope=rows[:, LATENT:].contiguous(), layout=layout,
            page_size=PAGE,
        )  # fmt: skip
        return keys, keys.table, cache


class Group:
    """What the layer and the plug-in use of vLLM's GroupCoordinator."""

    def __init__(self, world: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.device_group = world, rank, dist.group.WORLD

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.device_group)
        return torch.cat(parts, dim)


def triton_convert_req_index_to_global_index(req_id, block_table, positions, **options):
    """Of one rank, in PyTorch: pages lie next to each other."""
    options = {name: x for name, x in options.items() if not name.lower().startswith("block_")}
    return engine_standins.triton_convert_req_index_to_global_index(
        req_id, block_table, positions, BLOCK_SIZE=PAGE, **options | {"NUM_TOPK_TOKENS": TOPK}
    )


convert = triton_convert_req_index_to_global_index


class Copies(TorchDispatchMode):
    """What is concatenated to queries, and positions that are converted outside of the merge of choices."""

    def __enter__(self):
        self.found: list[str] = []
        self.converts = vllm_context_parallel.topk_to_slots
        vllm_context_parallel.topk_to_slots = lambda *a, **o: (
            self.found.append("slots") or self.converts(*a, **o)
        )
        return super().__enter__()

    def convert(self, *args, **options):
        self.found.append("slots")
        return self.converts(*args, **options)

    def __exit__(self, *error):
        vllm_context_parallel.topk_to_slots = self.converts
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and made.dim() == 3:
            self.found.append("queries")
        return made


def plug_in() -> None:
    vllm.envs.VLLM_PLUGINS = ["mla_fp8", vllm_indexer.NAME, vllm_context_parallel.NAME]
    for _ in range(2):
        mla_fp8_plugins.vllm()
        vllm_indexer.register()
        mla_fp8_plugins.vllm_context_parallel()


@cache
def of_ranks(world: int, interleave: int) -> list[dict]:
    def run(rank: int) -> dict:
        os.environ["VLLM_USE_DIRECT_DCP_Q_GATHER"] = "0"  # it needs multicast
        plug_in()
        torch.accelerator.empty_cache = lambda: None
        setattr(flashmla_sparse, convert.__name__, convert)
        kind = plugin.SparseBackend.get_impl_cls()
        kind._convert_logical_to_physical_topk = lambda impl, topk, metadata, **options: convert(
            metadata.req_id_per_token[: len(topk)], metadata.block_table, topk, **options
        )
        found = {}
        for dtype in CACHES:
            made = Rank(world, rank, interleave, dtype)
            for name, (requests, decodes) in STEPS.items():
                step = Step(requests, decodes, dtype)
                for whole in [False, True] if world > 1 and name in LAYER_OPS else [False]:
                    with Copies() as copies:
                        out, chosen = made.attend(step, whole)
                    key = (dtype, name, "whole") if whole else (dtype, name)
                    found[key] = out.float().numpy(), chosen.numpy(), copies.found
        return found

    return forked_ranks.of_ranks(world, run)


@pytest.mark.parametrize("world, interleave", WORLDS)
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("step", STEPS)
def test_ranks_choose_and_attend_as_one_rank_does(step, dtype, world, interleave):
    (want, chosen, _), parts = of_ranks(1, 1)[0][dtype, step], of_ranks(world, interleave)
    for rank in parts:
        assert (rank[dtype, step][1] == chosen).all()
    got = torch.cat([torch.from_numpy(rank[dtype, step][0]) for rank in parts], 1)
    want = torch.from_numpy(want)
    errors = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))  # parts of ranks are bf16
    assert errors.max() < 8e-3


@pytest.mark.parametrize("world, interleave", WORLDS)
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("step", LAYER_OPS)
def test_whole_queries_are_not_copied_and_slots_come_with_the_choice(step, dtype, world, interleave):
    """Beside attention to a step of decode are then the gather and the merge, beside the top-k one merge."""
    for rank in of_ranks(world, interleave):
        *got, copies = rank[dtype, step, "whole"]
        *want, more_copies = rank[dtype, step]
        assert all((x == y).all() for x, y in zip(got, want, strict=True))
        assert copies == LAYER_OPS[step] and more_copies == ["queries", "slots"]


def test_queries_whose_rope_part_comes_twice_are_gathered_once():
    few = SimpleNamespace(max_tokens=8, head_dim_qk=LATENT + ROPE, gather_queries=lambda q: q)
    q = torch.randn(2, 4, LATENT + ROPE)
    wide = torch.cat([q, q[..., LATENT:]], -1)
    assert torch.equal(vllm_context_parallel.Ranks(few, few).query_gather(wide), q)


def test_nothing_that_we_build_on_is_missing():
    assert vllm_context_parallel.why_not() is None
