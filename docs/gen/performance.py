"""docs/performance.md, its charts, and the numbers of README.md, from benchmarks/results."""

import re
from collections.abc import Callable, Iterable, Iterator

import engines
import results
import summary
import svg
from results import (
    CPU,
    DECODE,
    GPU,
    H100,
    PREFILL,
    STRATEGY,
    cell,
    commits,
    fixed,
    flash_mla_builds,
    folded,
    markdown,
    matched,
    of,
    span,
)
from table import Case

HEADS = (8, 16, 32, 64, 128)
REAL = "sparse_decode_real_rows", "sparse_prefill_real_rows"
COPIES = "flash_mla, pad, slice"
CACHE_OPS = (
    "quantize_kv", "dequantize_kv", "dequantize_kv_paged", "combine_topk_swa_indices", "pad_q_heads",
    "merge_attention_states",
)  # fmt: skip


def real_rows(device: str = GPU) -> dict[str, tuple[str, list[Case]]]:
    """What is compared: (peer, cases)."""
    decode, prefill = (list(of(device, op).values()) for op in REAL)
    return {
        "decode": ("flash_mla", decode),
        "prefill from FP8 pages": (
            "flash_mla, pages",
            [c for c in prefill if not c.label.startswith("bf16")],
        ),
        "prefill over bf16 rows": ("flash_mla", [c for c in prefill if c.label.startswith("bf16")]),
    }


def all_real_rows() -> dict[str, tuple[str, list[Case]]]:
    return real_rows() | {f"{name}, H100": found for name, found in real_rows(H100).items()}


def describe(case: Case) -> str:
    """A case of a benchmark in words."""
    label = case.label
    if found := DECODE.fullmatch(label):
        words = [f"`{found['layout']}`, {found['heads']} heads, batch {found['batch']}", found["kind"]]
    elif found := PREFILL.fullmatch(label):
        words = [f"`{found['layout']}`, {found['heads']} heads, {found['tokens']} queries", found["kind"]]
    else:
        words = [f"`{case.op}`", label]
    return ", ".join(filter(None, words))


def layers() -> dict[str, tuple[Case, str]]:
    """Whole prefill layers: the faster of our ways (as `auto` chooses), by shape, with its way."""
    found: dict[str, tuple[Case, str]] = {}
    for match, case in matched(GPU, "sparse_prefill", PREFILL):
        if not match["layer"]:
            continue
        shape, way = re.sub(r"^layer (bf16 )?", "", case.label), "workspace" if match["bf16"] else "pages"
        if shape not in found or case.ours.us < found[shape][0].ours.us:
            found[shape] = case, way
    return found


def cache_ops(*ops: str) -> list[Case]:
    """Cases of 4096 rows and more: below that a launch is most of the time."""
    cases = [case for op in ops for case in of(GPU, op).values() if "ragged" not in case.label]
    return [c for c in cases if int(re.search(r"(?:slots|tokens)=(\d+)", c.label)[1]) >= 4096]


def extremes(name: str, peer: str, cases: Iterable[Case], how: str) -> list[str]:
    """A line of the table of worst and best cells."""
    ranked = sorted((c for c in cases if peer in c.peers), key=lambda c: c.ratios[peer])
    if not ranked:
        return [name, how, "", "", ""]
    ends = [f"{fixed(c.ratios[peer])}x: {describe(c)}" for c in (ranked[0], ranked[-1])]
    return [name, how, *ends, commits(ranked)]


def overview() -> str:
    names = {"flash_mla": "FlashMLA", "flash_mla, pages": "FlashMLA's decode kernel, the same pages"}
    rows = [
        extremes(f"{name}, {len(cases)} cells", peer, cases, f"{names[peer]} ({flash_mla_builds(cases)})")
        for name, (peer, cases) in all_real_rows().items()
    ]
    whole = [case for case, _ in layers().values()]
    rows.append(extremes("whole prefill layers", "triton + flash_mla", whole, "Triton and FlashMLA"))
    moving = cache_ops("quantize_kv", "dequantize_kv", "combine_topk_swa_indices")
    rows.append(extremes("cache ops from 4096 rows", "triton", moving, "Triton"))
    rows.append(extremes("the same", "copy", moving, "a copy of the same bytes"))
    table = markdown(["", "against", "worst cell", "best cell", "measured at"], rows)
    ratios = [c.ratios[peer] for peer, cases in all_real_rows().values() for c in cases if peer in c.peers]
    return f"{table}\n\nSlower than FlashMLA: {sum(r < 1 for r in ratios)} of {len(ratios)} such cells."


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


