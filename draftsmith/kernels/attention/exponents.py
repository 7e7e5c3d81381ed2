"""Powers of e by powers of two, which is what the hardware computes: exp(x) = exp2(x log2(e))."""

from draftsmith.kernels.triton import tl

LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNEL = tl.constexpr(LOG2_E)
