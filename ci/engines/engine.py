#!/usr/bin/env python3
"""One vLLM engine with a random model: logprobs, calls and kernel times, as JSON. Started by matrix.py."""

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import model
import ranks
import torch
import v4_model
from turns import ROUNDS, ready, turn

# By whose attention it is. index: ours, and our indexer. groups: ours, drafts in groups. layer: ours, and our
# ops around it. whole: layer and index. hisparse: ours, and our kernels of HiSparse. same: ours, and vLLM's
# switch for the same bits. ranks: whole, by ranks that have a part of the context each; theirs, direct: with
# the exchange that vLLM has by default, and with its own over symmetric memory. mla_fp8_engines:
# model.register, in every process.
_WHOLE = "mla_fp8_engines,mla_fp8,mla_fp8_flash_mla,mla_fp8_layer_ops,mla_fp8_index_topk"
VLLM_PLUGINS = {
    "stock": "mla_fp8_engines", "ours": "mla_fp8_engines,mla_fp8", "exact": "mla_fp8_engines,mla_fp8",
    "calls": "mla_fp8_engines,mla_fp8_flash_mla",
    "index": "mla_fp8_engines,mla_fp8,mla_fp8_flash_mla,mla_fp8_index_topk",
    "groups": "mla_fp8_engines,mla_fp8,mla_fp8_flash_mla,mla_fp8_query_groups",
    "layer": "mla_fp8_engines,mla_fp8,mla_fp8_flash_mla,mla_fp8_layer_ops",
    "whole": _WHOLE,
    "hisparse": "mla_fp8_engines,mla_fp8,mla_fp8_hisparse", "same": "mla_fp8_engines,mla_fp8",
    **dict.fromkeys(("ranks", "theirs", "direct"), f"{_WHOLE},mla_fp8_context_parallel"),
}  # fmt: skip
CONTEXT_PARALLEL = ("ranks", "theirs", "direct")
ACCURACY_LENGTHS = (3000, 4100, 5200, 6000, 200, 2500)
# With drafts, too: where --seqs is few, one begins beside the drafts of others, which are more or fewer.
SHORT_LENGTHS = (7, 2, 5, 1, 3, 6)
CONTEXT, FIRST_STEPS, DECODE_STEPS = 4096, 16, 48
FIRST_TOKEN_PROMPT, FIRST_TOKEN_RUNS = 64, 20
V4_CACHE = "dsv4"
# The caches of other models than V3.2, and what these change; and of V3.2 on two GPUs.
CACHES = {
    "glm52": "fp8_ds_mla", "glm52_bf16": "bfloat16", "glm53": "fp8_ds_mla", "glm53_bf16": "bfloat16",
    "two": "fp8_ds_mla", "two_bf16": "bfloat16",
}  # fmt: skip
CHANGES = {"glm52": model.GLM, "glm53": model.GLM_POOLS}
HOST_GIB, HOT_GPU_BYTES = 2, 96 << 20  # HiSparse: the GPU has less than the rows of all prompts


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--who", choices=VLLM_PLUGINS, required=True, help="whose attention")
    p.add_argument("--heads", type=int, default=128)
    p.add_argument(
        "--kv", default="fp8_ds_mla", help=f"cache; {V4_CACHE}, {', '.join(CACHES)}: of that model"
    )
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--budget", type=int, default=2048, help="tokens of a step: longer prompts come in chunks")
    p.add_argument("--seqs", type=int, default=16)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--mtp", type=int, default=0)
    p.add_argument("--multiprocessing", action="store_true", help="the engine in a process of its own")
    p.add_argument("--tensor-parallel", type=int, default=1)
    p.add_argument("--batches", type=int, nargs="*", default=[], help="time these instead of taking logprobs")
    p.add_argument("--logprobs", action="store_true", help="take them besides what is timed")
    p.add_argument("--first-token", action="store_true", help="time short prompts instead of taking logprobs")
    p.add_argument("--context", type=int, default=CONTEXT, help="tokens of a prompt that is timed")
    p.add_argument("--loaded", type=int, nargs="*", default=[], help="time prompts of so many, not computed")
    p.add_argument("--hot-rows", type=int, default=0, help="HiSparse with a hot buffer of so many")
    p.add_argument("--same-bits", action="store_true", help="the engine's switch for them")
    p.add_argument("--new", type=int, default=48)
    p.add_argument("--turns", type=Path, help="folder: wait until --of engines are ready, then one at a time")
    p.add_argument("--of", type=int, default=1)
    p.add_argument("--repeat-prompts", action="store_true", help="each prompt again: prefix caching")
    args = p.parse_args(arguments)
    args.same_bits |= args.who == "same"
    return args


