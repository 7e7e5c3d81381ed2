"""Fused operations, each with the plain PyTorch reference that it equals: in its own file, or where it is used."""
