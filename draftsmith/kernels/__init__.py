"""Fused operations, each beside the plain PyTorch reference that it equals."""
