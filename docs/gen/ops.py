"""docs/reference/ops.md: the public functions and classes, from their signatures and docstrings."""

import inspect
import re
import textwrap
from collections.abc import Iterator

import mla_fp8

OPS_MODULES = "mla_fp8.ops."
INTRODUCTION = """\
<!-- written by docs/gen/ops.py from the docstrings in python/mla_fp8 -->
# Ops

Every function below is `mla_fp8.<name>`. Tensors come first and by position, the rest by keyword. What is
marked experimental may change in a minor version; the rest is stable.

Wrong arguments raise before anything is written. `TypeError`, `ValueError` or `RuntimeError` names the
argument, what was expected and what came. ValueError is for an unknown layout, and for one of several
buffers without the others; RuntimeError for a GPU that is not there. An index is data: outside its range it
is masked, never followed.

An `out` or `out_*` is memory for a result, and the result itself. Each op is also `torch.ops.mla_fp8.<name>`,
for C++ and for exported programs, where `layout` is a number (`KVLayout.id`). Its `_out` form allocates
nothing.

## Arguments of many ops

An argument that an op takes but does not list is one of these:

"""
# Told once. The texts are those of docstrings, where each op has them again for help().
SHARED = {
    "kv_cache": "[num_pages, page_bytes] uint8, or an engine's view of it; see :class:`mla_fp8.KVLayout`.",
    "slot_mapping": "[n] int64 or int32, n <= num_tokens. Slots: page * page_size + row. A token whose slot "
    "is outside the cache is skipped, and so are those past n. No two tokens may share a slot.",
    "layout": "Of the cache: a name of [`KV_LAYOUTS`](layouts.md), of index keys one of `INDEX_LAYOUTS`.",
    "page_size": "Rows of a page.",
    "scale": "1 element, float32: the layer's scale, for ``fp8_e4m3*`` layouts alone.",
    "eps": "Of RMSNorm.",
    "cos": "[max_pos, half] float32, any strides. half is a multiple of 4, at most 128; with half 0 nothing "
    "is rotated, and ``positions`` are not looked at. Of one table t [max_pos, 64], cos and sin are "
    "``t[:, :32], t[:, 32:]``, or if they alternate ``t[:, 0::2], t[:, 1::2]``.",
    "sin": "As ``cos``.",
    "sm_scale": "A logit is sm_scale * (q . k).",
    "topk_length": "[num_tokens] int32. Only the first n indices of a token count.",
    "attn_sink": "[num_q_heads] float32, an extra logit without a value.",
    "window_size": "Tokens of a window, its query's among them.",
    "compress_ratio": "Tokens that an entry stands for.",
    "query_start_loc": "[num_requests + 1] int32: the first row of each request. Element 0 is subtracted.",
    "out": "[num_tokens, num_q_heads, 512] bfloat16, any strides of tokens and heads.",
    "lse": "[num_tokens, num_q_heads] float32, contiguous.",
    "backend": '``"auto"``, or a name that :func:`explain` lists. Others than ours allocate in any case.',
    "device": "Where the call runs.",
}
# In the order in which one reads them.
GROUPS = {
    "Caches": (
        "KVLayout", "quantize_kv", "dequantize_kv", "dequantize_kv_paged", "resolve_kv_cache_dtype",
        "hisparse_backend",
    ),
    "Attention": (
        "sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window",
        "sparse_attention_workspace", "explain", "merge_attention_states", "merge_partial_states",
        "plan_shared_keys", "pad_q_heads", "paged_attention_ragged", "paged_attention_ragged_latent",
    ),
    "Prefill of a chunk": (
        "SparsePrefillChunkCache", "LayerCaches", "PagedCache", "PrefillWorkspace", "workspace_rows",
        "build_swa_token_ids", "combine_topk_swa_indices", "combine_topk_swa_indices_ragged",
    ),
    "Indexer": (
        "IndexLayout", "quantize_index_k", "pool_index_k", "index_topk", "index_topk_workspace",
        "index_topk_counters", "index_topk_ragged", "index_topk_blocks", "index_topk_ragged_blocks",
        "topk_to_slots", "merge_topk", "index_logits", "index_logits_ragged",
    ),
    "Rows in host memory": (
        "resolve_hot_rows", "copy_host_rows", "store_host_rows", "forget_rows", "decode_hot_rows",
    ),
    "Around a layer": (
        "prepare_keys", "prepare_queries", "PreparedQueries", "k_norm_rope_insert", "qk_norm_rope_insert",
        "compress_kv", "inverse_rope", "inverse_rope_quantize",
    ),
    "Tools": ("doctor", "warmup"),
}  # fmt: skip
TABLES = {"KV_LAYOUTS", "INDEX_LAYOUTS"}  # of the page on layouts
ALL = "TypeError, ValueError, RuntimeError"
# What the introduction says of all.
AS_ELSEWHERE = re.compile(
    r"^(As :func:`\w+`|For what is no tensor[^.]*"
    r"|For any other argument: its name, what was expected, what came)\. ?(Nothing is written then\.)?"
)
RAISED_BY_ALL = (
    "For an unknown layout.",
    "ValueError for one buffer without the other.",
    "For an argument of another type.",
    "For a GPU that is not there.",
    "For numbers out of range, or a GPU that is not there.",
)
SAID_ONCE = {  # other texts of what SHARED has
    "Of the cache.", "Of the cache: a name of ``KV_LAYOUTS``.", "Of the cache: a name of ``INDEX_LAYOUTS``.",
    "Entries of a page.",
}  # fmt: skip
AS_IN = re.compile(r"As in :func:`\w+`\.")
SECTIONS = ("Args:", "Returns:", "Raises:")
OF_OURS = {"geometry", "layout_name"}  # members that only this package reads
WIDTH = 76  # of code, as the site shows it without a scroll bar


