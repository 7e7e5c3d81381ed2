"""Lossless speculative decoding: prefill, propose, verify, commit."""