def longest(args: argparse.Namespace) -> int:
    return max(model.MAX_LENGTH, max(args.loaded, default=args.context) + model.MAX_LENGTH // 2)


def on_two(args: argparse.Namespace) -> bool:
    return args.kv.startswith("two")


def options(args: argparse.Namespace, folder: str) -> dict:
    capture = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= max(16, args.seqs * (1 + args.mtp))]
    own = {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "kv_cache_dtype": args.kv, "max_model_len": longest(args), "max_num_batched_tokens": args.budget,
        "max_num_seqs": args.seqs, "enforce_eager": args.eager, "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": bool(args.batches) or args.repeat_prompts, "seed": 0, "max_logprobs": 20,
        "disable_log_stats": True, "kv_cache_memory_bytes": (8 if args.batches else 3) << 30,
        "tensor_parallel_size": args.tensor_parallel,
        # Without it prompts of up to some thousand tokens go to dense attention, which is no sparse kernel's.
        "attention_config": {"sparse_mla_force_mqa": True},
    }  # fmt: skip
    if args.hot_rows:
        own["attention_config"]["hisparse_config"] = {"device_buffer_size": args.hot_rows}
        own["kv_cache_memory_bytes"] = HOT_GPU_BYTES
        own["kv_transfer_config"] = {
            "kv_connector": "HiSparseConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": HOST_GIB},
        }  # fmt: skip
    if not args.multiprocessing:
        own["async_scheduling"] = False
    if not args.eager:
        own["compilation_config"] = {"cudagraph_capture_sizes": capture}
    if args.kv in CACHES:
        own["kv_cache_dtype"] = CACHES[args.kv]
    if on_two(args):
        own |= {"tensor_parallel_size": 2, "worker_extension_cls": "ranks.Worker"}
    if args.who in CONTEXT_PARALLEL:
        own["decode_context_parallel_size"] = 2
        own["dcp_comm_backend"] = "a2a" if args.who == "direct" else "ag_rs"
    if args.loaded:  # nobody computes these prompts: the ranks fill their caches
        rows = max(args.batches) * longest(args) // own.get("decode_context_parallel_size", 1)
        row, key = ranks.layouts()
        of_token = row.bytes_per_token + key.bytes_per_entry
        own["kv_cache_memory_bytes"] = int(1.1 * rows * of_token * args.layers)
        own["enable_prefix_caching"] = False
        own["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0},
        }  # fmt: skip
    if args.kv.startswith("glm53"):  # else vLLM expects layers of linear attention
        own["hf_overrides"] = {"layer_types": ["full_attention"] * args.layers}
    if args.kv == V4_CACHE:  # its layer knows vLLM's backends only; warm-up is for kernels that are replaced
        own |= {"kv_cache_dtype": "fp8", "block_size": v4_model.PAGE}
        own |= {"kernel_config": {"enable_jit_warmup": False}}
    elif args.who not in ("stock", "calls"):
        own["attention_backend"] = "MLA_FP8"
    elif own["kv_cache_dtype"] == "bfloat16":
        own["attention_backend"] = "FLASHMLA_SPARSE"
    if args.mtp:
        own["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.mtp}
    return own


def selected(llm) -> list[str]:
    """The backend of every kind of layer, as the engine resolved it."""
    found = set()
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None and getattr(layer, "impl", None) is not None:
            impl = type(layer.impl)
            found.add(
                f"{backend.__module__}.{backend.__qualname__} ({backend.get_name()}), {impl.__module__}"
            )
        if hasattr(layer, "padded_heads"):  # V4's layer
            found.add(f"{type(layer).__qualname__}, {layer.n_local_heads} heads as {layer.padded_heads}")
    return sorted(found)


def prompts(lengths, seed: int) -> list[dict]:
    g = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(2, model.VOCABULARY, (n,), generator=g).tolist()} for n in lengths
    ]


def generate(llm, ids: list[dict], new: int, **sampling):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **sampling)
    return llm.generate(ids, params, use_tqdm=False)


