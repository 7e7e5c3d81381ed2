"""Conversations and prompts, and how they become token ids with a loss mask."""
