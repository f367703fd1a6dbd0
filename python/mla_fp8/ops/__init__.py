"""The public functions, one module per op: typed wrapper, then the fake implementation of its ops."""