def decode_tables(device: str = GPU) -> Iterator[str]:
    cases = of(device, "sparse_decode")
    for layout, keys, batches in (
        ("dsv32", "2048", (1, 8, 32, 64, 128, 256)),
        ("dsv4", "128+512", (32, 128, 256)),
        ("dsv4", "128+1024", (32, 128, 256)),
    ):
        found = {(h, b): cases.get(f"{layout} {keys} h{h} b{b}") for h in HEADS for b in batches}
        lines = [
            [f"{h} heads", *(cell(found[h, b], "flash_mla", COPIES) for b in batches)]
            for h in HEADS
            if any(found[h, b] for b in batches)
        ]
        yield markdown([f"`{layout}`, {keys} keys", *(f"batch {b}" for b in batches)], lines)
    others = {label: c for label, c in cases.items() if " s_q" in label or " p2 " in label}
    yield markdown(
        ["two query tokens per request; pages of two entries", "us (ratios)"],
        [[label, cell(case, "flash_mla", COPIES)] for label, case in others.items()],
    )
    errors, where = results.errors(cases.values()), commits(cases.values())
    builds = flash_mla_builds(cases.values())
    yield f"Errors relative to float64: {errors}. Measured at {where}, FlashMLA of {builds}."


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


def prefill_tables(device: str = GPU) -> Iterator[str]:
    parsed = matched(device, "sparse_prefill", PREFILL)

    def grid(title: str, wanted: Callable[[re.Match[str]], bool], peers: tuple[str, ...]) -> str:
        lines: dict[str, dict[int, Case]] = {}
        for m, case in parsed:
            if wanted(m):
                window = f" + {m['window']}" if m["window"] else ""
                rows = f" of {m['rows']} K" if m["rows"] else ""
                name = f"`{m['layout']}`, {m['topk']}{window}{rows}, {m['tokens']} queries"
                lines.setdefault(name, {})[int(m["heads"])] = case
        heads = sorted({h for cases in lines.values() for h in cases})
        body = [[name, *(cell(cases.get(h), *peers) for h in heads)] for name, cases in lines.items()]
        return markdown([title, *(f"{h} heads" for h in heads)], body)

    def alone(m: re.Match[str]) -> bool:
        return not m["layer"]

    yield grid(
        "FP8 pages", lambda m: alone(m) and not m["bf16"] and m["layout"] != "bf16_512", ("flash_mla", COPIES)
    )
    yield grid(
        "bf16 pages, two caches", lambda m: alone(m) and m["layout"] == "bf16_512", ("flash_mla", COPIES)
    )
    yield grid("bf16 rows of a workspace", lambda m: alone(m) and bool(m["bf16"]), ("flash_mla", COPIES))
    yield f"Errors relative to float64: {results.errors(case for m, case in parsed if alone(m))}."
    triton = ("triton + flash_mla",)
    yield grid("whole layers, straight from FP8 pages", lambda m: not alone(m) and not m["bf16"], triton)
    yield grid("whole layers, through the workspace", lambda m: not alone(m) and bool(m["bf16"]), triton)
    measured = [case for _, case in parsed]
    yield f"Measured at {commits(measured)}, FlashMLA of {flash_mla_builds(measured)}."


def ways() -> str:
    names = {"selected": "selected", "direct": "direct", "whole, flash_mla": "whole on FlashMLA"}
    lines = []
    for m, case in matched(GPU, "prefill_strategies", STRATEGY):
        shape = f"{m['tokens']} tokens, {int(m['context']) >> 10} K"
        ratios = [f"{case.ratios[n]:.2f}x" if n in case.ratios else "" for n in names]
        lines.append([shape, f"{case.ours.us:.0f}", *ratios])
    return markdown(["tokens, context", "`whole`, us", *names.values()], lines)


def percent_of_copy(case: Case) -> float:
    return 100 * case.ratios["copy"]


def cache_table() -> str:
    lines = []
    for op in CACHE_OPS:
        for label, case in of(GPU, op).items():
            if "copy" in case.peers and not re.search(r"(slots|tokens)=1\b", label):
                triton = f"{case.ratios['triton']:.2f}x" if "triton" in case.peers else ""
                gbps = f"{case.gbps:.0f}" if case.gbps else ""
                numbers = [f"{case.ours.us:.1f}", gbps, f"{percent_of_copy(case):.0f} %", triton]
                lines.append([f"`{op}`", label, *numbers, f"`{case.ours.commit}`"])
    table = markdown(["op", "case", "us", "GB/s", "of a copy", "Triton", "measured at"], lines)
    return folded(f"all {len(lines)} cases", table)


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


def cpu_tables() -> Iterator[str]:
    for op in (
        "sparse_attention",
        "dequantize_kv",
        "quantize_kv",
        "combine_topk_swa_indices",
        "norm_rope_insert",
        "inverse_rope",
        "compress_kv",
        "quantize_index_k",
        "index_topk",
        "call_overhead",
    ):
        cases = of(CPU, op)
        peers = list(dict.fromkeys(name for case in cases.values() for name in case.peers))
        lines = []
        for label, case in cases.items():
            share = f"{case.percent_of_ceiling:.0f} %" if case.percent_of_ceiling else ""
            ratios = (f"{case.ratios[p]:.2f}x" if p in case.ratios else "" for p in peers)
            us = f"{case.ours.us:,.0f}" if case.ours.us >= 100 else f"{case.ours.us:.1f}"
            lines.append([label, us, share, *ratios])
        table = markdown([f"`{op}`", "us", "of the ceiling", *peers], lines)
        yield folded(op, f"{table}\n\nMeasured at {commits(cases.values())}.")


