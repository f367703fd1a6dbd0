"""What ``python -m mla_fp8`` runs, and what it is made of. No op imports it."""
