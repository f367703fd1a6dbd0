"""vLLM's function of the lightning indexer by itself, on its own metadata: rows of decode and of prompts."""

import dataclasses
import inspect
import itertools
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.worker import workspace
from vllm_indexer_cases import Keys, Row

PREFIX, TOPK, MAX_LENGTH, MOST = "layer.k_cache", 32, 1024, 64


class Batch:
    """``decodes``: (length, drafts) of requests, with their drafts; ``prompts``: (tokens, length).

    native: drafts of a request together, as one q of all; else a request of its own each, as on GPUs whose
    DeepGEMM does not take as many. chunks: prompts come in as many, cut by queries, of one gather.
    """

    def __init__(
        self, decodes: list[tuple[int, int]], prompts: list[tuple[int, int]] = (), *, native: bool = True,
        chunks: int = 1, padded: int = 0,
    ) -> None:  # fmt: skip
        self.keys = Keys([n for n, _ in decodes] + [n for _, n in prompts])
        self.rows = [
            Row(r, length - drafts + 1 + j)
            for r, (length, drafts) in enumerate(decodes)
            for j in range(drafts)
        ]
        num_tokens, r = len(self.rows), len(decodes)
        self.decode = self.prefill = None
        if decodes:
            self.decode = self._decode(decodes, padded, native)
        self.padding = padded * max([drafts for _, drafts in decodes], default=0)
        first = num_tokens + self.padding
        self.rows += [None] * self.padding  # rows that nobody reads
        self.rows += [
            Row(r + p, length - tokens + 1 + j)
            for p, (tokens, length) in enumerate(prompts)
            for j in range(tokens)
        ]
        if prompts:
            self.prefill = self._prefill(prompts, r, first, chunks)
        self.num_prompts, self.num_decode_tokens = len(prompts), first
        self.num_decodes = len(decodes) + padded
        self.q, self.weights = self.keys.queries(len(self.rows))

    def _decode(self, decodes, padded, native):
        """By the method of vLLM's builder that makes rows of requests."""
        lens = torch.tensor([n for n, _ in decodes] + [0] * padded, dtype=torch.int32)
        drafts = max(n for _, n in decodes)
        counts = torch.tensor([n for _, n in decodes] + [drafts if native else 0] * padded, dtype=torch.int32)
        table = torch.cat([self.keys.table[: len(decodes)], self.keys.table[:1].expand(padded, -1)])
        builder = SimpleNamespace(
            vllm_config=SimpleNamespace(speculative_config=None), supports_varlen=False,
            decode_seq_lens_buffer=torch.full((MOST,), 77, dtype=torch.int32),
            expanded_block_table_buffer=torch.full((MOST, table.shape[1]), 1 << 30, dtype=torch.int32),
            decode_lens_buffer=torch.zeros(MOST, dtype=torch.int32), offsets_buffer=torch.arange(MOST),
            arange_buffer=torch.arange(MOST, dtype=torch.int32),
        )  # fmt: skip
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1].int()])
        num_tokens = int(counts.sum()) + (0 if native else padded * drafts)
        seq_lens, table, lens_of, _, requires_padding = (
            indexer.DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors(
                builder, lens, table, counts, counts, starts, len(lens), num_tokens, native, drafts, drafts
            )
        )
        assert not requires_padding
        return indexer.DeepSeekV32IndexerDecodeMetadata(
            block_table=table, seq_lens=seq_lens.view(len(seq_lens), -1), decode_lens=lens_of,
            requires_padding=False, schedule_metadata=torch.empty(0),
        )  # fmt: skip

    def _prefill(self, prompts, request, first, number):
        lens = torch.tensor([n for _, n in prompts], dtype=torch.int32)
        starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).int()])
        rows = self.rows[first:]
        bounds = [len(rows) * c // number for c in range(number + 1)]
        chunks = []
        for begin, end in itertools.pairwise(bounds):
            of = [rows[i].request - request for i in range(begin, end)]
            ks = starts[of]
            ke = ks + torch.tensor([row.length for row in rows[begin:end]], dtype=torch.int32)
            given = {
                "block_table": self.keys.table[request:], "cu_seqlen_ks": ks, "cu_seqlen_ke": ke,
                "cu_seq_lens": starts, "token_to_seq": torch.empty(0), "total_seq_lens": int(starts[-1]),
                "max_seqlen_k": int((ke - ks).max()), "token_start": first + begin, "token_end": first + end,
                "num_reqs": len(lens), "skip_kv_gather": begin > 0, "local_cu_seq_lens": starts,
                "local_total_seq_lens": int(starts[-1]), "max_local_total_seq_lens": int(starts[-1]),
            }  # fmt: skip
            kind = indexer.DeepseekV32IndexerPrefillChunkMetadata
            names = {field.name for field in dataclasses.fields(kind)}  # of this version
            chunks.append(kind(**{name: x for name, x in given.items() if name in names}))
        return indexer.DeepseekV32IndexerPrefillMetadata(chunks=chunks)

    def run(self, monkeypatch, **options) -> Tensor:
        """The positions of each row. Outside of an engine the gather, which is compiled, is PyTorch's."""
        workspace.init_workspace_manager(torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(layer.ops, "cp_gather_indexer_k_quant_cache", self.keys.gather)
        metadata = indexer.DeepseekV32IndexerMetadata(
            seq_lens=torch.empty(0), max_seq_len=MAX_LENGTH, slot_mapping=torch.empty(len(self.rows)),
            num_decodes=self.num_decodes, num_decode_tokens=self.num_decode_tokens,
            num_prefills=self.num_prompts, num_prefill_tokens=len(self.rows) - self.num_decode_tokens,
            decode=self.decode, prefill=self.prefill,
        )  # fmt: skip
        context = SimpleNamespace(attn_metadata={PREFIX: metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        monkeypatch.setattr(layer, "get_forward_context", lambda: context)
        buffer = torch.full((len(self.rows) + 1, TOPK), -5, dtype=torch.int32)
        given = {
            "k_cache_prefix": PREFIX, "kv_cache": self.keys.cache, "q_quant": self.q, "q_scale": None,
            "k": None, "weights": self.weights, "quant_block_size": 128, "scale_fmt": "ue8m0",
            "topk_tokens": TOPK, "head_dim": 128, "max_model_len": MAX_LENGTH,
            "total_seq_lens": 4 * MAX_LENGTH, "topk_indices_buffer": buffer, "skip_k_cache_insert": True,
            "use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": "",
        } | options  # fmt: skip
        names = inspect.signature(layer.sparse_attn_indexer).parameters  # of this version
        result = layer.sparse_attn_indexer(
            torch.empty(len(self.rows), 1), **{name: x for name, x in given.items() if name in names}
        )
        assert result is buffer and (buffer[len(self.rows) :] == -5).all()
        return buffer[: len(self.rows)]

    def assert_chosen(self, got: Tensor) -> None:
        real = [i for i, row in enumerate(self.rows) if row is not None]
        assert all((got[i] == -1).all() for i, row in enumerate(self.rows) if row is None)
        self.keys.assert_chosen(
            got[real], self.q[real], self.weights[real], [self.rows[i] for i in real], TOPK
        )

    def best(self, row: int, beyond: int) -> list[int]:
        """What a row wants of its entries from ``beyond`` on."""
        logits = self.keys.logits(self.q[row], self.weights[row], self.rows[row])
        return sorted((logits[beyond:].topk(TOPK).indices + beyond).tolist())

    def paged_logits(self, q, cache, weights, lens, table, schedule, width, *args, **options) -> Tensor:
        """In place of DeepGEMM's."""
        return self._logits(weights, range(len(weights)), width)

    def ragged_logits(self, q, kv, weights, starts, ends, *args, **options) -> Tensor:
        """In place of DeepGEMM's of 0.33, whose rows begin at their first key."""
        return self._logits(weights, range(len(weights)), int((ends - starts).max()))

    def _logits(self, weights, rows, width) -> Tensor:
        logits = torch.full((len(weights), width), float("nan"))
        for r in rows:
            found = self.keys.logits(self.q[r], self.weights[r], self.rows[r]).float()
            logits[r, : len(found)] = found
        return logits

    @staticmethod
    def top_k_per_row_prefill(logits, starts, ends, out, rows, stride0, stride1, topk) -> None:
        """In place of vLLM's kernel."""
        assert (stride0, stride1) == logits.stride()
        for r in range(rows):
            begin, end = int(starts[r]), int(ends[r])
            out[r] = logits[r, begin:end].topk(topk).indices
