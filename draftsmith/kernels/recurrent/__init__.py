"""Layers that keep a state instead of keys: linear recurrences and the short convolutions before them."""
