"""An engine's ranks, each in a process of its own: what engine.py asks of them, and what is replaced."""

import collections
import json
import os
from importlib import import_module

import torch
from report import each_once

# Of an engine's processes, in their environment: whose attention, and whose exchange.
EXACT, EXCHANGE = "MLA_FP8_ENGINE_IS_EXACT", "MLA_FP8_ENGINE_EXCHANGE"
PAGES_AT_ONCE = 1 << 10


class Worker:
    """What vLLM's worker can do besides (``worker_extension_cls``). Results are what JSON has."""

    def mla_fp8_weights(self) -> float:
        """Of weights that are not the same on two ranks."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return next(float(x.W_UV.double().abs().sum()) for x in layers if hasattr(x, "W_UV"))

    def mla_fp8_fill(self) -> int:
        """Random rows and index keys into all pages. Returns how many caches have them."""
        rank = import_module("vllm.distributed.parallel_state").get_dcp_group().rank_in_group
        generator = torch.Generator(self.device).manual_seed(rank)
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = [x.kv_cache for x in layers if getattr(x, "kv_cache", None) is not None]
        for cache in caches:
            for pages in cache.split(PAGES_AT_ONCE):
                fill(pages, generator)
        torch.cuda.synchronize()
        return len(caches)

    def mla_fp8_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        self.mla_fp8_profiler = profile(activities=[ProfilerActivity.CUDA])
        self.mla_fp8_profiler.start()

    def mla_fp8_kernels(self) -> str:
        """Since `mla_fp8_profile`: what `counted` counts, and the microseconds from the first to the last."""
        torch.cuda.synchronize()
        self.mla_fp8_profiler.stop()
        events = on_gpu(self.mla_fp8_profiler)
        span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        return json.dumps([[*what, x] for what, x in counted(events).items()] + [["", "span", span]])


def kernels(llm, run) -> collections.Counter:
    """What `counted` counts of the first rank's kernels in ``run()``, and ("", "span")."""
    llm.collective_rpc("mla_fp8_profile")
    run()
    found = json.loads(llm.collective_rpc("mla_fp8_kernels")[0])
    return collections.Counter({(name, what): x for name, what, x in found})


def layouts() -> tuple:
    """Of rows and of index keys. An engine as it is does without mla_fp8 until here."""
    of_keys = import_module("mla_fp8.index_layout").INDEX_LAYOUTS["index_fp8"]
    return import_module("mla_fp8").KV_LAYOUTS["dsv32"], of_keys


def fill(pages: torch.Tensor, generator: torch.Generator) -> None:
    """Random rows, or index keys, into ``pages [n, rows of a page, bytes]`` uint8."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=pages.device, generator=generator)

    def fp8(*shape: int) -> torch.Tensor:
        return random(*shape).to(torch.float8_e4m3fn).view(torch.uint8)

    def scale(*shape: int) -> torch.Tensor:
        return (random(*shape).abs() + 0.5).view(torch.uint8)

    number, size, width = pages.shape
    row, key = layouts()
    if width == row.bytes_per_token:
        values, scales = row.nope_dim, row.rope_offset
        pages[..., :values] = fp8(number, size, values)
        pages[..., values:scales] = scale(number, size, (scales - values) // 4)
        pages[..., scales:] = random(number, size, row.rope_dim).bfloat16().view(torch.uint8)
    elif width == key.bytes_per_entry:  # of a page, all values, then all scales
        values = size * key.value_bytes
        flat = pages.as_strided((number, size * width), (pages.stride(0), 1))
        flat[:, :values], flat[:, values:] = fp8(number, values), scale(number, size)
    else:
        raise ValueError(f"pages must be of {row.name} or {key.name}, got {width} bytes a token")


def on_gpu(profiler) -> list:
    return [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def counted(events: list) -> collections.Counter:
    """Of each kernel: (name, "us") is its microseconds, as `report.each_once` counts them; (name, "n") is its
    launches, (name, "graph") those of them in CUDA graphs, whose kernels have one number.
    """
    times = each_once((e.name[:200], e.time_range.start, e.time_range.end) for e in events)
    launches = collections.Counter(e.name[:200] for e in events)
    of_call = collections.Counter(e.id for e in events)
    in_graphs = collections.Counter(e.name[:200] for e in events if of_call[e.id] > 1)
    found = collections.Counter({(name, "us"): us for name, us in times.items()})
    found.update({(name, "n"): n for name, n in launches.items()})
    found.update({(name, "graph"): n for name, n in in_graphs.items()})
    return found


def replace() -> None:
    """In every process of an engine, before it makes layers: what the environment asks for."""
    if os.environ.get(EXACT) == "1":
        import_module("spies").exact_attention()
    if os.environ.get(EXCHANGE) == "vllm":
        exchange_by_vllm()


def exchange_by_vllm() -> None:
    """Queries and results of ranks go as vLLM sends them, and choices by its collective. Their merge stays
    mla_fp8's: vLLM's needs CuTe DSL, which the GPU machine lacks.
    """
    ours = import_module("mla_fp8.integrations.vllm_context_parallel")

    def leave(layer, vllm_config) -> None:
        gather = layer.dcp_manager.query_gather
        dim = layer.kv_lora_rank + layer.qk_rope_head_dim
        layer.dcp_manager.query_gather = lambda q: gather(q.as_subclass(torch.Tensor)[..., :dim])

    ours._exchange_by_us = leave
