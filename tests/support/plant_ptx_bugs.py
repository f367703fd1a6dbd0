"""Plants bugs into the PTX of two attention kernels, one at a time, and prints as JSON how often the machine
saw one: {"few_heads": {"wait": [seen, planted], ...}, ...}. Seen: the launch fails, or other bits come out.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import count

import emulation
import torch
from sparse_cases import case_over, filled_scope

import mla_fp8

SEEDS = ("0", "1", "2", "3")
# What is taken out: the text becomes blanks.
BUGS = {
    "wait": rb"mbarrier\.try_wait\.parity\.shared\.b64 p, \[%r\d+\], %r\d+; @!p bra WAIT;",
    "barrier": rb"bar\.sync\s+[%\w]+(, [%\w]+)?;",
    "arrival": rb"mbarrier\.arrive\.shared\.b64 _, \[%r\d+\];",
    "proxy fence": rb"fence\.proxy\.async\.shared::cta;",
}
# A part of the kernel's name, its layout, heads, and its plan.
KERNELS = {
    "few_heads": (
        "few_heads_split_kernel.*RowILNS_10KvLayoutIdE{}EEEXtl.*FewHeadsTraitsELi2ELi4E.*ScheduleE0E",
        "dsv32",
        16,
        (16, 2, 4),
    ),
    "many_heads": (
        "many_heads_split_kernel.*RowI.*IdE{}EEEXtl.*octetsLi8E.*producersLi4E.*ScheduleE0E.*QueryHeads",
        "dsv4",
        64,
        (64, 1, 4),
    ),
}


def problems(layout: str, heads: int) -> list[Callable[..., tuple]]:
    """Rows of several blocks for each CTA, in memory that the machine knows: one with holes, one without, one
    with a hole that producers find when they have fetched their first rows; then a long one, mostly holes.
    """
    torch.manual_seed(0)
    rows, long_row = (torch.randint(1500, shape, dtype=torch.int32) for shape in ((3, 900), (1, 2080)))
    rows[0, torch.rand(900) < 0.15] = -1
    rows[2, 5] = -1
    long_row[0, torch.rand(2080) < 0.6] = -1
    layout = mla_fp8.KV_LAYOUTS[layout]
    scopes = [filled_scope(layout, "cpu", x, None, num_pages=24, page_size=64) for x in (rows, long_row)]
    return [case_over([scope], heads).run_by for scope in scopes]


def ptx_texts(library: ctypes.CDLL) -> Iterator[ctypes.Array]:
    """The PTX that the machine has loaded, as it lies in memory: a text for each source file."""
    library.fake_cuda_ptx.restype = ctypes.c_void_p
    size = ctypes.c_size_t()
    for number in count():
        address = library.fake_cuda_ptx(ctypes.c_size_t(number), ctypes.byref(size))
        if not address:
            return
        yield (ctypes.c_char * size.value).from_address(address)


def kernel_in(texts: list[ctypes.Array], pattern: str) -> ctypes.Array:
    """The text of the first kernel whose name has the pattern, as it lies in memory."""
    for text in texts:
        content = text.raw
        for m in re.finditer(rb"\.entry (\w+)\(", content):
            if re.search(pattern.encode(), m[1]):
                end = content.index(b"\n}\n", m.start())
                return (ctypes.c_char * (end - m.start())).from_buffer(text, m.start())
    raise LookupError(f"no kernel is called {pattern}")


def main() -> None:
    emulation.load(emulation.HOPPER)
    library = ctypes.CDLL(str(emulation.CUDA_LIBRARY))
    forget = library.fake_cuda_forget_kernels
    texts = list(ptx_texts(library))
    found: dict[str, dict[str, list[int]]] = {}
    for name, (pattern, layout, heads, (per_cta, splits, producers)) in KERNELS.items():
        text = kernel_in(texts, pattern.format(int(mla_fp8.KV_LAYOUTS[layout].id)))
        content = text.raw
        run_by = problems(layout, heads)

        def runs(
            name=name, run_by=run_by, per_cta=per_cta, splits=splits, producers=producers
        ) -> Iterator[list[torch.Tensor]]:
            forget()
            options = {"heads": per_cta, "splits": splits, "producers": producers, "max_logits": False}
            for seed in SEEDS:
                os.environ["FAKE_CUDA_SEED"] = seed
                for run in run_by:
                    yield [t.clone() for t in run(name, schedule="split", **options)]

        right = list(runs())

        def is_seen(runs=runs, right=right) -> bool:  # ends with the first run that shows it
            try:
                return not all(all(map(torch.equal, *both)) for both in zip(runs(), right, strict=True))
            except RuntimeError as error:
                if "kernel launch" not in str(error):
                    raise
                return True

        found[name] = {bug: [0, 0] for bug in BUGS}
        for bug, instruction in BUGS.items():
            for m in re.finditer(instruction, content):
                text[m.start() : m.end()] = b" " * len(m[0])
                seen = is_seen()
                text[m.start() : m.end()] = m[0]
                if seen:
                    found[name][bug][0] += 1
                elif os.environ.get("VERBOSE"):
                    line = content[: m.start()].count(b"\n")
                    print(name, bug, "line", line, "not seen", file=sys.stderr)
                found[name][bug][1] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
