"""Attention and what feeds it: training's anchored blocks, decoding's static caches, the way into a cache."""
