#!/usr/bin/env python3
"""One SGLang engine with a random model: logprobs, calls and kernel times, as JSON. Started by matrix.py.

Logprobs come from `sglang.Engine`, whose scheduler is a process of its own. Kernels are timed in SGLang's
model runner alone, to which batches go as from its `benchmark.one_batch`: plug-ins, attention backend,
indexer, caches and graphs are the same.
"""

import argparse
import collections
import json
import logging
import os
import tempfile
import time
from pathlib import Path

import model
import sglang_v4_model
import spies
import torch
from engine import ACCURACY_LENGTHS, kernels, per, prompts, write_result
from turns import turn

# mla_fp8_engines: `register`, in every process.
SGLANG_PLUGINS = {
    "stock": "mla_fp8_engines", "ours": "mla_fp8_engines,mla_fp8", "exact": "mla_fp8_engines,mla_fp8",
    "groups": "mla_fp8_engines,mla_fp8,mla_fp8_query_groups",
    "layer": "mla_fp8_engines,mla_fp8,mla_fp8_layer_ops",
    "index": "mla_fp8_engines,mla_fp8,mla_fp8_index_topk",
    "hisparse": "mla_fp8_engines,mla_fp8,mla_fp8_hisparse",
}  # fmt: skip
# By model what prompts attend to: bf16 rows, FP8 pages.
BF16 = "sglang_bf16"  # the yardstick of who writes rows of its own
PREFILL_BACKENDS = {  # of V3.2
    "sglang": "flashmla_sparse",
    "sglang_pages": "flashmla_kv",
    BF16: "flashmla_sparse",
}
V41_ROWS = ("sglang_v41_rows", "sglang_v41_rows_pages")  # V4.1 with its own rows
V4_PREFILL_OVER_ROWS = {
    "sglang_v4": "1", "sglang_v4_pages": "0", "sglang_v41": "1", "sglang_v41_pages": "0",
    "sglang_v41_rows": "1", "sglang_v41_rows_pages": "0", "sglang_v41_levels": "1",
}  # fmt: skip
# In the environment of an engine's processes.
WHO, CALLS, V4 = "MLA_FP8_ENGINE_WHO", "MLA_FP8_ENGINE_CALLS", model.V4
WATCH = "MLA_FP8_ENGINE_WATCH"  # a folder, for same_bits.py
# With the switch for the same bits: else DeepGEMM compiles a kernel for each shape of a batch.
SAME_BITS = {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_GRAPHS = (256, 2048)
CHUNK = 2048  # tokens of a step: longer prompts come in chunks
RUNNER_CHUNK = 16384
TIMED_STEPS = 8


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--who", choices=SGLANG_PLUGINS, required=True, help="whose attention")
    p.add_argument("--heads", type=int, default=128)
    kinds = {**PREFILL_BACKENDS, **V4_PREFILL_OVER_ROWS}
    p.add_argument("--kv", choices=kinds, default="sglang", help="the model, and what prompts attend to")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--mtp", type=int, default=0)
    p.add_argument("--tensor-parallel", type=int, default=1)
    p.add_argument("--batches", type=int, nargs="*", default=[], help="time these instead of taking logprobs")
    p.add_argument("--context", type=int, default=4096, help="tokens of a prompt that is timed")
    p.add_argument("--hot-rows", type=int, default=0, help="HiSparse with a hot buffer of so many")
    p.add_argument("--same-bits", action="store_true", help="the engine's switch for them")
    p.add_argument("--new", type=int, default=48)
    p.add_argument("--turns", type=Path, help="folder: wait until --of engines are ready, then one at a time")
    p.add_argument("--of", type=int, default=1)
    return p.parse_args(arguments)


def register() -> None:
    """An entry point of sglang.srt.plugins."""
    from sglang.srt.model_loader import loader, weight_utils

    for module in (weight_utils, loader):
        module.initialize_dummy_weights = random_weights
    if os.environ[V4] == "1":
        sglang_v4_model.register()
    if os.environ[WHO] == "exact":
        spies.exact_attention()
    spies.count_sglang_calls(ours=os.environ[WHO] != "stock")
    if os.environ[V4] == "1":
        spies.count_sglang_rows()
    if os.environ[WHO] == "hisparse":
        spies.count_sglang_host_rows()
    spies.save_calls(Path(os.environ[CALLS]))
    if os.environ.get(WATCH):
        import same_bits

        same_bits.watch(Path(os.environ[WATCH]))


def random_weights(module, *args, **options) -> None:
    """In the place of SGLang's dummy weights, which are so small that attention hardly matters."""
    seen = collections.Counter()
    for name, param in module.state_dict().items():
        if model.is_filled(param) and "cos_sin" not in name:
            model.fill(param, name, seen)


def server_arguments(args: argparse.Namespace, folder: Path) -> dict:
    most = max(args.batches, default=16)
    own = {
        "model_path": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16" if args.kv == BF16 else "fp8_e4m3",
        "max_total_tokens": (most + 2) * (args.context + model.MAX_LENGTH // 2),
        "mem_fraction_static": 0.7,  # of what is free: max_total_tokens is less
        "max_running_requests": most, "context_length": 2 * model.MAX_LENGTH, "random_seed": 0,
        "chunked_prefill_size": RUNNER_CHUNK if args.batches else CHUNK, "sampling_backend": "pytorch",
        "disable_cuda_graph": args.eager, "log_level": "info", "tp_size": args.tensor_parallel,
        "enforce_disable_flashinfer_allreduce_fusion": True,  # FlashInfer is not packed
    }  # fmt: skip
    if args.kv in PREFILL_BACKENDS:
        own |= {"dsa_decode_backend": "flashmla_sparse" if args.kv == BF16 else "flashmla_kv"}
        own |= {"dsa_prefill_backend": PREFILL_BACKENDS[args.kv]}
    else:
        own |= {"moe_runner_backend": "triton"}  # there are no experts: any that needs no package
        own |= {"swa_full_tokens_ratio": 1.0}  # a row of the window for every token: prompts stay cached
        own |= {"enable_decoder_swa_bounded_replay": False}
    if args.same_bits:
        own |= {"enable_deterministic_inference": True, "disable_radix_cache": True}
    if args.hot_rows:
        own |= {"enable_hisparse": True, "disable_radix_cache": True}
        own["hisparse_config"] = json.dumps(hisparse_config(args.hot_rows))
    if not args.eager:
        own |= {"cuda_graph_bs_decode": [n for n in GRAPHS if n <= most]}
        own |= {"cuda_graph_bs_prefill": list(PREFILL_GRAPHS)}
    if args.mtp:
        own |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": args.mtp}
        own |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": args.mtp + 1}
    return own


def hisparse_config(hot_rows: int) -> dict:
    """SGLang refuses a buffer of fewer rows than its top_k, which is that of V3.2 if nothing is said."""
    return {"top_k": min(2048, hot_rows // 2), "device_buffer_size": hot_rows}


def logprobs(args: argparse.Namespace, folder: Path) -> dict:
    import sglang

    begin = time.time()
    engine = sglang.Engine(**server_arguments(args, folder))
    result = {"init_s": time.time() - begin}
    ids = [prompt["prompt_token_ids"] for prompt in prompts(ACCURACY_LENGTHS, seed=7)]
    sampling = {"temperature": 0, "max_new_tokens": args.new, "ignore_eos": True}
    outputs = engine.generate(
        input_ids=ids, sampling_params=sampling, return_logprob=True, logprob_start_len=0
    )
    found = [output["meta_info"] for output in outputs]
    result["prompt_logprobs"] = [
        [logprob for logprob, *_ in each["input_token_logprobs"] if logprob is not None] for each in found
    ]
    result["logprobs"] = [[logprob for logprob, *_ in each["output_token_logprobs"]] for each in found]
    if any(len(each) != args.new for each in result["logprobs"]):
        raise RuntimeError(f"{[len(each) for each in result['logprobs']]} tokens, expected {args.new} each")
    result["tokens"] = [[token for _, token, *_ in each["output_token_logprobs"]] for each in found]
    if not server_arguments(args, folder).get("disable_radix_cache"):  # without cached prompts
        result |= logprobs_as_prompts(engine, ids, result["tokens"])
    calls = spies.saved_calls(Path(os.environ[CALLS]))
    if args.who == "hisparse":
        result["found_and_loaded"] = [calls.pop(x, 0) for x in (spies.FOUND, spies.LOADED)]
    return result | {"calls": calls}


def logprobs_as_prompts(engine, ids: list[list[int]], tokens: list[list[int]]) -> dict:
    """The logprobs of what was generated, of a prompt that goes on with it and whose beginning is cached."""
    outputs = engine.generate(
        input_ids=[a + b for a, b in zip(ids, tokens, strict=True)],
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=[len(each) - 1 for each in ids],
    )
    again = [output["meta_info"] for output in outputs]
    of_tokens = [each["input_token_logprobs"][-len(new) :] for each, new in zip(again, tokens, strict=True)]
    return {
        "logprobs_as_prompts": [[logprob for logprob, *_ in each] for each in of_tokens],
        "cached_tokens": [each["cached_tokens"] for each in again],
    }


class Runner:
    """SGLang's model runner, by the functions of its `benchmark.one_batch`."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        self.bench = one_batch
        server = ServerArgs(**server_arguments(args, folder) | {"disable_radix_cache": True})
        server.resolve_once()
        one_batch._set_envs_and_config(server)
        port = PortArgs.init_new(server)
        rank = one_batch.spawn_world_rank(server, tp_rank=0, pp_rank=0)
        ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
        one_batch.publish(server, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        one_batch.get_tokenizer = lambda *args, **options: None
        self.runner, _ = one_batch.load_model(server, port, 0, 0)

    def extend(self, ids: list[list[int]]):
        """The batch behind whole prompts."""
        requests = self.bench.prepare_synthetic_inputs_for_latency_test(len(ids), 0, ids)
        return self.runner.extend(requests)[2]

    def decode(self, batch, steps: int, g: torch.Generator) -> None:
        for _ in range(steps):
            tokens = torch.randint(2, model.VOCABULARY, (len(batch.reqs),), generator=g)
            self.runner.decode(tokens.cuda(), batch)


def timed(args: argparse.Namespace, folder: Path) -> dict:
    """Per batch: kernels of a prompt (first batch only) and of a decode step, in microseconds."""
    begin = time.time()
    runner = Runner(args, folder)
    result = {"init_s": time.time() - begin, "timed": {}}
    with turn(args):
        for number, size in enumerate(args.batches):
            result["timed"][str(size)] = times_of(runner, args, number, size)
    return result | {"calls": dict(spies.CALLS)}


def times_of(runner: Runner, args: argparse.Namespace, number: int, size: int) -> dict:
    g = torch.Generator().manual_seed(number)
    ids = [prompt["prompt_token_ids"] for prompt in prompts([args.context] * size, seed=100 + number)]
    runner.runner.clear()
    step, one = RUNNER_CHUNK // args.context, {}
    batch = runner.extend(ids[:step])
    for first in range(step, size, step):
        batch.merge_batch(runner.extend(ids[first : first + step]))
    if number == 0:
        one["prefill"] = per(kernels(lambda: [runner.extend([prompt]) for prompt in ids[:2]]), 2)
    runner.decode(batch, TIMED_STEPS, g)
    one["decode"] = per(kernels(lambda: runner.decode(batch, TIMED_STEPS, g)), TIMED_STEPS)
    print("TIMED", size, round(sum(us for us, *_ in one["decode"].values())), "us a step", flush=True)
    return one


def run(args: argparse.Namespace) -> dict:
    folder = Path(tempfile.gettempdir(), "mla_fp8_models", f"{args.kv}_{args.heads}_{args.layers}")
    if args.kv in V4_PREFILL_OVER_ROWS:
        sglang_v4_model.write_config(
            folder,
            args.heads,
            args.layers,
            model.VOCABULARY,
            model.MAX_LENGTH,
            v41="v41" in args.kv,
            levels=args.kv == "sglang_v41_levels",
        )
    else:
        model.write_config(folder, args.heads, args.layers, model.MAX_LENGTH)
    import sglang
    import sglang.srt.entrypoints.engine as entrypoint

    entrypoint.assert_pkg_version = lambda *args, **options: None  # pins.SGLANG_KERNELS are older
    found = (timed if args.batches else logprobs)(args, folder)
    return {"sglang": sglang.__version__, "layers": args.layers, "context": args.context} | found


def set_environment(args: argparse.Namespace) -> None:
    """Of this process and the engine's."""
    os.environ["SGLANG_PLUGINS"] = SGLANG_PLUGINS[args.who] + (
        ",mla_fp8_v41_rows" if args.kv in V41_ROWS else ""
    )
    # Else prompts of up to 2048 tokens go to dense attention, which is no sparse kernel's.
    os.environ["SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"] = "0"
    # The other one, in Rust, is linked with the torch that SGLang names: with torch 2.11 it crashes.
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    os.environ |= SAME_BITS if args.same_bits else {}
    os.environ[WHO], os.environ[CALLS] = args.who, tempfile.mkdtemp()
    os.environ[V4] = str(int(args.kv in V4_PREFILL_OVER_ROWS))
    if args.kv in V4_PREFILL_OVER_ROWS:
        os.environ |= sglang_v4_model.SWITCHES
        os.environ["SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"] = V4_PREFILL_OVER_ROWS[args.kv]
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")


def main() -> None:
    args = parse()
    set_environment(args)
    end(write_result(run, args))


def end(ok: bool) -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(not ok)


if __name__ == "__main__":
    main()
