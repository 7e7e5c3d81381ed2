"""Memory that the next kernels will read, fetched into the L2 cache while this one leaves the memory idle.

Between the large products of a decode step run small kernels that move next to nothing. A few instructions in them
start the transfer of the weights that the next product reads; nobody waits for it, and no result depends on it.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def prefetch_to_l2(ptr, worker, num_bytes_each, total_bytes, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every thread of program `worker` asks for its own `num_bytes_each` (a multiple of 16) bytes from `ptr` on, up to
    `total_bytes`. THREADS: of the program, 32 a warp."""
    first = (worker * THREADS + tl.arange(0, THREADS)).to(tl.int64) * num_bytes_each
    # Requests past the end are moved into it: repeated, which costs nothing, and never outside.
    first = tl.minimum(first, total_bytes - num_bytes_each)
    address = ptr.to(tl.int64) + first
    size = tl.zeros([THREADS], tl.int32) + num_bytes_each
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def share(weight: Tensor, limit: int, threads: int) -> tuple[int, int]:
    """(bytes for each of `threads`, bytes in all) so that they ask for the weight's first `limit` bytes between them."""
    total = min(weight.nbytes, limit) // 16 * 16
    each = triton.cdiv(total, threads * 16) * 16
    return min(each, total), total