def logprobs(llm, args: argparse.Namespace) -> dict:
    ids = prompts(ACCURACY_LENGTHS + (SHORT_LENGTHS if args.mtp else ()), seed=7)
    # Logprobs of a prompt are not computed for cached tokens, and not with speculation.
    wanted = None if args.mtp or args.repeat_prompts or args.hot_rows or args.same_bits else 1
    begin = time.time()
    outputs = generate(llm, ids, args.new, logprobs=1, prompt_logprobs=wanted)
    if args.repeat_prompts:
        outputs = generate(llm, ids, args.new, logprobs=1)
    result = {"generate_s": time.time() - begin, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    steps = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in outputs]
    result["logprobs"] = [[step[token].logprob for token, step in each] for each in steps]
    if wanted:
        result["prompt_logprobs"] = [
            [
                step[token].logprob
                for token, step in zip(o.prompt_token_ids, o.prompt_logprobs, strict=True)
                if step
            ]
            for o in outputs
        ]
    if on_two(args):
        result["logprobs_as_prompts"] = as_prompts(llm, outputs, args.new)
    return result


def as_prompts(llm, outputs: list, new: int) -> list[list[float]]:
    """The logprobs of the ``new`` tokens that were generated, as ends of prompts."""
    ids = [{"prompt_token_ids": [*o.prompt_token_ids, *o.outputs[0].token_ids]} for o in outputs]
    found = generate(llm, ids, 1, prompt_logprobs=1)
    steps = [list(zip(o.prompt_token_ids, o.prompt_logprobs, strict=True))[-new:] for o in found]
    return [[step[token].logprob for token, step in each] for each in steps]


def rows_found_and_loaded(llm) -> list[int]:
    """What vLLM's counters of HiSparse have, over all groups of layers."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = [cache for x in layers.values() if (cache := getattr(x, "hisparse_cache", None)) is not None]
    groups = {id(cache.runtime.index_group): cache.runtime.index_group for cache in caches}
    return torch.stack([group.swap_stats.long() for group in groups.values()]).sum(0).tolist()


def kernels(run) -> collections.Counter:
    """What `ranks.counted` counts of the kernels in ``run()``."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return ranks.counted(ranks.on_gpu(profiler))


def timed(llm, args: argparse.Namespace) -> dict:
    """Per batch: kernels of a prompt (first batch only) and of a decode step, in microseconds.

    The prompts are cached but for their ends, which are computed in the first steps of every run: more tokens
    than one step takes, so some requests decode beside others' prompts. Two runs differ in decode steps of
    the whole batch alone if the shorter one goes on until all have begun.
    """
    result = {}
    for number, batch in enumerate(args.batches):
        ids = prompts([args.context] * batch, seed=100 + number)
        warm = prompts([args.context], seed=99)
        generate(llm, warm, 2)
        one = {}
        if number == 0:
            one["prefill"] = per(kernels(lambda ids=ids: generate(llm, ids, 1)), batch)
        generate(llm, ids, FIRST_STEPS)
        short = kernels(lambda ids=ids: generate(llm, ids, FIRST_STEPS))
        long = kernels(lambda ids=ids: generate(llm, ids, FIRST_STEPS + DECODE_STEPS))
        long.subtract(short)
        one["decode"] = per(long, DECODE_STEPS)
        result[str(batch)] = one
        print("TIMED", batch, round(sum(us for us, *_ in one["decode"].values())), "us a step", flush=True)
    return result


def timed_loaded(llm, args: argparse.Namespace) -> dict:
    """Decode steps of the first rank behind contexts that nobody has computed. Each has all requests."""
    if min(llm.collective_rpc("mla_fp8_fill")) < 2 * args.layers:
        raise RuntimeError("fewer caches were filled than the layers have")
    result: dict[str, dict] = {"timed": {}, "step_us": {}}
    for number, context in enumerate(args.loaded):
        for batch in args.batches:
            ids = prompts([context] * batch, seed=100 + number)
            if number == 0:
                generate(llm, ids, 2)
            short = ranks.kernels(llm, lambda ids=ids: generate(llm, ids, FIRST_STEPS))
            long = ranks.kernels(llm, lambda ids=ids: generate(llm, ids, FIRST_STEPS + DECODE_STEPS))
            long.subtract(short)
            name = f"{batch} x {context}"
            result["step_us"][name] = long.pop(("", "span")) / DECODE_STEPS
            result["timed"][name] = {"decode": per(long, DECODE_STEPS)}
            us = sum(us for us, *_ in result["timed"][name]["decode"].values())
            print("TIMED", name, f"{us:.0f} us of kernels, {result['step_us'][name]:.0f} a step", flush=True)
    return result


def per(found: collections.Counter, number: int) -> dict[str, tuple[float, float, float]]:
    """(microseconds, launches, those in graphs) of each kernel, of one of ``number`` steps."""
    return {
        name: (us / number, found[name, "n"] / number, found[name, "graph"] / number)
        for (name, what), us in found.items()
        if what == "us"
    }


