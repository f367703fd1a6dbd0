#!/usr/bin/env python3
"""vLLM's layers of DeepSeek V4 and V4.1 without weights, compressor, indexer: random caches and choices.

On a GPU: `v4_layer.py --out FILE`, decode and prefill with FlashMLA and with mla_fp8, errors against exact
attention and times of a graph. PYTHONPATH holds vLLM and mla_fp8.
"""

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import vllm.models.deepseek_v4.nvidia.flashmla as v4
import vllm.models.deepseek_v41.nvidia.flashmla as v41
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.ops import flashmla

import mla_fp8

LAYOUT = mla_fp8.KV_LAYOUTS["dsv4"]
WINDOW, WINDOW_PAGE, MAX_LENGTH, MAX_TOKENS, INDEX_TOPK = 128, 64, 8192, 2048, 512


@dataclass(frozen=True)
class Model:
    """One of vLLM's models. On Hopper both keep V4's rows."""

    name: str
    module: ModuleType
    page_tokens: int
    width: dict[int, int]  # entries that a token may choose, by compress_ratio; 0: the window alone

    @property
    def layer(self) -> type[torch.nn.Module]:
        return self.module.DeepseekV4FlashMLAAttention


V4 = Model("V4", v4, 256, {1: 0, 4: INDEX_TOPK, 128: 128})
V41 = Model("V4.1", v41, 64, {0: 0, 1: INDEX_TOPK, 2: INDEX_TOPK})


