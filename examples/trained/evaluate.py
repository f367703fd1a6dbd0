"""Ask a trained checkpoint in vLLM: equal questions for every attention, cache and option; and its speed.

python examples/trained/evaluate.py run --checkpoint trained --out stock_fp8.json
python examples/trained/evaluate.py run --checkpoint trained --plugins mla_fp8 --backend MLA_FP8 \\
    --out ours_fp8.json
python examples/trained/evaluate.py table stock_fp8.json ours_fp8.json

A file's name says who attends over which cache: the part before its first `_`, and `fp8` or `bf16` behind it.
Scores are paired with those of `stock` over the same cache, and with `exact`. exact is --exact, attention in
float32 PyTorch over a bf16 cache; it needs ci/engines on PYTHONPATH.
"""

import argparse
import contextlib
import csv
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SPACING = 64  # tokens of text for each needle
ASKED, VALUES = 16, 4  # questions of a text, at most; tokens of an answer
QUESTIONS = {2048: 2000, 4096: 2000, 16384: 304}
FEW = 320  # questions of a length, where answers are slow
BATCH, PROMPT, NEW, REPEATS, ROUNDS = 32, 4096, 128, 3, 3  # what is timed
SPEEDS = (
    "first_token_ms", "between_ms", "tokens_per_s", "prompt_tokens_per_s", "gpu_ms", "gpu_launches",
    "cache_tokens", "other_mb",
)  # fmt: skip
PAIRS = ("stock", "exact")
HOT_GPU_BYTES, HOST_GIB = 1 << 30, 4  # with rows in host memory


def text(length: int, vocabulary: int, generator):
    import tasks

    needles = length // SPACING
    return tasks.make(1, length, needles, VALUES, vocabulary, generator, at_end=min(ASKED, needles))


