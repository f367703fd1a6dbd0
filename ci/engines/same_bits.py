#!/usr/bin/env python3
"""Whether a token has the same bits in any batch of an engine, on a GPU:
`same_bits.py --out FILE [--sglang] [--switch] ...`

Two questions, one engine (that of engine.py or sglang_engine.py, with its options):

* our ops: rows of the engine's calls of attention are computed again alone, over the same cache, and compared
  bit by bit; of V4's prompts also as decode. Rows of graphs are not seen: `--eager` sees all.
* the engine: prompts go alone, in batches of 8 and of 32 beside others, again when cached, in chunks as the
  budget cuts them. Tokens and logprobs are compared with those alone. Here the engine's kernels count, too.

`--switch` asks for VLLM_BATCH_INVARIANT=1 or --enable-deterministic-inference. The exit code is 1 if an op of
ours differs with it.
"""

import argparse
import collections
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import engine
import torch

LENGTHS = (700, 3000, 2100, 90, 4500, 1, 2600, 513)
ROWS = 4  # of a call that are computed again
NEW = 12
SWITCH, SGLANG = "--switch", "--sglang"
Rows = tuple[torch.Tensor, ...]


class Compared:
    """Rows by kind: how many, how many differ, the largest difference."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
        self.generator = torch.Generator().manual_seed(0)
        self.saved: Path | None = None  # where another process reads it

    def result(self) -> dict[str, dict[str, float]]:
        return {
            kind: dict(zip(("rows", "differ", "largest"), x, strict=True)) for kind, x in self.found.items()
        }

    def some(self, rows: int) -> list[int]:
        return torch.randperm(rows, generator=self.generator)[:ROWS].tolist()

    def add(self, kind: str, got: Rows, want: Rows) -> None:
        count = self.found[kind]
        equal = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True)
        )
        count[0] += 1
        if not equal:
            count[1] += 1
            difference = float((got[0].float() - want[0].float()).abs().max())
            count[2] = max(count[2], difference)
        if self.saved is not None and (count[0] % 16 == 1 or not equal):
            self.saved.write_text(json.dumps(self.result()))


COMPARED = Compared()
_PER_ROW = ("topk_length", "extra_indices", "extra_topk_length")
_WHOLE = ("out", "lse", "workspace", "query_groups", "shared_keys", "return_max_logits")


def alone(options: dict[str, Any], row: int) -> dict[str, Any]:
    """The options of a call for one of its rows."""
    kept = {name: x for name, x in options.items() if name not in _WHOLE}
    return kept | {name: kept[name][row : row + 1] for name in _PER_ROW if kept.get(name) is not None}


def of_row(results: Rows, row: int) -> Rows:
    return tuple(x[row : row + 1].contiguous() for x in (results[0], results[-1]))


def watch(folder: Path | None = None) -> None:
    """Compares rows of every call of attention that is not captured; ``folder`` gets what is found, too."""
    COMPARED.saved = None if folder is None else folder / str(os.getpid())
    attend = import_module("mla_fp8.integrations.attend")
    decode, rows, window = attend.sparse_decode, attend.sparse_prefill, attend.sparse_prefill_window

    def sparse_decode(q, kv_cache, indices, **options):
        results = decode(q, kv_cache, indices, **options)
        for i in picked(q):
            one = decode(q[i : i + 1], kv_cache, indices[i : i + 1], **alone(options, i))
            COMPARED.add("pages: in a batch, alone", of_row(results, i), one)
        return results

    def sparse_prefill(q, kv, indices, **options):
        results = rows(q, kv, indices, **options)
        for i in picked(q):
            one = rows(q[i : i + 1], kv, indices[i : i + 1], **alone(options, i), return_max_logits=False)
            COMPARED.add("bf16 rows: in a chunk, alone", of_row(results, i), one)
        return results

    def sparse_prefill_window(q, kv_cache, table, starts, lens, **options):
        results = window(q, kv_cache, table, starts, lens, **options)
        for i in picked(q):
            request = int((starts[1:] - starts[0] <= i).sum())
            if request >= len(lens):
                continue
            length = lens[request : request + 1] - (starts[request + 1] - starts[0] - i) + 1
            pages = table[request : request + 1]
            given = alone(options, i)
            if given.get("extra_page_table") is not None:
                given["extra_page_table"] = given["extra_page_table"][request : request + 1]
            one_start = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
            one = window(q[i : i + 1], kv_cache, pages, one_start, length, **given, return_max_logits=False)
            COMPARED.add("windows: in a chunk, alone", of_row(results, i), one)
            COMPARED.add("windows: in a chunk, as decode", of_row(results, i), as_decode(
                decode, q[i : i + 1], kv_cache, pages, length, given
            ))  # fmt: skip
        return results

    attend.sparse_decode, attend.sparse_prefill = sparse_decode, sparse_prefill
    attend.sparse_prefill_window = sparse_prefill_window


def picked(q: torch.Tensor) -> list[int]:
    return [] if torch.cuda.is_current_stream_capturing() else COMPARED.some(len(q))


def as_decode(decode, q, kv_cache, pages, length, given: dict[str, Any]) -> Rows:
    """A token of a prompt with its keys listed, as decode has them."""
    given = dict(given)
    size, width, end = given["page_size"], given.pop("window_size"), int(length)
    positions = torch.arange(max(end - width, 0), end, device=q.device)
    slots = torch.full((1, width), -1, dtype=torch.int32, device=q.device)
    slots[0, : len(positions)] = slots_of(pages[0, positions // size], positions, size)
    table = given.pop("extra_page_table", None)
    if table is not None:
        entries = torch.arange(max(int(given["extra_topk_length"]), 1), device=q.device)
        size = given["extra_page_size"]
        given["extra_indices"] = slots_of(table[:, entries // size], entries, size)
    return decode(q, kv_cache, slots, **given)


def slots_of(pages: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    slots = pages.long() * size + positions % size
    return slots.where((pages >= 0) & (slots < 1 << 31), -1).int()


Generate = Callable[[list[list[int]]], list[tuple]]  # (tokens, their logprobs) of each prompt


def batches(generate: Generate, forget: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """By batch: prompts whose tokens, and whose logprobs, are those alone; how much these differ at most.

    ``forget`` empties the cache of prefixes.
    """
    ids = [x["prompt_token_ids"] for x in engine.prompts(LENGTHS, seed=7)]
    others = [x["prompt_token_ids"] for x in engine.prompts([150 + 37 * i for i in range(24)], seed=8)]

    def alone() -> list[tuple]:
        return [generate([one])[0] for one in ids]

    def among_others() -> list[tuple]:
        return generate(others[:12] + ids + others[12:])[12 : 12 + len(ids)]

    want, found = alone(), {}

    def compare(name: str, got: list[tuple]) -> None:
        pairs = list(zip(got, want, strict=True))
        differences = [
            abs(x - y) for a, b in pairs for t, u, x, y in zip(a[0], b[0], a[1], b[1], strict=True) if t == u
        ]
        found[name] = {
            "tokens": sum(a[0] == b[0] for a, b in pairs), "logprobs": sum(a == b for a, b in pairs),
            "of": len(pairs), "largest": max(differences, default=0.0),
        }  # fmt: skip
        show({"batches": {name: found[name]}})  # a run that is cut off has these

    compare("alone, cached", alone())
    compare("8 together", generate(ids))
    compare("32 together", among_others())
    forget()
    compare("32 together, nothing cached", among_others())
    forget()
    compare("alone, nothing cached", alone())
    return found


def of_vllm(llm, _) -> dict:
    def generate(ids: list[list[int]]) -> list[tuple]:
        found = []
        for output in engine.generate(llm, [{"prompt_token_ids": x} for x in ids], NEW, logprobs=1):
            one = output.outputs[0]
            steps = zip(one.token_ids, one.logprobs, strict=True)
            found.append((tuple(one.token_ids), tuple(step[token].logprob for token, step in steps)))
        return found

    return {"batches": batches(generate, llm.reset_prefix_cache), "ops": COMPARED.result()}


def of_sglang(args: argparse.Namespace, folder: Path) -> dict:
    import sglang
    import sglang_engine

    options = {"enable_deterministic_inference": SWITCH in sys.argv}
    llm = sglang.Engine(**sglang_engine.server_arguments(args, folder) | options)
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}

    def generate(ids: list[list[int]]) -> list[tuple]:
        outputs = llm.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
        steps = [output["meta_info"]["output_token_logprobs"] for output in outputs]
        return [(tuple(t for _, t, *_ in x), tuple(p for p, *_ in x)) for x in steps]

    found = batches(generate, llm.flush_cache)
    return {"batches": found, "ops": saved(Path(os.environ[sglang_engine.WATCH]))}


def saved(folder: Path) -> dict[str, dict[str, float]]:
    """What `watch` wrote into the folder: one process attends."""
    each = [json.loads(path.read_text()) for path in folder.iterdir()]
    return {kind: x for one in each for kind, x in one.items()}


def show(result: dict) -> None:
    for kind, x in result.get("ops", {}).items():
        print(f"{kind:36s} {x['rows']:6.0f} rows, {x['differ']:5.0f} differ, by {x['largest']:.3g} at most")
    for name, x in result.get("batches", {}).items():
        print(
            f"{name:36s} {x['tokens']} of {x['of']} prompts have the tokens, {x['logprobs']} the logprobs of "
            f"those alone; they differ by {x['largest']:.3g} at most",
            flush=True,
        )


def run_vllm(given: list[str]) -> tuple[bool, dict]:
    args = engine.parse(given)
    args.repeat_prompts = True  # prefix caching
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(SWITCH in sys.argv))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = engine.VLLM_PLUGINS[args.who]
    os.environ[engine.model.V4] = str(int(args.kv == engine.V4_CACHE))
    engine.logprobs = of_vllm
    watch()
    return engine.write_result(engine.run, args), json.loads(args.out.read_text())


def run_sglang(given: list[str]) -> tuple[bool, dict]:
    import sglang_engine

    args = sglang_engine.parse(given)
    sglang_engine.set_environment(args)
    if SWITCH in sys.argv:
        os.environ |= sglang_engine.SAME_BITS
    os.environ[sglang_engine.WATCH] = str(args.out.with_suffix(".rows"))
    Path(os.environ[sglang_engine.WATCH]).mkdir(exist_ok=True)
    sglang_engine.logprobs = of_sglang
    return engine.write_result(sglang_engine.run, args), json.loads(args.out.read_text())


def main() -> None:
    given = [x for x in sys.argv[1:] if x not in (SWITCH, SGLANG)]
    ok, result = (run_sglang if SGLANG in sys.argv else run_vllm)(given)
    show(result)
    wrong = SWITCH in sys.argv and any(x["differ"] for x in result.get("ops", {}).values())
    sys.stdout.flush()
    if SGLANG in sys.argv:
        import sglang_engine

        sglang_engine.end(ok and not wrong)
    os._exit(not ok or wrong)  # an engine's threads may outlive it


if __name__ == "__main__":
    main()
