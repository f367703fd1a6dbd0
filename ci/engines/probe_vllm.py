#!/usr/bin/env python3
"""The plug-ins against a vLLM's real Python modules, without a GPU. PYTHONPATH holds the vLLM and mla_fp8."""

import without_gpu

without_gpu.pretend_vllm()
import os

os.environ["VLLM_PLUGINS"] = "mla_fp8,mla_fp8_flash_mla"
import torch
import vllm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from mla_fp8.integrations import vllm as plugin
from mla_fp8.integrations import vllm_v4

print(vllm.__version__)
print(plugin.why_not(), plugin.why_not_calls(), vllm_v4.why_not())
plugin.register()
plugin.register_flash_mla_calls()
config = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=64, use_mla=True, use_sparse=True
)
path = current_platform.get_attn_backend_cls(
    AttentionBackendEnum.CUSTOM, attn_selector_config=config, num_heads=16
)
print(path, resolve_obj_by_qualname(path).get_impl_cls().__mro__)
