"""Modules with the names, argument order and conventions of other packages, over the ops of this one.

Code written for such a package runs on these kernels after one changed import, e.g. ``from
mla_fp8.compat.flash_mla import flash_mla_with_kvcache``. None of those packages is imported or needed.
"""