def inline(text: str) -> str:
    """Roles and double backquotes of reStructuredText as Markdown."""
    return re.sub(r":\w+:`~?(?:mla_fp8\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def items(lines: list[str]) -> list[str]:
    """Those of a section: a line that is indented more goes on with the one before."""
    found = list[str]()
    for line in lines:
        if line.startswith(" "):
            found[-1] += " " + line.strip()
        elif line:
            found.append(line)
    return found


def is_shared(name: str, text: str) -> bool:
    return name in SHARED and (text in (SHARED[name], *SAID_ONCE) or bool(AS_IN.fullmatch(text)))


def listed(names: list[str], text: str) -> str:
    return f"- {', '.join(f'`{x}`' for x in names)}: {inline(text)}"


def raised_here(text: str) -> str:
    text = AS_ELSEWHERE.sub("", text)
    for known in RAISED_BY_ALL:
        text = text.replace(known, "")
    return text.strip()


def section(title: str, lines: list[str]) -> str:
    if title == "Returns:":
        return f"**Returns:** {inline(' '.join(lines))}"
    named = dict[str, list[str]]()  # what is said once of several arguments
    for name, _, text in (item.partition(": ") for item in items(lines)):
        named.setdefault(text, []).append(name)
    if title == "Args:":
        left = {text: [x for x in names if not is_shared(x, text)] for text, names in named.items()}
        return "\n".join(listed(names, text) for text, names in left.items() if names)
    told = [(", ".join(names), raised_here(text)) for text, names in named.items()]
    raised = " ".join(
        f"{names}: {inline(text)}" if names != ALL else inline(text) for names, text in told if text
    )
    return f"**Raises:** {raised}" if raised else ""


def markdown(docstring: str) -> str:
    """A docstring in Google's style."""
    parts = list[str]()
    for block in inspect.cleandoc(docstring).split("\n\n"):
        title, _, rest = block.partition("\n")
        if title in SECTIONS:
            parts.append(section(title, textwrap.dedent(rest).splitlines()))
        else:
            parts.append(inline(block))
    return "\n\n".join(filter(None, parts))


def arguments(function: object) -> str:
    """``a, *, b=1``: without types, which the docstring has."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    bare = [x.replace(annotation=x.empty) for x in parameters if x.name != "self"]
    return str(inspect.Signature(bare)).removeprefix("(").removesuffix(")").replace("'", '"')


def call(name: str, function: object) -> str:
    """On one line, or in lines of WIDTH; one argument a line where ruff takes it for code and formats it."""
    text = arguments(function)
    if len(whole := f"{name}({text})") <= WIDTH:
        return whole
    inside = textwrap.fill(text, WIDTH - 4) if "*" in text else text.replace(", ", ",\n")
    return f"{name}(\n{textwrap.indent(inside, '    ')},\n)"


def entry(name: str, function: object) -> str:
    return f"### {name}\n\n```python\n{call(name, function)}\n```\n\n{markdown(function.__doc__ or '')}\n"


def class_entry(name: str, kind: type) -> str:
    """How it is made, unless a table has all there are; its docstring; a line per method and property."""
    parts = []
    if "id" not in kind.__annotations__:
        parts.append(f"```python\n{call(name, kind)}\n```")
    parts.append(markdown(kind.__doc__ or ""))
    members, long = [], []
    for member, value in vars(kind).items():
        of_instances = not isinstance(value, property)
        function = getattr(value, "__func__", value) if of_instances else value.fget
        if (
            not inspect.isfunction(function)
            or member.startswith("_")
            or member in OF_OURS
            or not function.__doc__
        ):
            continue
        title = f"{member}({arguments(function)})" if of_instances else member
        text = markdown(function.__doc__)
        if "\n\n" in text:
            long.append(f"#### `{title}`\n\n{text}")
        else:
            members.append(f"- `{title}`: {' '.join(text.split())}")
    parts += ["\n".join(members)] if members else []
    return f"### {name}\n\n" + "\n\n".join([*parts, *long]) + "\n"


def entries() -> Iterator[str]:
    listed = {name for names in GROUPS.values() for name in names}
    public = set(mla_fp8.__all__) - TABLES
    if listed != public:
        raise SystemExit(f"docs/gen/ops.py: names without a group, or gone: {sorted(listed ^ public)}")
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            found = getattr(mla_fp8, name)
            yield class_entry(name, found) if inspect.isclass(found) else entry(name, found)


def files() -> dict[str, str]:
    named = dict[str, list[str]]()
    for name, text in SHARED.items():
        named.setdefault(text, []).append(name)
    shared = "".join(f"{listed(names, text)}\n" for text, names in named.items())
    return {"docs/reference/ops.md": "\n".join([INTRODUCTION + shared, *entries()])}
