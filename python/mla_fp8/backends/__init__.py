"""Adapters: our call by another package's signature and conventions. A package is imported when called."""

from . import aiter, flash_mla, flashinfer, flashinfer_sm90, flashinfer_sm120, reference

ADAPTERS = {
    "flash_mla": flash_mla,
    "flashinfer": flashinfer,
    "flashinfer_sm90": flashinfer_sm90,
    "flashinfer_sm120": flashinfer_sm120,
    "aiter": aiter,
    "reference": reference,
}
