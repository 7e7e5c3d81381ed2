"""The geometry of a block: anchors, labels, masks, position weights, accept lengths."""
