"""A step of vLLM with prompts of many heads, whose rows it gathers chunk by chunk, and decode beside them."""

from types import SimpleNamespace

import torch
from sparse_cases import exact_latents

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

NAN, DSV32 = float("nan"), KV_LAYOUTS["dsv32"]


def prompts_of_many_heads(impl, device):
    """Two requests that decode and two prompts of 40 and 25 tokens, each a chunk of its own; what the method
    for them gives, the output that lies in vLLM's workspace, and the results in float64."""
    block, lens, decodes, heads = 64, [150, 90, 40, 25], 2, 64
    cache = DSV32.empty(12, block, device)
    rows = exact_latents(DSV32, 12 * block, device)
    mla_fp8.quantize_kv(rows, torch.arange(len(rows), device=device), cache, layout=DSV32, page_size=block)
    table = torch.tensor([[4, 0, 5], [2, 1, 3], [6, 8, 7], [11, 9, 10]], dtype=torch.int32, device=device)
    tokens = [(0, 149), (1, 89), *((r, p) for r in (2, 3) for p in range(lens[r]))]
    request, position = torch.tensor(tokens, device=device).T
    positions = torch.arange(64, device=device).expand(len(tokens), -1)
    positions = positions.where(positions <= position[:, None], -1).int()
    page = table[request[:, None], positions.clamp_min(0).long() // block]
    slots = (page * block + positions % block).where(positions >= 0, -1)
    q = torch.randn(len(tokens), heads, 576, device=device).bfloat16()
    exact = reference.sparse_attention(q.double(), [(rows, slots, None)], sm_scale=0.1)
    out = torch.full((len(tokens) + 9, heads, 512), NAN, device=device).bfloat16()
    workspace = torch.full((64, 576), NAN, device=device).bfloat16()

    def gather(kv_cache, to, block_table, starts, number):
        (r,) = [int(r) for r in range(4) if block_table.data_ptr() == table[r].data_ptr()]
        assert number == 1 and len(to) == lens[r] and kv_cache.shape == (12, block, DSV32.bytes_per_token)
        at = torch.arange(lens[r], device=device)
        to.copy_(rows[table[r, at // block] * block + at % block])

    first = {2: decodes, 3: decodes + lens[2]}
    chunks = [
        SimpleNamespace(
            tokens_slice=slice(first[r], first[r] + lens[r]), chunk_tot_seqlen=lens[r],
            block_table=table[r : r + 1], workspace_starts=torch.zeros(1, dtype=torch.int32, device=device),
        )
        for r in (2, 3)
    ]  # fmt: skip
    prefill = SimpleNamespace(
        chunks=chunks, request_ids=(request - 2).clamp_min(-1).int(),
        workspace_starts=torch.zeros(2, dtype=torch.int32, device=device),
    )  # fmt: skip
    metadata = SimpleNamespace(
        req_id_per_token=request.int(), block_table=table, block_size=block, num_decode_tokens=decodes,
        num_actual_tokens=len(tokens), num_decodes=decodes, num_reqs=decodes + 2,
        max_query_len=max(lens), query_start_loc=None,
        fp8_extra_metadata=SimpleNamespace(num_decode_tokens=decodes, num_decodes=decodes, prefill=prefill),
    )  # fmt: skip
    impl.workspace_specs = ()
    made = [torch.empty(0), workspace, torch.empty(0), torch.empty(0), out]
    manager = SimpleNamespace(get_simultaneous=lambda *specs: made)
    return SimpleNamespace(
        arguments=(q, cache.view(12, block, -1), positions, metadata), out=out, exact=exact,
        replaced={
            "current_workspace_manager": lambda: manager,
            "ops": SimpleNamespace(cp_gather_and_upconvert_fp8_kv_cache=gather),
        },
    )  # fmt: skip
