"""docs/performance.md, its charts, and the numbers of README.md, from benchmarks/results."""

import re

import engines
import svg
from results import (
    DECODE,
    GPU,
    H100,
    PREFILL,
    cell,
    fixed,
    markdown,
    matched,
    of,
)
from table import Case

HEADS = (8, 16, 32, 64, 128)
REAL = "sparse_decode_real_rows", "sparse_prefill_real_rows"
COPIES = "flash_mla, pad, slice"
CACHE_OPS = (
    "quantize_kv", "dequantize_kv", "dequantize_kv_paged", "combine_topk_swa_indices", "pad_q_heads",
    "merge_attention_states",
)  # fmt: skip


def describe(case: Case) -> str:
    """What differs from case to case of one kernel and number of heads."""
    if found := DECODE.fullmatch(case.label):
        words = [f"`{found['layout']}`, {found['keys']} keys, {found['batch']} requests", found["kind"]]
    else:
        found = PREFILL.fullmatch(case.label)
        keys = "+".join(filter(None, (found["topk"], found["window"])))
        words = [f"`{found['layout']}`, {keys} keys, {found['tokens']} queries", found["kind"]]
    return ", ".join(filter(None, words))


def strongest(device: str) -> dict[str, list[tuple[int, float, Case]]]:
    """What is compared with the strongest peer there is for it: (heads, ratio, case), the worst first.

    Prefill from pages is beside FlashMLA over a workspace of bf16 rows that is ready.
    """
    decode = [*matched(device, "sparse_decode", DECODE), *matched(device, REAL[0], DECODE)]
    full = [(m, case) for m, case in matched(device, "sparse_prefill", PREFILL) if not m["layer"]]
    rows = [*full, *matched(device, REAL[1], PREFILL)]
    found = {
        "decode": decode,
        "prefill over bf16 rows": [(m, case) for m, case in rows if m["bf16"]],
        "prefill from FP8 pages": [
            (m, case) for m, case in full if not m["bf16"] and not m["layout"].startswith("bf16")
        ],
    }
    return {
        name: sorted(
            ((int(m["heads"]), c.ratios["flash_mla"], c) for m, c in cases if "flash_mla" in c.peers),
            key=lambda x: x[1],
        )
        for name, cases in found.items()
    }