def first_token(llm, args: argparse.Namespace) -> dict:
    """Milliseconds from a prompt of FIRST_TOKEN_PROMPT tokens, none of them cached, to its first token: the
    median of rounds in which all engines take turns, each round's median, and the least of all. The first
    round compiles and warms up. Nobody ends while another one is timed.
    """
    rounds = []
    for round_ in range(ROUNDS):
        with turn(args, round_):
            times = []
            for number in range(FIRST_TOKEN_RUNS):
                ids = prompts([FIRST_TOKEN_PROMPT], seed=1000 + FIRST_TOKEN_RUNS * round_ + number)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                generate(llm, ids, 1)
                times.append((time.perf_counter() - begin) * 1e3)
        rounds.append(sorted(times))
    with turn(args, ROUNDS):
        pass
    timed_rounds = rounds[1:]
    medians = [times[len(times) // 2] for times in timed_rounds]
    return {
        "median": statistics.median(medians), "rounds": medians,
        "least": min(times[0] for times in timed_rounds),
    }  # fmt: skip


def run(args: argparse.Namespace) -> dict:
    folder = Path(
        tempfile.gettempdir(),
        "mla_fp8_models",
        f"{args.kv}_{args.heads}_{args.layers}_{longest(args)}",
    )
    if args.kv == V4_CACHE:
        v4_model.write_config(folder, args.heads, args.layers, model.VOCABULARY, longest(args))
    else:
        changes = CHANGES.get(args.kv.partition("_bf16")[0], {})
        model.write_config(folder, args.heads, args.layers, longest(args), changes)
    import vllm

    result = {"vllm": vllm.__version__, "torch": torch.__version__}
    calls = {}
    if not args.multiprocessing:  # in this process, so that it can be looked into
        import spies

        if args.who == "exact":
            (spies.exact_v4 if args.kv == V4_CACHE else spies.exact_attention)()
        spies.count_calls(ours=args.who != "stock", pools=args.kv.startswith("glm53"))
        calls = spies.CALLS
    begin = time.time()
    llm = vllm.LLM(**options(args, str(folder)))
    result["init_s"] = time.time() - begin
    if not args.multiprocessing:
        result["selected"] = selected(llm)
        print("SELECTED", *result["selected"], flush=True)
    if on_two(args) and len(set(weights := llm.collective_rpc("mla_fp8_weights"))) < 2:
        raise RuntimeError(f"two ranks have the same weights: {weights}")
    if args.loaded:
        with turn(args):
            result |= timed_loaded(llm, args)
    elif args.batches:
        result |= logprobs(llm, args) if args.logprobs else {}
        with turn(args):
            result["timed"] = timed(llm, args)
    elif args.first_token:
        result["first_token_ms"] = first_token(llm, args)
    else:
        result |= logprobs(llm, args)
        if args.hot_rows and not args.multiprocessing:
            result["found_and_loaded"] = rows_found_and_loaded(llm)
    return result | {"calls": dict(calls), "layers": args.layers, "context": args.context}


def write_result(run: Callable[[argparse.Namespace], dict], args: argparse.Namespace) -> bool:
    """Writes what ``run(args)`` returns, or why it does not, to ``args.out``; whether it does."""
    begin = time.time()
    try:
        result = run(args) | {"ok": True}
    except BaseException as error:  # whatever it is, the table says it
        traceback.print_exc()
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    ready(args, *range(ROUNDS + 1))
    result["wall_s"] = time.time() - begin
    args.out.write_text(json.dumps(result))
    print("DONE", result["ok"], f"{result['wall_s']:.0f} s", flush=True)
    sys.stdout.flush()
    return result["ok"]


def main() -> None:
    args = parse()
    args.multiprocessing |= on_two(args)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(args.multiprocessing))
    os.environ[ranks.EXACT] = str(int(args.who == "exact" and args.multiprocessing))
    os.environ[ranks.EXCHANGE] = "vllm" if args.who in ("theirs", "direct") else ""
    for name in ("Q_GATHER", "KV_GATHER"):  # they need multicast
        os.environ[f"VLLM_USE_DIRECT_DCP_{name}"] = "0"
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(args.same_bits))
    os.environ["VLLM_PLUGINS"] = VLLM_PLUGINS[args.who]
    os.environ[model.V4] = str(int(args.kv == V4_CACHE))
    ok = write_result(run, args)
    os._exit(not ok)  # an engine's threads may outlive it


if __name__ == "__main__":
    main()
