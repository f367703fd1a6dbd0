"""What of the package works on this machine, and why the rest does not."""

import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import _libraries, _version
from ..arch import arch_of
from ..backends.table import NATIVE, TABLE, Problem
from ..call import OPS
from ..dispatch import preference, select
from ..index_layout import INDEX_LAYOUTS
from ..layout import KV_LAYOUTS

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # ROCm uses CUDA's


def collect() -> dict[str, dict[str, str]]:
    """The report by section: ``{"libraries": {"libmla_fp8_cpu.so": "loaded", ...}, ...}``."""
    return {
        "versions": {
            "mla_fp8": _version.find() + (" (source tree)" if _version.in_source_tree() else ""),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda of torch": torch.version.cuda or "none",
            "hip of torch": torch.version.hip or "none",
        },
        "libraries": dict(_libraries.status),
        "devices": _devices(),
        "kernels": _kernels(),
        "taken for sparse attention": _taken(),
        "backends": _backends(),
        "layouts": {
            name: f"{layout.bytes_per_token} bytes per token, head_dim_qk {layout.head_dim_qk}"
            for name, layout in KV_LAYOUTS.items()
        }
        | {name: f"{layout.bytes_per_entry} bytes per index key" for name, layout in INDEX_LAYOUTS.items()},
    }


def doctor() -> str:
    """A plain-text report: libraries, devices, which ops have kernels where, which backends can run, and what
    to do next."""
    sections = [
        "\n".join([section, *(f"  {name:<36}{what}" for name, what in rows.items())])
        for section, rows in collect().items()
    ]
    return "\n\n".join([*sections, "\n".join(["next", *(f"  {line}" for line in next_steps())])])


def next_steps() -> list[str]:
    """What to do about kernels that this machine could run and does not have, then what to try."""
    steps = [*_about_library("cuda", "NVIDIA", "/dev/nvidiactl"), *_about_library("hip", "AMD", "/dev/kfd")]
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
            "one; docs/kernels/portable.md says how fast an H200 is by the portable kernel"
        )
    device = " --device cuda" if on_gpu and not torch.version.hip else ""
    return [
        *steps,
        f"python -m mla_fp8 demo{device}: every layer of a small model, checked against float64",
        "python -m mla_fp8 bench: how fast the ops are here, next to the peers that are installed",
        "docs/start.md: a first decode step; docs/guide/engines.md: vLLM and SGLang",
    ]


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


def _devices() -> dict[str, str]:
    isa = torch.ops.mla_fp8.cpu_isa()
    devices = {"cpu": f"{platform.machine()}, {isa} kernels, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {arch_of('cuda', i)}"
    if len(devices) == 1:
        built = torch.version.cuda or torch.version.hip
        devices["cuda"] = "no GPU is visible" if built else "this torch was built for the CPU alone"
    return devices


def _kernels() -> dict[str, str]:
    """For each op (its ``_out`` twin goes with it): the devices that a loaded library has a kernel for."""
    ops = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mla_fp8::"))
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    loaded = {
        op.removeprefix("mla_fp8::"): [device for device, key in _DISPATCH_KEYS.items() if has(op, key)]
        for op in ops
        if not (has(op, "CompositeExplicitAutograd") or op.endswith("_out") or op.startswith("mla_fp8::_"))
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