def peers_table() -> str:
    """README.md: the worst, the middle and the best case beside the strongest peer for each row."""
    lines = engines.attention()
    for name, cases in strongest(H100).items():
        ratios = [f"{fixed(cases[i][1])}x" for i in (0, len(cases) // 2, -1)]
        lines.append([f"{name}, {len(cases)} cases", "H100", "SGLang 0.5.23", *ratios])
    return markdown(["", "GPU", "FlashMLA of", "worst", "middle", "best"], lines)


def speed_chart() -> str:
    groups = {}
    titles = {
        "decode": "decode",
        "prefill over bf16 rows": "prefill over bf16 rows",
        "prefill from FP8 pages": "prefill from pages, FlashMLA over bf16 rows",
    }
    for name, cases in strongest(H100).items():
        rows = []
        for heads in HEADS:
            ratios = [ratio for h, ratio, _ in cases if h == heads]
            if ratios:
                rows.append(svg.Range(f"{heads} heads", ratios[0], ratios[len(ratios) // 2], ratios[-1]))
        groups[titles[name]] = rows
    note = "H100; worst, middle and best case; at 1x both take as long"
    return svg.ranges("Times as fast as SGLang's FlashMLA", note, groups)


def decode_chart() -> str:
    names = {"dsv32": "V3.2", "dsv4": "V4"}
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for m, case in matched(H100, "sparse_decode", DECODE):
        if m["page"] or m["s_q"] or m["layout"] not in names or "flash_mla" not in case.peers:
            continue
        keys = m["keys"].replace("+", " + ")
        panel = panels.setdefault(f"{names[m['layout']]}, {keys} keys, by requests", {})
        panel.setdefault(f"{m['heads']} heads", {})[int(m["batch"])] = case.ratios["flash_mla"]
    note = "H100; every index is a key; at 1x both take as long"
    return svg.lines("Decode: times as fast as SGLang's FlashMLA", note, panels)


def percent_of_copy(case: Case) -> float:
    return 100 * case.ratios["copy"]


def cache_chart() -> str:
    picked = {
        "quantize_kv, 32768 tokens": ("quantize_kv", r"(\w+) tokens=32768 random"),
        "dequantize_kv, 1 M slots": ("dequantize_kv", r"(\w+) slots=1048576 random"),
        "combine_topk_swa_indices, 16 K tokens": (
            "combine_topk_swa_indices", r"tokens=16384 (width=\d+)",
        ),
    }  # fmt: skip
    groups = {}
    for name, (op, pattern) in picked.items():
        found = {
            m[1]: min(percent_of_copy(case), 110)
            for label, case in of(GPU, op).items()
            if (m := re.fullmatch(pattern, label)) and not label.startswith("bf16")
        }
        if found:
            groups[name] = found
    note = "H200; % of a copy of as many bytes; slots in random order"
    return svg.bars("How near cache ops come to a copy", note, groups, "{:.0f} %", 100)


def decode_table(device: str) -> str:
    """us (how many times as fast as FlashMLA), of full rows."""
    cases, batches = of(device, "sparse_decode"), (8, 32, 128, 256)
    lines = []
    for model, layout, keys in (("V3.2", "dsv32", "2048"), ("V4", "dsv4", "128+512")):
        for heads in HEADS:
            found = (cases.get(f"{layout} {keys} h{heads} b{batch}") for batch in batches)
            lines.append([model, f"{heads}", *(cell(case, "flash_mla") for case in found)])
    return markdown(["decode", "heads", *(f"{batch} requests" for batch in batches)], lines)


def prefill_table(device: str) -> str:
    """As decode_table; of 4096 queries over entries at random places."""
    cases, lines = of(device, "sparse_prefill"), []
    for name, label in (
        ("V3.2, pages of 32 K", "dsv32 2048 32K"),
        ("V3.2, pages of 128 K", "dsv32 2048 128K"),
        ("V4, pages of 32 K", "dsv4 512+128 32K"),
        ("V4, pages of 128 K", "dsv4 512+128 128K"),
        ("V3.2, bf16 rows of 32 K", "bf16 dsv32 2048 32K"),
        ("V3.2, bf16 rows of 128 K", "bf16 dsv32 2048 128K"),
        ("V4, bf16 rows of 64 K", "bf16 dsv4 512+128 64K"),
    ):
        found = (cases.get(f"{label} h{heads} t4096") for heads in HEADS)
        lines.append([name, *(cell(case, "flash_mla") for case in found)])
    return markdown(["prefill", *(f"{heads} heads" for heads in HEADS)], lines)


def slower() -> str:
    """Cases that FlashMLA is faster in, beside the strongest peer."""
    lines = []
    for gpu, device in (("H100", H100), ("H200", GPU)):
        for name, cases in strongest(device).items():
            for heads in HEADS:
                mine = [(ratio, case) for h, ratio, case in cases if h == heads]
                behind = [(ratio, case) for ratio, case in mine if ratio < 1]
                if behind:
                    worst, case = behind[0]
                    count = f"{len(behind)} of {len(mine)}"
                    lines.append([gpu, name, f"{heads}", count, f"{worst:.2f}x: {describe(case)}"])
    return markdown(["GPU", "", "heads", "slower", "worst case"], lines)


def parts() -> dict[str, str]:
    """The generated parts of documents, by name."""
    made = {"peers": peers_table(), "slower": slower()}
    for gpu, device in (("H100", H100), ("H200", GPU)):
        made |= {f"decode {gpu}": decode_table(device), f"prefill {gpu}": prefill_table(device)}
    return made


def images() -> dict[str, str]:
    return {"speed.svg": speed_chart(), "decode.svg": decode_chart(), "cache_ops.svg": cache_chart()}
