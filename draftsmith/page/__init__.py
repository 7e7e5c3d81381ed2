"""Pages that need nothing else: inline style and SVG, no scripts, no network."""
