"""What of the package works on this machine, and why the rest does not."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import _libraries, _version, reference
from .._torch_private import has_kernel, op_names
from ..arch import arch_of
from ..backends.table import NATIVE, TABLE, Problem
from ..call import OPS
from ..dispatch import preference, select
from ..index_layout import INDEX_LAYOUTS
from ..layout import KV_LAYOUTS
from ..ops.quantize_kv import quantize_kv
from ..ops.sparse_decode import sparse_decode
from . import environment

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # ROCm uses CUDA's


MAX_ERROR = 0.07  # twice what the cache's rounding costs in the step that doctor takes
_LONG = ("kernels", "backends", "layouts")  # printed if asked for


def collect() -> dict[str, dict[str, str]]:
    """The report by section: ``{"libraries": {"libmla_fp8_cpu.so": "loaded", ...}, ...}``."""
    return {
        "versions": environment.versions(),
        "libraries": dict(_libraries.status),
        "devices": environment.devices(),
        "taken for sparse attention": _taken(),
        "kernels": _kernels(),
        "backends": _backends(),
        "layouts": {
            name: f"{layout.bytes_per_token} bytes per token, head_dim_qk {layout.head_dim_qk}"
            for name, layout in KV_LAYOUTS.items()
        }
        | {name: f"{layout.bytes_per_entry} bytes per index key" for name, layout in INDEX_LAYOUTS.items()},
    }


def verdict() -> tuple[bool, str]:
    """Whether a decode step is right on each device that has kernels, and a sentence that says so."""
    right: list[str] = []
    wrong: list[str] = []
    for device, name in _devices_with_kernels().items():
        try:
            error = _error_of_a_decode_step(device)
        except RuntimeError as failure:
            wrong.append(f"{name} fails: {str(failure).splitlines()[0]}")
            continue
        if error <= MAX_ERROR:
            right.append(name)
        else:
            wrong.append(f"{name} errs by {error:.0%}, at most {MAX_ERROR:.0%} is right")
    works = f"works on {' and on '.join(right)}" if right else "does not work here"
    unused = [step.partition(":")[0] for step in _about_libraries()]
    return not wrong, "; ".join([f"mla_fp8 {_version.find()} {works}", *wrong, *unused])


def doctor(verbose: bool = False) -> str:
    """Write a report: the verdict, libraries, devices, backends, and what to do next.

    Args:
        verbose: Also which ops have kernels where, which backends can run, and the layouts.

    Returns:
        Plain text.
    """
    return _text(verdict()[1], verbose)


def _text(says: str, verbose: bool) -> str:
    report = collect()
    if not verbose:
        report = {section: rows for section, rows in report.items() if section not in _LONG}
    return environment.as_text(says, report, next_steps())


def main(options: argparse.Namespace) -> int:
    """Prints the report. The exit status is 1 if a device with kernels gives a wrong result."""
    right, says = verdict()
    print(
        environment.as_json(right, says, collect(), next_steps())
        if options.json
        else _text(says, options.verbose)
    )
    return 0 if right else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also kernels, backends and layouts, one by one"
    )
    parser.add_argument("--json", action="store_true", help="everything, for a program")


def next_steps() -> list[str]:
    """What to do about kernels that this machine could run and does not have, then what to try."""
    steps = _about_libraries()
    on_gpu = torch.cuda.is_available() and not steps
    if on_gpu and torch.version.hip:
        without = ", ".join(op for op, where in _kernels().items() if "cuda" not in where.split(", "))
        steps.append(
            f"ROCm: no kernel yet for {without or 'nothing'}; docs/guide/rocm.md says what ran where"
        )
    elif on_gpu and arch_of("cuda", None) != "sm90":
        arch = arch_of("cuda", None)
        steps.append(
            f"{arch}: no kernel of sparse attention is tuned for it, and none of this package has run on "
            "one; docs/kernels/portable_and_hip.md says how fast an H200 is by the portable kernel"
        )
    device = " --device cuda" if on_gpu and not torch.version.hip else ""
    return [
        *steps,
        f"python -m mla_fp8 demo{device}: every layer of a small model, checked against float64",
        "python -m mla_fp8 bench: how fast the ops are here, next to the peers that are installed",
        "docs/start.md: a first decode step; docs/guide/vllm.md, docs/guide/sglang.md: in an engine",
    ]


def _about_libraries() -> list[str]:
    return [*_about_library("cuda", "NVIDIA", "/dev/nvidiactl"), *_about_library("hip", "AMD", "/dev/kfd")]


def _about_library(built_for: str, vendor: str, node: str) -> Iterator[str]:
    """``node`` is there where the vendor's driver is."""
    library, has_gpu = f"libmla_fp8_{built_for}.so", Path(node).exists()
    status = _libraries.status.get(library, "")
    if status.startswith("failed to load"):
        yield (
            f"{library} did not load: take the build for the {built_for.upper()} that this torch has, "
            f"{getattr(torch.version, built_for)} (docs/start.md, which wheel)"
        )
    elif status == "not in this build" and has_gpu:
        yield (
            f"this build has no kernels for {vendor} GPUs: docs/start.md says which wheel has them, and how "
            "to build them"
        )
    elif status.startswith("not loaded") and has_gpu:
        yield (
            f"this machine has an {vendor} GPU and torch {torch.__version__} cannot use it: install a torch "
            f"for {built_for.upper()}"
        )
    elif status == "loaded" and not torch.cuda.is_available():
        yield f"no GPU is visible: the kernels for {vendor} GPUs are loaded and wait for one"


