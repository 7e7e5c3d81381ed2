"""Fused operations. A file holds an operation's plain PyTorch reference, its Triton kernel, and one public function,
which picks between them by device (`device.uses_kernels`)."""
