"""The demo's tables and its chart."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...layout import KV_LAYOUTS
from .teacher import CHECKED_PER_BATCH, STEPS, LayerError
from .workload import FreeRun, Workload


@dataclass(frozen=True)
class Answer:
    """What a free-running model says, held against the float64 model. Over all tokens."""

    logits_rms: float  # of the difference, relative to that of the logits
    same_byte: float  # how often the likeliest next byte is the same
    correct: float  # how often it is the byte that the text goes on with, decoded tokens only


@dataclass(frozen=True)
class Results:
    workload: Workload
    errors: dict[tuple[int, str], LayerError]
    runs: dict[str, FreeRun]
    answers: dict[str, Answer]
    exact: Answer
    hot_runs: dict[str, FreeRun] = field(default_factory=dict)  # decoded from host memory

    @property
    def violations(self) -> list[str]:
        """One line per bound that does not hold."""
        found = [
            f"layer {layer}, {layout}: {_ratios(error, '{} {:.3g}', ', ')}"
            for (layer, layout), error in self.errors.items()
            if not error.ok
        ]
        return found + [
            f"{layout}: outputs from a hot buffer differ"
            for layout, run in self.hot_runs.items()
            if not run.same_bits(self.runs[layout])
        ]


def _ratios(error: LayerError, form: str, between: str) -> str:
    return between.join(form.format(step, ratio) for step, ratio in error.ratios.items())


def verdict(results: Results, seconds: float) -> str:
    """What a reader wants to know first: whether all bounds hold, and what each layout costs."""
    spec, runs = results.workload.spec, results.runs
    checked = f"in {len(spec.layers)} layers x {len(spec.layouts)} layouts ({seconds:.0f} s)"
    if results.violations:
        lines = [f"FAILED: {len(results.violations)} bounds do not hold {checked}. 1 is the bound:"]
        return "\n".join([*lines, *(f"  {line}" for line in results.violations)])
    largest = max(run.cache_bytes for run in runs.values())
    lines = [f"Passed: all bounds hold {checked}. What each layout costs:"]
    for layout, answer in results.answers.items():
        errors = [results.errors[i, layout].rms_error for i in range(len(spec.layers))]
        lines.append(
            f"  {layout:<19}layers err by {min(errors):.1%} to {max(errors):.1%}, the logits by "
            f"{answer.logits_rms:.1%}; same next byte {answer.same_byte:.1%}; "
            f"{runs[layout].cache_bytes / largest:.0%} of the memory"
        )
    for layout, run in results.hot_runs.items():
        found, loaded = run.found_and_loaded
        lines.append(
            f"  {layout:<19}from a hot buffer of a tenth: the same outputs; "
            f"{share(loaded / (found + loaded or math.nan))} of the chosen entries were loaded; "
            f"{run.cache_bytes / largest:.0%} of the memory"
        )
    return "\n".join(lines)


def fit_readout(hidden: Tensor, next_byte: Tensor) -> Tensor:
    """[hidden, 256]: the linear map that predicts the next byte best (ridge regression)."""
    wanted = torch.nn.functional.one_hot(next_byte, 256).to(hidden.dtype)
    gram = hidden.T @ hidden + 0.1 * len(hidden) * torch.eye(hidden.shape[1], dtype=hidden.dtype).to(hidden)
    readout: Tensor = torch.linalg.solve(gram, hidden.T @ wanted)
    return readout


def describe_layer(workload: Workload, i: int) -> str:
    layer = workload.spec.layers[i]
    window = f"window {layer.window}" if layer.window else ""
    chosen = f"{layer.num_selected(workload.max_len)} of {layer.max_entries(workload.max_len)}"
    entries = f"{chosen} entries of {layer.ratio}" if layer.ratio else ""
    blocks = f", {layer.num_blocks} blocks published" if layer.num_blocks else ""
    if layer.source is not None:
        blocks = f" in the blocks of layer {layer.source}"
    return " + ".join(filter(None, (entries + blocks, window)))


def layer_table(results: Results) -> str:
    lines = [
        "Same inputs to every layout in every layer. Errors of its output against a layer in float64 without",
        "a cache, relative to the output's rms. Then each step against float64; 1 is what rounding may do:",
        *(f"  {step:<10}{what}" for step, what in STEPS.items()),
        f"Attention is bounded for {CHECKED_PER_BATCH} query tokens of each batch.",
        "",
        f"{'layer':<6}{'layout':<19}{'rms error':>10}{'max':>6}{'of bound:':>11}"
        f"{''.join(f'{step:>10}' for step in STEPS)}{'paths differ':>14}",
    ]
    previous = -1
    for (i, layout), error in results.errors.items():
        if i != previous:
            lines.append(f"{i:<6}{describe_layer(results.workload, i)}")
        previous = i
        lines.append(
            f"{'':<6}{layout:<19}{error.rms_error:>10.2%}{error.relative(error.max_error):>6.2f}{'':>11}"
            f"{''.join(f'{ratio:>10.3f}' for ratio in error.ratios.values())}"
            f"{error.relative(error.path_difference):>14.4f}{'' if error.ok else '  VIOLATED'}"
        )
    return "\n".join(lines)


def bytes_per_entry(layout: str) -> str:
    """Of the window and, where they have another layout, of the entries."""
    return " + ".join(str(KV_LAYOUTS[name].bytes_per_token) for name in layout.split("+"))


def share(x: float) -> str:
    """In percent; of nothing there is none."""
    return "-" if math.isnan(x) else f"{x:.1%}"


def layout_table(results: Results) -> str:
    spec = results.workload.spec
    lines = [
        "Each layout drives the whole model by itself (float32 around the ops). tokens/s: our ops alone, all",
        f"{len(spec.layers)} layers, from projection to projection.",
        "",
        f"{'layout':<19}{'bytes/entry':>12}{'cache MiB':>11}{'prefill/s':>11}{'decode/s':>10}"
        f"{'logits rms err':>16}{'same byte':>11}{'correct':>9}",
    ]
    for layout, run in results.runs.items():
        answer, clock = results.answers[layout], run.clock
        lines.append(
            f"{layout:<19}{bytes_per_entry(layout):>12}{run.cache_bytes / 2**20:>11.2f}"
            f"{clock.tokens_per_second('prefill'):>11,.0f}{clock.tokens_per_second('decode'):>10,.0f}"
            f"{answer.logits_rms:>16.2%}{answer.same_byte:>11.1%}{share(answer.correct):>9}"
        )
    lines.append(
        f"{'float64, no cache':<74}{'':>5}{results.exact.same_byte:>11.1%}{share(results.exact.correct):>9}"
    )
    return "\n".join(lines)


def where(workload: Workload) -> str:
    """What was computed by what, for the reader who wonders."""
    device = workload.device
    if device == "cpu":
        isa, threads = torch.ops.mla_fp8.cpu_isa(), torch.get_num_threads()
        machine = f"the CPU ({isa} kernels, {threads} threads)"
    else:
        machine = torch.cuda.get_device_name(device)
    lines = [
        f"Ours, on {machine}, backend native:",
        "  qk_norm_rope_insert, compress_kv, quantize_index_k, index_topk, topk_to_slots,",
        "  build_swa_token_ids, combine_topk_swa_indices, dequantize_kv, dequantize_kv_paged,",
        "  sparse_prefill, sparse_prefill_paged, sparse_decode, inverse_rope",
        f"PyTorch {torch.__version__}, on {device}:",
        "  embedding, projections and what adds them up; float64 of all of it",
    ]
    if any("fnuz" in layout for layout in workload.spec.layouts):
        lines.append("The fnuz layouts hold the encoding of AMD's gfx942; no AMD GPU takes part.")
    return "\n".join(lines)


def draw(results: Results, folder: Path) -> Path | None:
    """Error by layer and cache size of each layout as a PNG. None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    spec = results.workload.spec
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    errors, sizes = figure.subplots(1, 2)
    width = 0.8 / len(spec.layouts)
    for k, layout in enumerate(spec.layouts):
        by_layer = [results.errors[i, layout].rms_error for i in range(len(spec.layers))]
        errors.bar(
            [i + k * width - 0.4 for i in range(len(by_layer))], by_layer, width, align="edge", label=layout
        )
    names = [f"layer {i}\nratio {layer.ratio}" for i, layer in enumerate(spec.layers)]
    errors.set_xticks(range(len(names)), names)
    errors.set(ylabel="rms error / rms output", title="Error of attention, same inputs")
    figure.legend(loc="outside lower left", ncols=len(spec.layouts))  # beside the bars, never over them
    mib = [results.runs[layout].cache_bytes / 2**20 for layout in spec.layouts]
    bars = sizes.barh(spec.layouts, mib)
    sizes.bar_label(bars, [f"{bytes_per_entry(layout)} B/entry" for layout in spec.layouts], padding=3)
    sizes.set(xlabel="MiB, all layers", title="Cache size", xlim=(0, 1.4 * max(mib)))
    sizes.invert_yaxis()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "error_and_size.png"
    figure.savefig(path, dpi=120)
    return path
