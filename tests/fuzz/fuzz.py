#!/usr/bin/env python3
"""Calls ops and chunk caches with random hostile values until the time is up; an oracle checks each result.

    python tests/fuzz/fuzz.py --seconds 60 --seed 0    `make fuzz` does, on a library with sanitizers
    python tests/fuzz/fuzz.py --seed 1234 --calls 1    one call again

Most calls are valid, whatever their indices and lengths hold: their results are those of ``fuzz_oracle``,
what they write has a new version. Some have a cache of a dtype that its layout does not have, and are
refused. The others have one argument spoilt: they are taken, or raise an error that says something and leave
the inputs as they were. The seed of the first call that fails is printed, the exit status is 1.
"""

import argparse
import collections
import sys
import time
from pathlib import Path
from typing import Any

import fuzz_cases
import fuzz_chunk_cases
import fuzz_compress_cases
import fuzz_hot_cases
import fuzz_index_cases
import fuzz_layer_cases
import fuzz_other_cases
import torch
from fuzz_cases import Call, Random
from torch import Tensor

import mla_fp8

ATTENTION = ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window",
             "paged_attention_ragged", "paged_attention_ragged_latent")  # fmt: skip
OTHERS = (
    "quantize_kv",
    "dequantize_kv",
    "dequantize_kv_paged",
    "build_swa_token_ids",
    "combine_topk_swa_indices",
    "combine_topk_swa_indices_ragged",
    "pad_q_heads",
    "merge_attention_states",
    "merge_partial_states",
)
LAYER = (
    "k_norm_rope_insert",
    "qk_norm_rope_insert",
    "prepare_keys",
    "prepare_queries",
    "inverse_rope",
    "inverse_rope_quantize",
)
INDEX = (
    "quantize_index_k",
    "index_logits",
    "index_logits_ragged",
    "index_topk",
    "index_topk_ragged",
    "index_topk_blocks",
    "index_topk_ragged_blocks",
    "topk_to_slots",
    "merge_topk",
)
HOT = ("resolve_hot_rows", "copy_host_rows", "store_host_rows", "forget_rows")
OPS = {name: getattr(fuzz_cases, name) for name in ATTENTION}
OPS |= {name: getattr(fuzz_other_cases, name) for name in OTHERS}
OPS |= {name: getattr(fuzz_layer_cases, name) for name in LAYER}
OPS |= {name: getattr(fuzz_index_cases, name) for name in INDEX}
OPS |= {name: getattr(fuzz_hot_cases, name) for name in HOT}
OPS |= {name: getattr(fuzz_compress_cases, name) for name in ("compress_kv", "pool_index_k")}
FUNCTIONS = {name: getattr(mla_fp8, name) for name in OPS}
OPS["chunk_cache"] = fuzz_chunk_cases.chunk_cache
FUNCTIONS["chunk_cache"] = fuzz_chunk_cases.attend_to_chunk
REFUSALS = (RuntimeError, ValueError, TypeError, OverflowError)


def make_call(seed: int, op: str | None = None) -> tuple[Call, Random]:
    r = Random(seed)
    return OPS[op or r.pick(*OPS)](r), r


def spoilt(r: Random, value: Any) -> Any:
    """A value that the argument may not take. No size is one that memory might be found for."""
    if isinstance(value, list):
        return r.pick(None, 7, [*value, 0], [*value[1:], -1], [*value[1:], 2**31], [*value[1:], 1.5])
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return r.pick(None, "fp8", 3, torch.zeros(2))
    if isinstance(value, int):
        return r.pick(0, -1, 1 << 40, 2**63 - 1, -(2**63), 1.5)
    if isinstance(value, float):
        return r.pick(float("nan"), float("inf"), 1e300, -1.0, 0.0)
    return r.pick(
        lambda x: x.double(),
        lambda x: x.to("meta"),
        lambda x: x[:0],
        lambda x: x[None],
        lambda x: x[..., :-1],
        lambda x: torch.cat([x, x]),
        lambda x: x[:1].expand(3, *x.shape[1:]) if x.dim() and len(x) else x,
        lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.repeat(2)[::2],
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    )(value)


def run(call: Call) -> tuple[Tensor, ...]:
    results = FUNCTIONS[call.op](**call.arguments)
    return results if isinstance(results, tuple) else (results,)