def prompts(length: int, number: int, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Questions, each behind its text, and their answers. Questions of one text follow each other."""
    import torch

    asked, answers = [], []
    while len(asked) < number:
        t = text(length, vocabulary, torch.Generator().manual_seed(1_000_000 * length + len(asked)))
        line = t.tokens[0].tolist()
        begin = int(t.questions[0, 0])
        for at in t.questions[0].tolist():
            asked.append(line[:begin] + line[at : at + 2])
            answers.append(line[at + 2 : at + 2 + VALUES])
    return asked[:number], answers[:number]


def engine(options: argparse.Namespace):
    os.environ["VLLM_PLUGINS"] = options.plugins
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    if options.exact:
        import spies

        spies.exact_attention()
    given = {
        "model": str(options.checkpoint), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "kv_cache_dtype": options.kv, "max_model_len": 18432, "max_num_batched_tokens": options.budget,
        "max_num_seqs": 64, "enable_prefix_caching": True, "kv_cache_memory_bytes": 4 << 30,
        "gpu_memory_utilization": 0.15, "enforce_eager": options.exact, "async_scheduling": False,
        "max_logprobs": 20,
        # Without it short prompts go to dense attention, which is no sparse kernel's.
        "attention_config": {"sparse_mla_force_mqa": True},
    }  # fmt: skip
    if not options.exact:
        given["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if options.backend:
        given["attention_backend"] = options.backend
    if options.drafts:
        given["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }  # fmt: skip
    if options.hot_rows:
        given["attention_config"]["hisparse_config"] = {"device_buffer_size": options.hot_rows}
        given |= {
            "kv_cache_memory_bytes": HOT_GPU_BYTES, "enable_prefix_caching": False, "max_num_seqs": 16,
            "kv_transfer_config": {
                "kv_connector": "HiSparseConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"host_pool_gib": HOST_GIB},
            },
        }  # fmt: skip
    return vllm.LLM(**given)


def generate(llm, tokens: list[list[int]], new: int, logprobs: int | None = None) -> list:
    """Of each prompt: vLLM's output, tokens and logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    outputs = llm.generate([{"prompt_token_ids": x} for x in tokens], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def agreement(llm, options: argparse.Namespace, vocabulary: int) -> dict[str, list[float]]:
    """By length: the share of first tokens that are those of train.py's own model, and how far their logprobs
    are away on average. A checkpoint that an engine reads in another way shows here.
    """
    found = {}
    for length, wanted in json.loads((options.checkpoint / "examples.json").read_text()).items():
        asked, _ = prompts(int(length), len(wanted), vocabulary)
        outputs = generate(llm, asked, 1, logprobs=20)
        same = [out.token_ids[0] == token for out, (token, _) in zip(outputs, wanted, strict=True)]
        away = [
            abs(out.logprobs[0][token].logprob - logprob) if token in out.logprobs[0] else float("inf")
            for out, (token, logprob) in zip(outputs, wanted, strict=True)
        ]
        found[length] = [sum(same) / len(same), sum(away) / len(away)]
    return found


@contextlib.contextmanager
def turn(folder: Path | None, name: str, of: int, round_: int) -> Iterator[None]:
    """Until as many engines on this GPU wait for this round or have ended, then one at a time.

    Rounds are as many times of the day for each engine: what changes meanwhile changes for all.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"round{round_}.{name}").touch()
    deadline = time.time() + 240
    while len(here(folder, round_)) < of and time.time() < deadline:
        time.sleep(0.2)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def here(folder: Path, round_: int) -> set[str]:
    """Engines that are not waited for in this round. Whoever starts one may say that it has ended, too."""
    files = [*folder.glob(f"round{round_}.*"), *folder.glob("ready.*")]
    return {path.name.partition(".")[2] for path in files}


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def timed(llm, vocabulary: int, round_: int) -> dict[str, float]:
    """Prompts that are not cached; the first call of each kind warms up; medians."""
    import torch

    generator = torch.Generator().manual_seed(7 + round_)

    def random(number: int) -> list[list[int]]:
        return torch.randint(512, vocabulary, (number, PROMPT), generator=generator).tolist()

    def seconds(tokens: list[list[int]], new: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        generate(llm, tokens, new)
        return time.perf_counter() - begin

    seconds(random(2), 8)
    one = median(seconds(random(1), 1) for _ in range(5))
    batch = random(BATCH)
    first = seconds(batch, 1)
    seconds(batch, NEW)  # from here on the prompts are cached, and all kernels are loaded
    between = median((seconds(batch, NEW) - seconds(batch, 1)) / (NEW - 1) for _ in range(REPEATS))
    return {
        "first_token_ms": 1e3 * one, "prompt_tokens_per_s": BATCH * PROMPT / first,
        "between_ms": 1e3 * between, "tokens_per_s": BATCH / between,
    }  # fmt: skip


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """What spans (begin, end) cover. Kernels overlap: a dependent launch may begin early and wait."""
    time, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        time += max(0.0, end - max(begin, last))
        last = max(last, end)
    return time


def on_gpu(llm, vocabulary: int) -> dict[str, float]:
    """Of a decode step: how long the GPU works, and how many launches that are. A graph is one launch. The
    rest of a step's time is the host's.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    generator = torch.Generator().manual_seed(6)
    batch = torch.randint(512, vocabulary, (BATCH, PROMPT), generator=generator).tolist()

    def count(new: int) -> tuple[float, int]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            generate(llm, batch, new)
            torch.cuda.synchronize()
        found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return covered((e.time_range.start, e.time_range.end) for e in found), len({e.id for e in found})

    generate(llm, batch, 1)  # from here on the prompts are cached
    (us, launches), (first_us, first_launches) = count(33), count(1)
    return {"gpu_ms": (us - first_us) / 32e3, "gpu_launches": (launches - first_launches) / 32}


def run(options: argparse.Namespace) -> None:
    import torch

    vocabulary = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    begin, name = time.time(), options.out.stem
    llm = engine(options)
    result = {"name": name, "init_s": time.time() - begin, "right": {}, "logprob": {}}
    result["agreement"] = agreement(llm, options, vocabulary)
    print(f"{name}: as train.py's model (share, distance):", result["agreement"], flush=True)
    few = options.exact or options.hot_rows
    for length, number in QUESTIONS.items():
        asked, answers = prompts(length, min(number, FEW) if few else number, vocabulary)
        begin = time.time()
        found = generate(llm, asked, VALUES, logprobs=1)
        right = [list(x.token_ids) == y for x, y in zip(found, answers, strict=True)]
        result["right"][str(length)] = right
        result["logprob"][str(length)] = [
            round(sum(step[token].logprob for token, step in zip(x.token_ids, x.logprobs, strict=True)), 4)
            for x in found
        ]
        share = sum(right) / len(right)
        print(f"{name}: {length}: {share:.4f} of {len(right)}, {time.time() - begin:.0f} s", flush=True)
        options.out.write_text(json.dumps(result))
    result["rounds"] = []
    for round_ in range(0 if few else ROUNDS):
        with turn(options.turns, name, options.of, round_):
            result["rounds"].append(timed(llm, vocabulary, round_))
            if round_ == ROUNDS - 1:
                result |= on_gpu(llm, vocabulary)
    for key in result["rounds"][0] if result["rounds"] else ():
        result[key] = median(one[key] for one in result["rounds"])
    if options.turns:
        options.turns.mkdir(parents=True, exist_ok=True)
        (options.turns / f"ready.{name}").touch()
    config = llm.llm_engine.vllm_config.cache_config
    result["cache_tokens"] = config.num_gpu_blocks * config.block_size
    result["other_mb"] = (torch.cuda.max_memory_reserved() - config.kv_cache_memory_bytes) >> 20
    options.out.write_text(json.dumps(result))
    print(json.dumps({k: v for k, v in result.items() if k not in ("right", "logprob")}), flush=True)
    os._exit(0)  # an engine's threads may outlive it


def rows(results: list[dict]) -> Iterator[dict]:
    """A row for each length and one, without length, of the speed. `stock_more`: questions that stock has
    wrong and this one right; `stock_fewer`: the reverse; `stock_asked`: questions of both; `stock_away`: how
    far logprobs of whole answers are from stock's on average, in nats. `logprob`: that of right answers. Of
    a name's second result, a repeated run, only the speed counts.
    """
    by_name = {result["name"]: result for result in reversed(results)}
    for result in results:
        name = result["name"]
        who, cache = name.split("_")[:2]
        others = {"stock": by_name.get(f"stock_{cache}"), "exact": by_name.get("exact_bf16")}
        for length, right in result["right"].items() if result is by_name[name] else ():
            row = {"engine": name, "length": length, "asked": len(right), "right": sum(right)}
            for other in PAIRS:
                theirs = others[other] and others[other]["right"].get(length)
                if theirs is None or who == other:
                    continue
                pairs = list(zip(right, theirs, strict=False))
                row[f"{other}_asked"] = len(pairs)
                row[f"{other}_more"] = sum(a and not b for a, b in pairs)
                row[f"{other}_fewer"] = sum(b and not a for a, b in pairs)
                logprobs = zip(result["logprob"][length], others[other]["logprob"][length], strict=False)
                row[f"{other}_away"] = f"{sum(abs(a - b) for a, b in logprobs) / len(pairs):.2e}"
            known = [x for x, ok in zip(result["logprob"][length], right, strict=True) if ok]
            row["logprob"] = f"{sum(known) / max(1, len(known)):.3g}"
            row["agreement"] = f"{result['agreement'][length][1]:.2e}"
            yield row
        yield {"engine": name} | {key: f"{result[key]:.5g}" for key in SPEEDS if key in result}


def table(options: argparse.Namespace) -> None:
    """As CSV, or for people: scores with their pairs, then speeds."""
    found = list(rows([json.loads(path.read_text()) for path in options.results]))
    if options.csv:
        pairs = [f"{other}_{what}" for other in PAIRS for what in ("asked", "more", "fewer", "away")]
        columns = ["engine", "length", "asked", "right", *pairs, "logprob", "agreement", *SPEEDS]
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        return
    print("| engine | " + " | ".join([*(f"{n} tokens" for n in QUESTIONS), *SPEEDS]) + " |")
    print("|---" * (1 + len(QUESTIONS) + len(SPEEDS)) + "|")
    for name in dict.fromkeys(row["engine"] for row in found):
        cells = {str(n): "" for n in QUESTIONS} | dict.fromkeys(SPEEDS, "")
        for row in found:
            if row["engine"] != name:
                continue
            if "length" not in row:
                cells |= {k: v for k, v in row.items() if k in SPEEDS}
                continue
            pairs = "".join(
                f", {other} +{row[f'{other}_more']} -{row[f'{other}_fewer']} of {row[f'{other}_asked']}"
                for other in PAIRS
                if f"{other}_asked" in row
            )
            cells[row["length"]] = f"{100 * row['right'] / row['asked']:.2f} %{pairs} ({row['logprob']})"
        print(f"| {name} | " + " | ".join(cells.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.set_defaults(function=run)
    one.add_argument("--checkpoint", type=Path, required=True)
    one.add_argument("--plugins", default="", help="VLLM_PLUGINS")
    one.add_argument("--backend", help="MLA_FP8 is ours, FLASHMLA_SPARSE FlashMLA over bf16 rows")
    one.add_argument("--kv", default="fp8_ds_mla", help="fp8_ds_mla or bfloat16")
    one.add_argument("--exact", action="store_true")
    one.add_argument("--budget", type=int, default=4096, help="tokens of a step: prompts come in chunks")
    one.add_argument("--drafts", type=int, default=0, help="tokens that a lookup in the prompt proposes")
    one.add_argument("--hot-rows", type=int, default=0, help="HiSparse: rows of a request on the GPU")
    one.add_argument("--turns", type=Path, help="folder: engines that run side by side are timed in turn")
    one.add_argument("--of", type=int, default=1)
    one.add_argument("--out", type=Path, required=True)
    many = commands.add_parser("table")
    many.set_defaults(function=table)
    many.add_argument("--csv", action="store_true")
    many.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
