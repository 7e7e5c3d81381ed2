"""The layers of a decode step around attention: norms, gates, products of few rows, block convolutions."""
