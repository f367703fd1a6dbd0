"""Adapters from each backend's own signature and conventions to ours; a package is imported when called."""

from . import native, reference

ADAPTERS = {"native": native, "reference": reference}
