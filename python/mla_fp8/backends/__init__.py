"""Adapters from each backend's own signature and conventions to ours; a package is imported when called."""

from . import aiter, flash_mla, flashinfer, flashinfer_sm90, flashinfer_sm120, native, reference

ADAPTERS = {
    "native": native,
    "flash_mla": flash_mla,
    "flashinfer": flashinfer,
    "flashinfer_sm90": flashinfer_sm90,
    "flashinfer_sm120": flashinfer_sm120,
    "aiter": aiter,
    "reference": reference,
}
