"""Training: from a feature store to run checkpoints."""
