"""What a chunk cache, its workspace and its layers refuse, by the names that the caller gave."""

import re

import pytest
import torch
from prefill_cases import make_chunk

import mla_fp8
from mla_fp8 import LayerCaches, PagedCache, PrefillWorkspace, workspace_rows


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda c: c.build(seq_lens_host=[1]), r"seq_lens_host must be 6 lengths in \[0, 2\^31\), got \[1\]"),
        (lambda c: c.build(query_lens_host=[-1] * 6), r"query_lens_host must be 6 lengths in .*, got \[-1"),
        (lambda c: c.build(query_lens_host=[2**31] * 6), r"query_lens_host must be 6 lengths in .* \[21"),
        (lambda c: c.build(seq_lens_host=[9.5] * 6), r"seq_lens_host must be a list of lengths, got \[9.5"),
        (lambda c: c.build(num_tokens=-1), "num_tokens must be a whole number of at least 0, got -1"),
        (lambda c: c.attend(c.build(), c.layer(), None, "fast"), "must be one of auto, whole, selected, dir"),
        (lambda c: c.attend(c.build(num_tokens=36), c.layer(), None), r"q must have shape \[36, \*"),
        (lambda c: LayerCaches("dsv4"), "expected entries, window or both, got neither"),
        (lambda c: LayerCaches("dsv4", 4, window=c.layer().window), "and 0 without, got 4 without entries"),
        (lambda c: LayerCaches("dsv4", 4, (c.layer().entries.data, 4)), "entries must be a PagedCache"),
        (lambda c: LayerCaches("dsv4", window=c.layer().window.data), "window must be a PagedCache"),
        (lambda c: LayerCaches("dsv5", window=c.layer().window), "layout must be one of .* got 'dsv5'"),
        (lambda c: c.attend(c.build(), c.layer(), c.topk_indices[0]), r"topk_indices .* \[37, \*"),
        (lambda c: LayerCaches("dsv4", 0, entries=c.layer().entries), "got 0 with entries"),
        (lambda c: workspace_rows([1], [1], window_size=1, compress_ratio=1, strategy="x"), "got 'x'"),
        (lambda c: workspace_rows([9, 9], [1], window_size=1, compress_ratio=1), "query_lens_host must be 2"),
        (lambda c: workspace_rows([-9], [1], window_size=1, compress_ratio=1), "seq_lens_host must be 1 "),
        (lambda c: workspace_rows([9], [1], window_size=-1, compress_ratio=1), "window_size .* got -1"),
        (lambda c: workspace_rows([9], [1], window_size=1, compress_ratio=-1), "compress_ratio .* got -1"),
        (lambda c: workspace_rows(9, [1], window_size=1, compress_ratio=1), "a list of lengths, got 9"),
        (lambda c: PrefillWorkspace(100, "cpu"), "head_dim_qk must be 512 or 576, got 100"),
        (lambda c: c.build(workspace="none"), "workspace must be a PrefillWorkspace, got 'none'"),
        (lambda c: c.build(seq_lens_host=None), "seq_lens_host must be a list of lengths, got None"),
        (lambda c: c.build(query_start_loc=c.seq_lens_device), r"query_start_loc .* \[7\] on cpu, got"),
        (lambda c: c.build(query_pos=c.q[:, 0, 0]), r"query_pos .* \[\*\] on cpu, got torch.bf"),
        (lambda c: c.attend(c.build(), None, None), "layer must be a LayerCaches, got None"),
        (lambda c: c.attend(c.build(), c.layer(), [1, 2]), r"topk_indices must be a tensor, got \[1, 2\]"),
        (lambda c: LayerCaches("dsv4", 4, PagedCache(c.layer().entries.data, 0)), "entries.page_size .* 0"),
        (lambda c: LayerCaches("dsv41", window=c.layer().window), "window.data .* pages of 4608 bytes"),
        (lambda c: LayerCaches("dsv4", 4, PagedCache(c.layer().entries.data, 8)), "entries.data must have"),
        (lambda c: LayerCaches("dsv4", 4, PagedCache([0], 64)), r"entries.data must be a tensor, got \[0\]"),
        (
            lambda c: mla_fp8.SparsePrefillChunkCache(
                PrefillWorkspace(512, "cpu"), c.seq_lens_device, c.query_lens_device, c.page_table,
                window_size=12, seq_lens_host=c.seq_lens, query_lens_host=c.query_lens,
            ),
            "expected req_pool_indices, req_to_token and full_to_swa with a window",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(make, message):
    chunk = make_chunk("dsv4", "cpu")
    of_another_type = re.search(r"must be a (\w+Cache|tensor|\w+Caches|\w+Workspace)\b", message)
    with pytest.raises(TypeError if of_another_type else ValueError, match=message):
        make(chunk)


@pytest.mark.parametrize(
    "name, change",
    [
        ("seq_lens", lambda x: x.long()),
        ("query_lens", lambda x: x[1:]),
        ("query_lens", lambda x: x.tolist()),
        ("page_table", lambda x: x[0]),
        ("page_table", lambda x: None),
        ("req_pool_indices", lambda x: x[1:]),
        ("req_to_token", lambda x: x.long()),
        ("full_to_swa", lambda x: x.int()),
        ("full_to_swa", lambda x: x.to("meta")),
    ],
)
def test_a_wrong_table_has_the_name_that_the_caller_gave_it(name, change):
    """Not that of an argument of the op which reads it."""
    chunk = make_chunk("dsv4", "cpu")
    attribute = {"seq_lens": "seq_lens_device", "query_lens": "query_lens_device"}.get(name, name)
    setattr(chunk, attribute, change(getattr(chunk, attribute)))
    kind = ValueError if isinstance(getattr(chunk, attribute), torch.Tensor) else TypeError
    with pytest.raises(kind, match=rf"^mla_fp8\.SparsePrefillChunkCache: {name} must be "):
        chunk.build()