ONE_BYTE = (
    torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2,
)  # fmt: skip
CACHES = {"kv_cache": "layout", "extra_kv_cache": "extra_layout", "index_cache": "index_layout"}


def held(layout: str) -> set[torch.dtype]:
    """The one-byte dtypes that a cache of this layout may have."""
    fp4, e4m3fn = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    numbers = {"dsv41_fp4": {fp4, e4m3fn}, "index_fp4": {fp4}, "bf16": set(), "bf16_512": set()}
    usual = {torch.float8_e4m3fnuz if layout.endswith("_fnuz") else e4m3fn}
    return {torch.uint8, torch.int8, *numbers.get(layout, usual)}


def retyped(r: Random, arguments: dict[str, Any]) -> str | None:
    """Gives each cache a dtype. Returns the name of one whose dtype its layout does not have."""
    wrong = None
    for name, layout in CACHES.items():
        if isinstance(arguments.get(name), Tensor):
            dtype = r.pick(torch.uint8, *ONE_BYTE)
            arguments[name] = arguments[name].view(dtype)
            # pool_index_k has one layout.
            if dtype not in held(arguments.get(layout) or arguments.get("layout", "index_fp8")):
                wrong = wrong or name
    return wrong


def written(op: str, tensors: dict[str, Tensor]) -> set[str]:
    """The arguments in whose memory the op writes."""
    forms = (getattr(torch.ops.mla_fp8, name, None) for name in (op, f"{op}_out"))
    arguments = [x for form in forms if form for x in form.default._schema.arguments]
    names = {x.name for x in arguments if x.alias_info and x.alias_info.is_write} & set(tensors)
    memory = {tensors[name].untyped_storage()._cdata for name in names}
    return {key for key, x in tensors.items() if x.untyped_storage()._cdata in memory}


def check_valid(call: Call, wrong: str | None) -> None:
    """A call with a cache of the wrong dtype is refused. What another writes has a new version after it."""
    tensors = {key: x for key, x in call.arguments.items() if isinstance(x, Tensor)}
    versions = {key: x._version for key, x in tensors.items()}
    try:
        results = run(call)
    except REFUSALS as error:
        assert wrong and f"{wrong} must have dtype" in str(error), f"refused: {error}"
        assert versions == {key: x._version for key, x in tensors.items()}, "a refused call counts as a write"
        return
    assert wrong is None, f"{wrong} as {call.arguments[wrong].dtype} is taken for {call.arguments['layout']}"
    changed = {key for key, x in tensors.items() if x._version != versions[key]}
    assert changed == written(call.op, tensors), f"new versions of {changed}"
    call.check(results)


def bytes_of(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.is_meta:
        return None
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)


def check(seed: int, op: str | None = None) -> str:
    """The op that was called. Raises whatever is wrong."""
    call, r = make_call(seed, op)
    if r.often(0.8):
        check_valid(call, retyped(Random(seed), call.arguments))
        return call.op
    name = r.pick(*call.arguments)
    call.arguments[name] = spoilt(r, call.arguments[name])
    before = {key: bytes_of(x) for key, x in call.arguments.items()}
    try:
        run(call)
    except REFUSALS as error:
        assert str(error), f"{name} is refused without a word"
        for key, x in call.arguments.items():
            assert before[key] is None or torch.equal(bytes_of(x), before[key]), (
                f"{key} was written by a refused call"
            )
    return call.op


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first call; each further one has the next"
    )
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="at most")
    parser.add_argument("--last", type=Path, help="file for the seed of the call that runs, should it end us")
    parser.add_argument("--op", choices=OPS, help="this op alone")
    options = parser.parse_args()
    torch.set_num_threads(2)
    called, deadline = collections.Counter[str](), time.monotonic() + options.seconds
    for seed in range(options.seed, options.seed + options.calls):
        if time.monotonic() > deadline:
            break
        if options.last:
            options.last.write_text(f"{seed}\n")
        try:
            called[check(seed, options.op)] += 1
        except Exception:
            again = f"--op {options.op} " if options.op else ""
            print(
                f"fuzz: failed, again by: python tests/fuzz/fuzz.py {again}--calls 1 --seed {seed}",
                file=sys.stderr,
            )
            raise
    print(
        f"fuzz: {called.total()} calls of {len(called)} ops agree with the oracle, seeds from {options.seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