def real_tables(device: str = GPU, ops: Iterable[str] = REAL) -> Iterator[str]:
    for op in ops:
        for (form, peer), kinds in summary.ratios(of(device, op).values()).items():
            yield folded(
                f"{form} against {peer}", summary.table(f"`{form}` against `{peer}`", kinds).rstrip()
            )
    every = [case for op in ops for case in of(device, op).values()]
    found = [c.ours.difference for c in every if c.ours.difference is not None]
    worst = f" Results differ from FlashMLA's by at most {max(found):.1%}." if found else ""
    yield f"{len(every)} cases, measured at {commits(every)}, FlashMLA of {flash_mla_builds(every)}.{worst}"


def batch_invariant() -> str:
    """What it costs, by heads, width and batch; of full rows, and of others."""
    peer, columns = "batch_invariant", ("batch 1 to 8", "batch 16 to 32", "batch 48 to 256", "other rows")
    found = matched(H100, "sparse_decode_batch_invariant", DECODE)
    lines: dict[str, dict[str, list[float]]] = {}
    for m, case in sorted(found, key=lambda x: int(x[0]["heads"])):
        batch, keys = int(m["batch"]), sum(map(int, m["keys"].split("+")))
        column = columns[3 if m["kind"] else 0 if batch <= 8 else 1 if batch <= 32 else 2]
        line = lines.setdefault(f"{m['heads']} heads, top-k {keys}", {})
        line.setdefault(column, []).append(case.ratios[peer])
    body = [[name, *(span(line.get(column, [])) for column in columns)] for name, line in lines.items()]
    most = sorted((case for _, case in found), key=lambda case: -case.ratios[peer])[:3]
    worst = "; ".join(f"`{case.label}` {case.ratios[peer]:.2f}x" for case in most)
    head = markdown(["time with `batch_invariant=True`", *columns], body)
    return f"{head}\n\n{len(found)} cells, measured at {commits(c for _, c in found)}. Most: {worst}."


def query_groups() -> str:
    """Times of queries alone, of queries in groups: made in the call, made before; by overlap."""
    lines: dict[str, dict[str, str]] = {}
    cases = of(GPU, "query_groups")
    for label, case in cases.items():
        shape, overlap = label.split(": overlap ")
        alone, before = case.ratios["alone"], case.ratios["lists made before"]
        us = f"{case.peers['alone'].us:.0f} us"
        lines.setdefault(shape, {})[overlap] = f"{us}: {fixed(alone)}x, {fixed(alone / before)}x"
    overlaps = sorted({label.split(": overlap ")[1] for label in cases}, reverse=True)
    body = [[shape, *(line.get(x, "") for x in overlaps)] for shape, line in lines.items()]
    head = ["alone: in groups, with lists made before", *(f"overlap {x}" for x in overlaps)]
    return f"{markdown(head, body)}\n\nMeasured at {commits(cases.values())}."


def flashinfer() -> str:
    """Its planned kernel for SM90, beside ours: us, and how many times as long it takes."""
    peer, lines = "flashinfer_sm90, kernel", dict[str, dict[str, str]]()
    for m, case in matched(GPU, "sparse_decode_flashinfer", DECODE):
        place = lines.setdefault(f"`{m['layout']}`, {m['heads']} heads", {})
        us = f"{case.ours.us:.0f} and {case.peers[peer].us:.0f}"
        place[m["batch"]] = f"{us}: {fixed(case.ratios[peer])}x"
    batches = list(dict.fromkeys(batch for line in lines.values() for batch in line))
    body = [[name, *(line.get(batch, "") for batch in batches)] for name, line in lines.items()]
    return markdown(["us, ours and its kernel", *(f"batch {batch}" for batch in batches)], body)


def slower() -> str:
    """Every cell in which FlashMLA is faster."""
    lines = [
        [name, describe(case), f"{case.ratios[peer]:.2f}x"]
        for name, (peer, cases) in all_real_rows().items()
        for case in sorted(cases, key=lambda c: c.ratios.get(peer, 1.0))
        if case.ratios.get(peer, 1.0) < 1
    ]
    return markdown(["slower than FlashMLA", "cell", "as fast"], lines)


def parts() -> dict[str, str]:
    """The generated parts of documents, by name."""
    return {
        "overview": overview(),
        "peers": peers_table(),
        "decode": "\n\n".join(decode_tables()),
        "decode on an H100": "\n\n".join([*decode_tables(H100), *real_tables(H100, REAL[:1])]),
        "real rows": "\n\n".join(real_tables()),
        "prefill": "\n\n".join(prefill_tables()),
        "prefill on an H100": "\n\n".join([*prefill_tables(H100), *real_tables(H100, REAL[1:])]),
        "ways": ways(),
        "batch invariant": batch_invariant(),
        "query groups": query_groups(),
        "flashinfer": flashinfer(),
        "slower": slower(),
        "cache ops": cache_table(),
        "cpu": "\n\n".join(cpu_tables()),
    }


def images() -> dict[str, str]:
    return {"speed.svg": speed_chart(), "decode.svg": decode_chart(), "cache_ops.svg": cache_chart()}