@dataclass
class Cache:
    """Pages of one cache, in a random order, and what their slots hold."""

    view: torch.Tensor  # as vLLM has it: [pages, page size, bytes of a row]
    rows: torch.Tensor  # float32
    table: torch.Tensor  # [requests, pages]
    page_size: int

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        pages = self.table[request, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size


def make_cache(lengths: list[int], tokens_of_page: int, page_size: int, device) -> Cache:
    counts = [-(-n // tokens_of_page) for n in lengths]
    order = torch.randperm(sum(counts), device=device).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    pages = LAYOUT.empty(sum(counts), page_size, device).zero_()
    slots = torch.arange(sum(counts) * page_size, device=device)
    latent = torch.randn(len(slots), LAYOUT.head_dim_qk, device=device).bfloat16()
    mla_fp8.quantize_kv(latent, slots, pages, layout=LAYOUT, page_size=page_size)
    rows = mla_fp8.dequantize_kv(pages, slots, layout=LAYOUT, page_size=page_size).float()
    return Cache(LAYOUT.flash_mla_view(pages, page_size).squeeze(2), rows, table, page_size)


@dataclass
class Scenario:
    """A batch before one layer: ``decodes`` lengths of requests, each with ``drafts`` query tokens;
    ``prefills`` (query, sequence) lengths."""

    model: Model
    ratio: int
    heads: int
    decodes: list[int]
    prefills: list[tuple[int, int]]
    device: torch.device
    seed: int = 0
    drafts: int = 1

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        requests = [(self.drafts, n) for n in self.decodes] + self.prefills
        self.query, self.lengths = zip(*requests, strict=True)
        self.num_tokens = sum(self.query)
        self.request = [r for r, n in enumerate(self.query) for _ in range(n)]
        self.positions = [s - q + i for q, s in requests for i in range(q)]
        self.window = make_cache(self.lengths, WINDOW_PAGE, WINDOW_PAGE, self.device)
        self.width, self.entries = self.model.width[self.ratio], None
        if self.width:
            page_tokens = self.model.page_tokens
            self.entries = make_cache(self.lengths, page_tokens, page_tokens // self.ratio, self.device)
        self.chosen = self._choose()
        self.q = (
            torch.randn(self.num_tokens, self.heads, LAYOUT.head_dim_qk, device=self.device).bfloat16() * 1.5
        )
        self.sink = torch.randn(self.heads, device=self.device)
        self.layer, self.metadata = self._layer(), self._metadata()
        self.padded_q = torch.nn.functional.pad(self.q, (0, 0, 0, self.padded - self.heads))
        self.where = torch.tensor(self.positions, device=self.device)

    def _choose(self) -> torch.Tensor:
        chosen = torch.full((self.num_tokens, self.width), -1, dtype=torch.int32)
        for token, position in enumerate(self.positions if self.width else ()):
            have = (position + 1) // self.ratio
            some = torch.randperm(have)[: self.width] if self.width == INDEX_TOPK else torch.arange(have)
            chosen[token, : len(some)] = some.int()
        return chosen.to(self.device)

    def exact(self) -> torch.Tensor:
        outs = []
        for token, position in enumerate(self.positions):
            request = self.request[token]
            window = torch.arange(max(0, position - WINDOW + 1), position + 1, device=self.device)
            keys = [self.window.rows[self.window.slots(request, window).long()]]
            if self.entries is not None:
                chosen = self.chosen[token][self.chosen[token] >= 0]
                keys.append(self.entries.rows[self.entries.slots(request, chosen).long()])
            k = torch.cat(keys).double()
            logits = self.q[token].double() @ k.T * LAYOUT.head_dim_qk**-0.5
            logits = torch.cat([logits, self.sink[:, None].double()], 1)
            outs.append(logits.softmax(1)[:, :-1] @ k)
        return torch.stack(outs)

    def _layer(self) -> torch.nn.Module:
        layer = self.model.layer.__new__(self.model.layer)
        torch.nn.Module.__init__(layer)
        self.padded = layer.get_padded_num_q_heads(self.heads)
        sink = torch.full((self.padded,), float("-inf"), device=self.device)
        sink[: self.heads] = self.sink
        attributes = {
            "compress_ratio": self.ratio, "window_size": WINDOW, "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": MAX_TOKENS, "max_image_tokens": 0, "prefix": "layer",
            "swa_cache_layer": SimpleNamespace(prefix="layer.swa", kv_cache=self.window.view),
            "kv_cache": self.entries.view if self.entries else None, "topk_indices_buffer": self.chosen,
            "scale": LAYOUT.head_dim_qk**-0.5, "attn_sink": sink,
            "n_local_heads": self.heads, "padded_heads": self.padded, "is_kv_source": True,
            "use_pcp": False, "compressed_cache_prefix": "layer" if self.entries else None,
        }  # fmt: skip
        for name, value in attributes.items():
            object.__setattr__(layer, name, value)
        if hasattr(layer, "_get_prefill_num_heads"):  # V4.1 in newer versions
            layer._prefill_num_heads = layer._get_prefill_num_heads()
        return layer

    def _metadata(self) -> dict:
        decodes, tokens, device = len(self.decodes), self.num_tokens, self.device
        decode_tokens = decodes * self.drafts
        start = torch.tensor([0, *self.query]).cumsum(0).int()
        lengths, query = (torch.tensor(x, dtype=torch.int32) for x in (self.lengths, self.query))
        windows = torch.full((decode_tokens, 1, WINDOW), -1, dtype=torch.int32, device=device)
        for token in range(decode_tokens):
            position = self.positions[token]
            window = torch.arange(max(0, position - WINDOW + 1), position + 1, device=device)
            windows[token, 0, : len(window)] = self.window.slots(self.request[token], window)
        request = torch.tensor(self.request, dtype=torch.int32, device=device)
        slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        gathered = (query + (lengths - query).clamp(0, WINDOW - 1))[decodes:]
        swa = DeepseekSparseSWAMetadata(
            block_table=self.window.table, slot_mapping=slots, block_size=WINDOW_PAGE,
            seq_lens=lengths.to(device), query_start_loc=start.to(device), query_start_loc_cpu=start,
            is_valid_token=torch.ones(tokens, dtype=torch.bool, device=device), token_to_req_indices=request,
            decode_swa_indices=windows, decode_swa_lens=(windows >= 0).sum((1, 2)).int(),
            decode_swa_width=WINDOW, num_decodes=decodes, num_prefills=len(self.prefills),
            num_decode_tokens=decode_tokens, num_prefill_tokens=tokens - decode_tokens,
            max_decode_query_len=self.drafts,
            prefill_seq_lens=lengths[decodes:].to(device), prefill_seq_lens_cpu=lengths[decodes:],
            prefill_gather_lens=gathered.to(device), prefill_query_lens_cpu=query[decodes:],
            prefill_window_size=WINDOW, prefill_max_model_len=MAX_LENGTH,
            prefill_max_num_batched_tokens=MAX_TOKENS,
        )  # fmt: skip
        if self.entries is None:
            return {"layer.swa": swa}
        mla = self.model.module.DeepseekV4FlashMLAMetadata(
            num_reqs=len(self.query), max_query_len=max(self.query), max_seq_len=max(self.lengths),
            num_actual_tokens=tokens, query_start_loc=start.to(device), slot_mapping=slots,
            block_table=self.entries.table, req_id_per_token=request, block_size=self.model.page_tokens,
            topk_tokens=INDEX_TOPK,
        )  # fmt: skip
        if self.ratio == 128:
            chosen = self.chosen[:decode_tokens]
            of = self.request[:decode_tokens]
            slots_of = [self.entries.slots(r, chosen[i].clamp_min(0)) for i, r in enumerate(of)]
            where = torch.stack(slots_of) if slots_of else chosen
            mla.c128a_global_decode_topk_indices = where.where(chosen >= 0, -1).int()[:, None]
            mla.c128a_decode_topk_lens = (chosen >= 0).sum(1).int()
            mla.c128a_prefill_topk_indices = self.chosen[decode_tokens:]
        return {"layer": mla, "layer.swa": swa}

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output, of the heads that are there."""
        self.model.module.get_forward_context = lambda: SimpleNamespace(attn_metadata=self.metadata)
        swa = self.metadata["layer.swa"]
        for kind in ("swaonly", "c4a", "c128a", "c1a", "c2a"):
            setattr(swa, f"tile_sched_{kind}", flashmla.FlashMLASchedMeta())
        out = torch.full_like(self.padded_q, float("nan")) if out is None else out
        self.layer.forward_mqa(self.padded_q, None, self.where, out)
        return out[:, : self.heads]


BATCHES = {
    "decode": ([3000, 5000, 90], []), "prefill": ([], [(300, 1000), (200, 200)]),
    "mixed": ([3000], [(130, 2500)]),
}  # fmt: skip


def measure(model: Model, ratio: int, heads: int, batch: str) -> dict:
    scenario = Scenario(model, ratio, heads, *BATCHES[batch], device=torch.device("cuda"))
    row = {"model": model.name, "ratio": ratio, "heads": heads, "batch": batch, "padded": scenario.padded}
    exact, out = scenario.exact(), scenario.attend().double()
    row["error"] = float((out - exact).norm() / exact.norm())
    if not scenario.prefills:
        row["graph_us"] = graph_time(scenario)
    return row


def graph_time(scenario: Scenario, times: int = 50) -> float:
    out = torch.empty(scenario.num_tokens, scenario.padded, LAYOUT.head_dim_v, device="cuda").bfloat16()
    scenario.attend(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scenario.attend(out)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / times, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--who", choices=("stock", "calls"), required=True, help="whose attention")
    args = parser.parse_args()
    os.environ["VLLM_PLUGINS"] = {"stock": "", "calls": "mla_fp8_flash_mla"}[args.who]
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(torch.device("cuda"))
    load_general_plugins()
    rows = [
        measure(model, ratio, heads, batch)
        for model in (V4, V41)
        for ratio, heads, batch in itertools.product(model.width, (16, 128), BATCHES)
    ]
    args.out.write_text(json.dumps({"ok": True, "v4": rows}))
    os._exit(0)  # an engine's threads may outlive it


if __name__ == "__main__":
    main()