def _devices_with_kernels() -> dict[str, str]:
    """The devices that sparse_decode has kernels for, as a sentence names them."""
    has = _kernels()["sparse_decode"].split(", ")
    found = {"cpu": f"the CPU ({torch.ops.mla_fp8.cpu_isa()} kernels)"}
    for i in range(torch.cuda.device_count() if "cuda" in has else 0):
        found[f"cuda:{i}"] = f"cuda:{i} ({torch.cuda.get_device_name(i)}, {arch_of('cuda', i)})"
    return found


def _error_of_a_decode_step(device: str) -> float:
    """A step of two tokens over a small cache, relative to float64 over what the cache was written from."""
    layout, generator = KV_LAYOUTS["dsv4"], torch.Generator().manual_seed(0)
    latent = torch.randn(256, layout.head_dim_qk, generator=generator).bfloat16().to(device)
    q = torch.randn(2, 16, layout.head_dim_qk, generator=generator).bfloat16().to(device)
    indices = torch.randint(256, (2, 64), generator=generator, dtype=torch.int32).to(device)
    kv_cache = layout.empty(4, 64, device)
    quantize_kv(latent, torch.arange(256, device=device), kv_cache, layout=layout, page_size=64)
    scale = layout.head_dim_qk**-0.5
    out, _ = sparse_decode(
        q, kv_cache, indices, layout=layout, page_size=64, sm_scale=scale, backend="native"
    )
    exact, _, _ = reference.sparse_attention(q.double(), [(latent.double(), indices, None)], sm_scale=scale)
    return float((out.double() - exact).norm() / exact.norm())


def _kernels() -> dict[str, str]:
    """For each op (its ``_out`` twin goes with it): the devices that a loaded library has a kernel for."""
    loaded = {
        op: [device for device, key in _DISPATCH_KEYS.items() if has_kernel(op, key)]
        for op in op_names("mla_fp8")
        if not (has_kernel(op, "CompositeExplicitAutograd") or op.endswith("_out") or op.startswith("_"))
    }
    return {op: ", ".join(devices) or "no kernel is loaded" for op, devices in loaded.items()}


def _kernel_of_native(arch: str) -> str:
    if arch == "sm90":
        return "native, tuned kernels; the portable one for _fnuz layouts"
    return f"native, portable kernel as none is tuned for {arch}" if arch.startswith("sm") else "native"


def _taken() -> dict[str, str]:
    """What ``backend="auto"`` takes for 64 heads on the device at hand, and why."""
    arch = arch_of("cuda" if torch.cuda.is_available() else "cpu", None)
    rows: dict[str, str] = {}
    for op in OPS:
        readers: dict[str, list[str]] = {}
        for layout in NATIVE.layouts:
            p = Problem(op, arch, layout, num_q_heads=64)
            try:
                name = select(p).name
            except ValueError:
                name, why = "none", "see below"
            else:
                why = preference(p).why
            kernel = _kernel_of_native(arch) if name == NATIVE.name else name
            readers.setdefault(f"{kernel} ({why})", []).append(layout)
        rows[op] = "; ".join(
            reader if len(layouts) == len(NATIVE.layouts) else f"{', '.join(layouts)}: {reader}"
            for reader, layouts in readers.items()
        )
    return rows


def _backends() -> dict[str, str]:
    """Each backend of the dispatch table, for the device at hand: what it runs, and why not the rest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arch = arch_of(device, None)
    rows: dict[str, str] = {}
    for backend in TABLE:
        for op in backend.ops:
            reasons = {
                layout: backend.why_not(Problem(op, arch, layout, num_q_heads=64))
                for layout in backend.layouts
            }
            able = [layout for layout, reason in reasons.items() if reason is None]
            why = [*dict.fromkeys(reason for reason in reasons.values() if reason)]
            everything = able == list(NATIVE.layouts)
            says = f"{arch}: {'all layouts' if everything else ', '.join(able) or 'no'}"
            if able and backend.only_asked_for:
                why.append(f"only if asked for: {backend.only_asked_for}")
            name = f"{op}: {backend.name}"
            line = f"{says} ({'; '.join(why)})" if why else says
            rows[name] = f"{rows[name]}; {line}" if name in rows else line
    return rows
