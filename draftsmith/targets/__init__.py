"""The frozen language model that a draft speaks for."""
