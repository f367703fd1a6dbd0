"""Adapters from each backend's own signature and conventions to ours; a package is imported when called."""

from . import aiter, flash_mla, flashinfer, native, reference

ADAPTERS = {
    "native": native,
    "flash_mla": flash_mla,
    "flashinfer": flashinfer,
    "aiter": aiter,
    "reference": reference,
}
