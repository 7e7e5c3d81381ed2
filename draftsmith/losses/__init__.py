"""Losses over the vocabulary that never hold the logits of all rows."""
