"""``python -m mla_fp8 demo``: real text through a paged FP8 cache, every layer checked against float64."""

import argparse
import itertools
import sys
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from ..cli import at_least, device, progress
from . import report
from .model import MODELS
from .report import Answer, Results
from .teacher import TeacherForced
from .workload import Workload, run_free

_SHARES = (4, 2, 1)  # requests of different length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", type=Path, help="file to read (default: an essay that comes with the package)"
    )
    parser.add_argument("--model", choices=MODELS, default="v4", help="shapes of DeepSeek V4, V4.1 or V3.2")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every layout that can hold the model's latents, not one and bf16 (minutes on a CPU)",
    )
    parser.add_argument(
        "--hot-buffer",
        action="store_true",
        help="decode from host memory, too, with a hot buffer of a tenth of the context: the same outputs",
    )
    parser.add_argument("--heads", type=at_least(1, 128), default=8, help="query heads, 1 to 128 (default 8)")
    parser.add_argument(
        "--tokens",
        type=at_least(len(_SHARES)),
        default=1792,
        help="bytes to prefill, all requests (default 1792)",
    )
    parser.add_argument(
        "--decode-steps", type=at_least(1), default=16, help="bytes to decode per request (default 16)"
    )
    parser.add_argument(
        "--chunk", type=at_least(1), default=512, help="bytes of one request in a batch (default 512)"
    )
    parser.add_argument(
        "--seed", type=at_least(0, 2**63 - 1), default=0, help="of the random weights (default 0)"
    )
    parser.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder of the chart (default demo_out)"
    )


def make_workload(options: argparse.Namespace) -> Workload:
    """Cuts the text into one passage per request. ValueError if it is too short."""
    text = (
        options.text.read_bytes()
        if options.text
        else files("mla_fp8").joinpath("data/essay.txt").read_bytes()
    )
    prompt_lens = [max(1, options.tokens * share // sum(_SHARES)) for share in _SHARES]
    lengths = [n + options.decode_steps for n in prompt_lens]
    if len(text) <= sum(lengths):
        raise ValueError(
            f"--text: expected more than {sum(lengths)} bytes for these options, got {len(text)}"
        )
    spec = replace(MODELS[options.model], num_q_heads=options.heads)
    if options.hot_buffer:  # as long contexts have it: half of the slots are chosen in a step
        layers = [
            replace(layer, topk=-(-layer.num_hot(max(lengths)) // 2)) if layer.topk else layer
            for layer in spec.layers
        ]
        spec = replace(spec, layers=tuple(layers))
    if not options.all:
        spec = replace(spec, layouts=(spec.layouts[0], spec.layouts[-1]))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Workload(
        spec=spec,
        texts=[text[start : start + n] for start, n in zip(starts, lengths, strict=True)],
        prompt_lens=prompt_lens,
        chunk=options.chunk,
        seed=options.seed,
        device=options.device,
    )


def costs(workload: Workload, runs: int) -> list[int]:
    """How long each batch of the float64 model takes, and then each layout alone, relative to each other."""
    batches = [len(batch.pos) + 64 for _, batch in workload.batches()]
    return [*batches, *[sum(batches) // 4] * (runs * len(workload.spec.layouts))]


def compute(workload: Workload, *, hot_buffer: bool = False) -> Results:
    teacher = TeacherForced(workload)
    with progress(costs(workload, 1 + hot_buffer)) as show:
        count = itertools.count()
        teacher.run(lambda what: show(what, next(count)))
        runs, hot_runs = {}, {}
        for layout in workload.spec.layouts:
            if hot_buffer:
                show(f"{layout} from a hot buffer", next(count))
                hot_runs[layout] = run_free(workload, layout, on_host=True)
            show(f"{layout} alone", next(count))
            runs[layout] = run_free(workload, layout)

    # What comes next after each token of each batch, and which tokens were prefilled.
    following, prefilled = _next_bytes(workload)
    fitted, decoded = prefilled & (following >= 0), ~prefilled & (following >= 0)
    exact = torch.cat(teacher.hidden)
    readout = report.fit_readout(exact[fitted], following[fitted])
    logits = exact @ readout

    def answer(hidden: Tensor) -> Answer:
        own = hidden.double() @ readout
        return Answer(
            logits_rms=float(((own - logits).square().mean() / logits.square().mean()) ** 0.5),
            same_byte=float((own.argmax(-1) == logits.argmax(-1)).double().mean()),
            correct=float((own.argmax(-1) == following)[decoded].double().mean()),
        )

    answers = {layout: answer(torch.cat(run.hidden)) for layout, run in runs.items()}
    return Results(workload, teacher.errors, runs, answers, answer(exact), hot_runs)


def _next_bytes(workload: Workload) -> tuple[Tensor, Tensor]:
    """The byte after each token in the order of the batches (-1 after the last), and which were prefilled."""
    following, prefilled = [], []
    for phase, batch in workload.batches():
        for request, pos in zip(batch.request.tolist(), batch.pos.tolist(), strict=True):
            text = workload.texts[request]
            following.append(text[pos + 1] if pos + 1 < len(text) else -1)
            prefilled.append(phase == "prefill")
    return torch.tensor(following, device=workload.device), torch.tensor(prefilled, device=workload.device)


def main(options: argparse.Namespace) -> int:
    """Prints the verdict, then the tables; writes the chart. The exit status is 1 if a bound was violated."""
    try:
        workload = make_workload(options)
        options.out.mkdir(parents=True, exist_ok=True)  # not after all the work
    except (ValueError, OSError) as error:
        print(f"mla_fp8 demo: {error}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    prompts, steps = workload.prompt_lens, options.decode_steps
    results = compute(workload, hot_buffer=options.hot_buffer)
    try:
        chart = report.draw(results, options.out) or (
            "not drawn, matplotlib is not installed (pip install mla-fp8[plot])"
        )
    except OSError as error:  # a folder that was there, and cannot be written
        chart = f"not drawn, {error}"
    print(report.verdict(results, time.perf_counter() - begin))
    print(f"Chart: {chart}")
    print(
        f"\nModel {options.model}: {len(workload.spec.layers)} layers, {options.heads} heads, "
        "random weights\n"
        f"Text: {options.text or 'the essay of this package'}\n"
        f"Requests of {', '.join(map(str, prompts))} bytes, prefilled in chunks of {options.chunk}; "
        f"{steps} more bytes decoded"
    )
    tables = report.where(workload), report.layer_table(results), report.layout_table(results)
    print("", *tables, sep="\n\n")
    return 1 if results.violations else 0
