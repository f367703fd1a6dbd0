"""The steps of matrix.py: which engines run side by side."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    who: str  # of engine.py's VLLM_PLUGINS
    heads: int
    kv: str = "fp8_ds_mla"
    more: tuple[str, ...] = ()
    label: str = ""  # in place of ``more`` in the name
    script: str = "engine.py"

    @property
    def name(self) -> str:
        words = [self.label] if self.label else [word.lstrip("-") for word in self.more]
        return "-".join([self.who, str(self.heads), self.kv, *words])

    def arguments(self) -> list[str]:
        return ["--who", self.who, "--heads", str(self.heads), "--kv", self.kv, *self.more]

    def command(self, out: Path) -> list[str]:
        engine = ["--who", self.who] if self.script == "v4_layer.py" else self.arguments()
        return [sys.executable, str(ROOT / "ci/engines" / self.script), "--out", str(out), *engine]


@dataclass(frozen=True)
class Step:
    what: str
    cases: tuple[Case, ...]
    seconds: int = 175  # limit


def sides(
    *heads, kv="fp8_ds_mla", who=("stock", "ours"), more=(), label="", script="engine.py"
) -> tuple[Case, ...]:
    """The same engine with each of ``who``; exact attention is no kernel that a graph could hold."""
    return tuple(
        Case(w, h, kv, *((("--eager", *more), "eager") if w == "exact" else (tuple(more), label)), script)
        for h in heads
        for w in who
    )


ALL = ("stock", "ours", "exact")
SPEED = ("--layers", "6", "--seqs", "256", "--budget", "4096", "--batches", "8", "32", "128")
PARTS = (*SPEED[:-3], "8", "128")
V4, V4_ALL = {"kv": "dsv4", "who": ("stock", "calls")}, {"kv": "dsv4", "who": ("stock", "calls", "exact")}
SGLANG = {"kv": "sglang", "script": "sglang_engine.py"}
PAGES = SGLANG | {"kv": "sglang_pages"}
SGLANG_V4, SGLANG_V4_PAGES = SGLANG | {"kv": "sglang_v4"}, SGLANG | {"kv": "sglang_v4_pages"}
SGLANG_V41, SGLANG_V41_ROWS = SGLANG | {"kv": "sglang_v41"}, SGLANG | {"kv": "sglang_v41_rows"}
SGLANG_V41_LEVELS = SGLANG | {"kv": "sglang_v41_levels"}
SGLANG_V41_ROWS_PAGES = SGLANG | {"kv": "sglang_v41_rows_pages"}
TWO = ("--tensor-parallel", "2")
UNEVEN = ("--mtp", "3", "--seqs", "6", "--eager")  # a prompt waits until another has ended
# HiSparse: without the engines' switch for the same bits, logits and chosen rows change with the batch, and
# prompts in a hot buffer's engine take other kernels.
SAME_BITS = {"more": ("--same-bits",), "label": "same"}


def hot(rows: int) -> dict:
    return {"more": ("--same-bits", "--hot-rows", str(rows)), "label": "same-hot"}


ALL_OF_A_STEP = ("stock", "ours", "layer", "whole")
OF_SGLANG, SGLANG_SPEED = ("stock", "ours", "layer"), (*SPEED[:2], *SPEED[-4:])
SGLANG_PARTS = (*PARTS[:2], *PARTS[-3:])
LONG = (
    "--layers", "6", "--seqs", "32", "--budget", "4096", "--context", "65536", "--batches", "8",
)  # fmt: skip
# Two ranks have as many keys each of 512 K as four have of 1 M.
LOADED = ("--seqs", "8", "--loaded", "131072", "524288", "--batches", "1", "8")
STEPS = {
    "smoke": Step("two engines with 16 heads, eager", sides(16, more=("--eager", "--layers", "2"))),
    "accuracy": Step("graphs, FP8, 16 and 128 heads, and exact attention", sides(16, 128, who=ALL)),
    "speed16": Step("kernel times, 16 heads, batches to 128", sides(16, more=SPEED, label="speed")),
    "speed128": Step("kernel times, 128 heads, batches to 128", sides(128, more=SPEED, label="speed")),
    "same_bits_speed": Step(
        "kernel times without and with VLLM_BATCH_INVARIANT=1, 16 heads, batches to 128",
        sides(16, who=("ours", "same"), more=SPEED, label="speed"),
        280,
    ),
    "layer16": Step(
        "where a step's time goes, 16 heads: with our ops around attention, and our indexer besides",
        sides(16, who=ALL_OF_A_STEP, more=PARTS, label="speed"),
        280,
    ),
    "layer128": Step(
        "where a step's time goes, 128 heads", sides(128, who=ALL_OF_A_STEP, more=PARTS, label="speed"), 280
    ),
    "layer": Step(
        "our ops around attention: graphs, 16 and 128 heads, exact attention; eager; speculation",
        sides(16, 128, who=("stock", "layer", "whole"))
        + sides(16, 128, kv="bfloat16", who=("exact",))
        + sides(16, who=("layer",), more=("--eager",))
        + sides(16, who=("layer", "whole"), more=("--mtp", "3")),
        280,
    ),
    "glm": Step(
        "GLM-5.2: our attention, our ops around it, our indexer besides: graphs, 16 heads, exact attention",
        sides(16, kv="glm52", who=("stock", "ours", "layer", "whole", "exact"))
        + sides(16, kv="glm52_bf16", who=("exact",)),
        280,
    ),
    "glm_layer": Step(
        "GLM-5.2, 16 heads: where a step's time goes, and logprobs beside exact attention",
        sides(16, kv="glm52", who=("stock", "layer", "whole"), more=(*PARTS, "--logprobs"), label="speed")
        + sides(16, kv="glm52_bf16", who=("exact",), more=SPEED[:2]),
        280,
    ),
    "glm53": Step(
        "GLM-5.3-Flash's layers of MLA, pools of keys, 16 heads: logprobs beside exact attention, eager",
        sides(16, kv="glm53", who=("stock", "ours", "index", "exact"), more=("--eager",)),
        280,
    ),
    "glm53_speed": Step(
        "GLM-5.3-Flash's layers of MLA, 16 heads: where a step's time goes",
        sides(16, kv="glm53", who=("stock", "ours", "index"), more=PARTS, label="speed"),
        280,
    ),
    "first_token": Step(
        "milliseconds to the first token of 64, eager, 16 heads",
        sides(
            16, who=ALL_OF_A_STEP, more=("--eager", "--layers", "16", "--first-token"), label="first_token"
        ),
    ),
    "v4_layer": Step(
        "DeepSeek V4, 16 heads: where a step's time goes, and logprobs beside exact attention",
        sides(
            16, kv="dsv4", who=("stock", "calls", "layer"), more=(*PARTS, "--logprobs"), label="speed"
        )
        + sides(16, kv="dsv4", who=("exact",), more=SPEED[:2]),
        280,
    ),
    "heads": Step("graphs, FP8, 8 and 64 heads, and exact attention", sides(8, 64, who=ALL)),
    "speed8_64": Step("kernel times, 8 and 64 heads", sides(8, 64, more=SPEED, label="speed"), 280),
    "bf16": Step("graphs, bf16 cache, 16 and 128 heads, exact", sides(16, 128, kv="bfloat16", who=ALL)),
    "mtp": Step(
        "speculation of 1 and 3 tokens, 16 and 128 heads",
        sides(16, 128, more=("--mtp", "1")) + sides(16, 128, who=("ours",), more=("--mtp", "3")),
    ),
    "groups": Step(
        "drafts as query groups: speculation of 3 tokens, 16 heads, graphs; eager, beside short prompts, and "
        "exact attention",
        sides(16, who=("ours", "groups"), more=("--mtp", "3"))
        + tuple(Case(who, 16, more=UNEVEN, label="uneven") for who in ("ours", "groups", "exact")),
    ),
    "modes": Step(
        "eager, prefix caching, a process of its own, FlashMLA's calls alone",
        sides(16, 128, who=("ours",), more=("--eager",))
        + sides(16, 128, who=("ours",), more=("--repeat-prompts",))
        + sides(16, who=("ours",), more=("--multiprocessing",))
        + sides(16, 128, who=("calls",)),
    ),
    "hisparse": Step(
        "HiSparse by vLLM's kernels and ours, 128 heads, and all rows on the GPU: the same tokens",
        sides(128, who=("ours",), **SAME_BITS) + sides(128, who=("ours", "hisparse"), **hot(4096)),
    ),
    "batch256": Step(
        "kernel times at 256 requests, 16 and 128 heads",
        sides(16, 128, more=(*SPEED[:-3], "8", "256"), label="speed256"),
        280,
    ),
    "v4": Step(
        "DeepSeek V4's layer by itself, 16 and 128 heads",
        tuple(Case(who, 0, "dsv4", script="v4_layer.py") for who in ("stock", "calls")),
    ),
    "v4_smoke": Step(
        "DeepSeek V4 as an engine, 16 heads, eager", sides(16, **V4, more=("--eager", "--layers", "3"))
    ),
    "v4_engine": Step("DeepSeek V4, graphs, 16 and 128 heads, exact", sides(16, 128, **V4_ALL)),
    "v4_engine64": Step("DeepSeek V4, graphs, 64 heads, exact", sides(64, **V4_ALL)),
    "v4_speed": Step(
        "DeepSeek V4, kernel times, 16 and 128 heads", sides(16, 128, **V4, more=SPEED, label="speed"), 280
    ),
    "v4_speed64": Step("DeepSeek V4, kernel times, 64 heads", sides(64, **V4, more=SPEED, label="speed")),
    "index": Step(
        "the indexer by index_topk: graphs, 16 heads, and exact attention; eager; speculation",
        sides(16, who=("stock", "ours", "index", "exact"))
        + sides(16, who=("index",), more=("--eager",))
        + sides(16, who=("index",), more=("--mtp", "1"))
        + sides(16, who=("index",), more=("--mtp", "3")),
    ),
    "index_speed": Step(
        "kernel times with our attention, without and with our indexer, 16 heads",
        sides(16, who=("ours", "index"), more=SPEED, label="speed"),
    ),
    "index_speed64k": Step(
        "the same with prompts of 64 K, 8 requests",
        sides(16, who=("ours", "index"), more=LONG, label="speed64k"),
        280,
    ),
    "v4_index": Step(
        "DeepSeek V4, the indexer by index_topk: graphs, 16 heads, and exact attention",
        sides(16, kv="dsv4", who=("stock", "index", "exact")),
    ),
    "v4_index_speed": Step(
        "DeepSeek V4, kernel times without and with our indexer, 16 heads",
        sides(16, kv="dsv4", who=("calls", "index"), more=SPEED, label="speed"),
    ),
    "sglang": Step(
        "SGLang: graphs, 16 and 128 heads, and exact attention", sides(16, 128, **SGLANG, who=ALL), 320
    ),
    "sglang_heads": Step("SGLang: 8 and 64 heads", sides(8, 64, **SGLANG, who=ALL)),
    "sglang_pages": Step(
        "SGLang: prompts over FP8 pages, 16 and 128 heads",
        sides(16, 128, **PAGES, who=ALL),
    ),
    "sglang_hisparse": Step(
        "HiSparse by SGLang's kernels and ours, V3.2 and V4, and all rows on the GPU: the same tokens",
        sides(128, **PAGES, who=("ours",), **SAME_BITS)
        + sides(128, **PAGES, who=("ours", "hisparse"), **hot(4096))
        + sides(128, **SGLANG_V4_PAGES, who=("ours",), **SAME_BITS)
        + sides(128, **SGLANG_V4_PAGES, who=("ours", "hisparse"), **hot(1024)),
        300,
    ),
    "sglang_mtp": Step(
        "SGLang: speculation of 1 and 3 tokens, 16 heads; drafts as query groups",
        sides(16, **SGLANG, more=("--mtp", "1"))
        + sides(16, **SGLANG, who=("stock", "ours", "groups"), more=("--mtp", "3")),
    ),
    "sglang_speed": Step(
        "SGLang: kernel times, 16 and 128 heads, over FP8 pages, too",
        sides(16, 128, **SGLANG, more=SGLANG_SPEED, label="speed")
        + sides(16, **PAGES, more=SGLANG_SPEED, label="speed"),
        280,
    ),
    "sglang_layer": Step(
        "SGLang: where a step's time goes, 16 and 128 heads",
        sides(16, 128, **SGLANG, who=OF_SGLANG, more=SGLANG_SPEED, label="speed"),
        320,
    ),
    "sglang_layer16": Step(
        "SGLang as it is by default, 16 heads over FP8 pages: where a step's time goes",
        sides(16, **PAGES, who=("stock", "layer"), more=SGLANG_PARTS, label="speed"),
        290,
    ),
    "sglang_layer128": Step(
        "SGLang, 128 heads over rows: where a step's time goes",
        sides(128, **SGLANG, who=("stock", "layer"), more=SGLANG_PARTS, label="speed"),
        290,
    ),
    "sglang_v4_layer": Step(
        "SGLang, DeepSeek V4, 16 heads: where a step's time goes",
        sides(16, **SGLANG_V4, who=OF_SGLANG, more=SGLANG_PARTS, label="speed"),
        290,
    ),
    "sglang_v41_layer": Step(
        "SGLang, DeepSeek V4.1 over V4's rows, 16 heads: where a step's time goes",
        sides(16, **SGLANG_V41, who=OF_SGLANG, more=SGLANG_PARTS, label="speed"),
        290,
    ),
    "sglang_layer_right": Step(
        "SGLang, our ops around attention, 16 heads: graphs, eager (graphs of prompts stay SGLang's), and "
        "exact attention",
        sides(16, **SGLANG, who=("stock", "layer"))
        + sides(16, **SGLANG, who=("layer",), more=("--eager",))
        + sides(16, **(SGLANG | {"kv": "sglang_bf16"}), who=("exact",)),
        320,
    ),
    "sglang_v4": Step(
        "SGLang, DeepSeek V4: graphs, 16 and 128 heads, and exact attention; eager",
        sides(16, 128, **SGLANG_V4, who=ALL) + sides(16, **SGLANG_V4, who=("ours",), more=("--eager",)),
    ),
    "sglang_v4_pages": Step(
        "SGLang, DeepSeek V4: prompts over FP8 pages, 16 and 128 heads, and exact attention",
        sides(16, 128, **SGLANG_V4_PAGES, who=ALL),
    ),
    "sglang_v4_mtp": Step(
        "SGLang, DeepSeek V4: speculation of 1 and 3 tokens, 16 heads; drafts as query groups",
        sides(16, **SGLANG_V4, more=("--mtp", "1"))
        + sides(16, **SGLANG_V4, who=("stock", "ours", "groups"), more=("--mtp", "3")),
    ),
    "sglang_v4_speed": Step(
        "SGLang, DeepSeek V4: kernel times, 16 and 128 heads",
        sides(16, 128, **SGLANG_V4, more=SGLANG_SPEED, label="speed"),
        280,
    ),
    "sglang_v41": Step(
        "SGLang, DeepSeek V4.1, 16 heads: V4's rows; its own, over rows and pages; and exact attention",
        sides(16, **SGLANG_V41, who=ALL)
        + sides(16, **SGLANG_V41_ROWS, who=("ours", "exact"))
        + sides(16, **SGLANG_V41_ROWS_PAGES, who=("ours", "exact")),
    ),
    "sglang_v41_speed": Step(
        "SGLang, DeepSeek V4.1, 16 heads: kernel times with V4's rows and with its own",
        sides(16, **SGLANG_V41, more=(*SPEED[:2], *SPEED[-4:-1]), label="speed")
        + sides(16, **SGLANG_V41_ROWS, who=("ours",), more=(*SPEED[:2], *SPEED[-4:-1]), label="speed"),
        280,
    ),
    "sglang_index": Step(
        "SGLang, the indexer by index_topk: V3.2 and V4, graphs, 16 heads, and exact attention",
        sides(16, **SGLANG, who=("stock", "index", "exact"))
        + sides(16, **SGLANG_V4, who=("stock", "index", "exact")),
        280,
    ),
    "sglang_v41_index": Step(
        "SGLang, DeepSeek V4.1 with a publisher and consumers of blocks: its indexer and index_topk, graphs",
        sides(16, **SGLANG_V41_LEVELS, who=("stock", "ours", "index", "exact"))
        + sides(16, **SGLANG_V41_LEVELS, who=("index",), more=("--eager",)),
        280,
    ),
    "sglang_v41_index_speed": Step(
        "SGLang, DeepSeek V4.1 with blocks: kernel times without and with index_topk",
        sides(
            16, **SGLANG_V41_LEVELS, who=("ours", "index"), more=(*SPEED[:2], *SPEED[-4:-1]), label="speed"
        ),
        280,
    ),
    "sglang_parallel": Step(
        "SGLang, tensor parallel on two GPUs: V3.2 with 16 heads; DeepSeek V4 with 32, and exact attention",
        sides(16, **SGLANG, more=TWO)
        + sides(32, **SGLANG_V4, more=TWO)
        + (Case("exact", 32, "sglang_v4", ("--eager", *TWO), "eager", SGLANG["script"]),),
    ),
    "ranks": Step(
        "context parallel on two GPUs, 128 heads: decode of long contexts with our exchange, with both of "
        "vLLM's, and without; logprobs beside exact attention",
        sides(128, kv="two", who=("whole", "ranks", "theirs", "direct"), more=LOADED, label="speed")
        + sides(128, kv="two", who=("whole", "ranks"))
        + sides(128, kv="two_bf16", who=("ranks", "exact")),
        270,
    ),
    "parallel": Step(
        "tensor parallel on two GPUs, 32 heads",
        sides(32, more=(*TWO, "--multiprocessing")),
    ),
}  # fmt: skip
