"""The demonstration behind ``python -m mla_fp8 demo``. Nothing else imports it."""
