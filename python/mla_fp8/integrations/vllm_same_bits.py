"""vLLM with VLLM_BATCH_INVARIANT=1 (same_bits.py): its refusals of sparse MLA, the indexer, short prompts,
rows of HiSparse."""

from importlib import import_module

from .. import probes
from . import log, same_bits, vllm_host_rows, vllm_indexer

_INDEXER = "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend"
# By model, the classes of its caches that vLLM refuses in this mode. What belongs to them, if anything, is
# done for each token alone; attention of V4 is by FlashMLA's calls, and so ours. V4.1 stays refused: vLLM's
# own top-k chooses its candidate blocks.
BACKENDS = {
    "DeepSeek V3.2": (_INDEXER,),
    "DeepSeek V4": (
        _INDEXER,
        "vllm.v1.attention.backends.mla.sparse_swa.DeepseekSparseSWABackend",
        "vllm.models.deepseek_v4.compressor.CompressorBackend",
        "vllm.models.deepseek_v4.sparse_mla.DeepseekV4SparseMLABackend",
    ),
}


def prepare(model: str) -> None:
    """What vLLM refuses of a model whose attention is ours is lifted; its indexer is taken over. Re-entrant.

    Nothing without the switch, and of other models. A vLLM that lacks what this builds on keeps its refusal,
    and says so.
    """
    if model not in BACKENDS or not same_bits.asked():
        return
    reason = probes.why_not_call(_needs(model)) or vllm_indexer.why_not()
    if reason:
        log.say_once(f"mla_fp8: {model} stays refused with VLLM_BATCH_INVARIANT: {reason}")
        return
    vllm_indexer.take_over_indexer()
    for path in BACKENDS[model]:
        module, _, name = path.rpartition(".")
        getattr(import_module(module), name).supports_batch_invariance = classmethod(lambda cls: True)


def _needs(model: str) -> probes.Needs:
    paths = [path.rpartition(".") for path in BACKENDS[model]]
    return {module: {f"{name}.supports_batch_invariance": ()} for module, _, name in paths}


def prepare_layer() -> None:
    """What depends on the engine's arguments: vLLM takes dense attention where no prompt of a batch has more
    keys than are chosen, and stores other rows with HiSparse."""
    config = import_module("vllm.config").get_current_vllm_config().attention_config
    config.sparse_mla_force_mqa = True
    if getattr(config, "hisparse_config", None) is not None:
        vllm_host_rows.take_over_stores()
