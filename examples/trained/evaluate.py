"""Ask a trained checkpoint in vLLM: equal questions for every attention, cache and option; and its speed.

python examples/trained/evaluate.py run --checkpoint trained --plugins mla_fp8 --backend MLA_FP8 \\
    --kv fp8_ds_mla --out ours.json
python examples/trained/evaluate.py run --checkpoint trained --kv fp8_ds_mla --out stock.json
python examples/trained/evaluate.py table stock.json ours.json     others are paired with the first

--exact computes attention in float32 PyTorch; it needs ci/engines on PYTHONPATH.
"""

import argparse
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

SPACING = 64  # tokens of text for each needle
ASKED, VALUES = 16, 4  # questions of a text, at most; tokens of an answer
QUESTIONS = {2048: 2000, 4096: 2000, 16384: 304}
BATCH, PROMPT, NEW = 32, 4096, 128  # what is timed


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
    return vllm.LLM(**given)


def generate(llm, tokens: list[list[int]], new: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": x} for x in tokens], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextlib.contextmanager
def turn(folder: Path | None, of: int) -> Iterator[None]:
    """Until as many engines on this GPU have answered, then one at a time."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready.{os.getpid()}").touch()
    deadline = time.time() + 240  # one may have failed
    while len(list(folder.glob("ready.*"))) < of and time.time() < deadline:
        time.sleep(0.2)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def timed(llm, vocabulary: int) -> dict[str, float]:
    """Prompts that are not cached; the first call of each kind warms up."""
    import torch

    generator = torch.Generator().manual_seed(7)

    def random(number: int) -> list[list[int]]:
        return torch.randint(512, vocabulary, (number, PROMPT), generator=generator).tolist()

    def seconds(tokens: list[list[int]], new: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        generate(llm, tokens, new)
        return time.perf_counter() - begin

    seconds(random(2), 8)
    one = sorted(seconds(random(1), 1) for _ in range(5))[2]
    batch = random(BATCH)
    first, all_of_them = seconds(batch, 1), seconds(batch, NEW)  # the prompts are cached in the second
    again = seconds(batch, 1)
    between = (all_of_them - again) / (NEW - 1)
    return {
        "first_token_ms": 1e3 * one, "prompt_tokens_per_s": BATCH * PROMPT / first,
        "between_ms": 1e3 * between, "tokens_per_s": BATCH / between,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    vocabulary = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    begin = time.time()
    llm = engine(options)
    result = {"name": options.out.stem, "init_s": time.time() - begin, "right": {}}
    for length, number in QUESTIONS.items():
        asked, answers = prompts(length, number if not options.exact else min(number, 320), vocabulary)
        begin = time.time()
        found = generate(llm, asked, VALUES)
        right = [x == y for x, y in zip(found, answers, strict=True)]
        result["right"][str(length)] = right
        print(
            f"{length}: {sum(right) / len(right):.4f} of {len(right)}, {time.time() - begin:.0f} s",
            flush=True,
        )
    if not options.exact:
        with turn(options.turns, options.of):
            result |= timed(llm, vocabulary)
    config = llm.llm_engine.vllm_config.cache_config
    result["cache_tokens"] = config.num_gpu_blocks * config.block_size
    options.out.write_text(json.dumps(result))
    print(json.dumps({k: v for k, v in result.items() if k != "right"}), flush=True)
    os._exit(0)  # an engine's threads may outlive it


def table(options: argparse.Namespace) -> None:
    """Scores; of those that were asked the same, how many only this one or only the first one has right."""
    results = [json.loads(path.read_text()) for path in options.results]
    lengths = list(QUESTIONS)
    numbers = ("first_token_ms", "between_ms", "tokens_per_s", "prompt_tokens_per_s", "cache_tokens")
    print("| | " + " | ".join([*(f"{n} tokens" for n in lengths), *numbers]) + " |")
    print("|---" * (1 + len(lengths) + len(numbers)) + "|")
    for result in results:
        cells = []
        for length in map(str, lengths):
            mine, first = result["right"][length], results[0]["right"][length]
            pairs = list(zip(mine, first, strict=False))
            gained, lost = (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
            cells.append(f"{100 * sum(mine) / len(mine):.2f} % (+{gained} -{lost} of {len(pairs)})")
        cells += [f"{result[name]:.4g}" if name in result else "" for name in numbers]
        print(f"| {result['name']} | " + " | ".join(cells) + " |")


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
    one.add_argument("--turns", type=Path, help="folder: engines that run side by side are timed in turn")
    one.add_argument("--of", type=int, default=1)
    one.add_argument("--out", type=Path, required=True)
    many = commands.add_parser("table")
    many.set_defaults(function=table)
    many.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
