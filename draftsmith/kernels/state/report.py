"""The report of a commit: what the host reads of each row, numbers in a line [REPORT_HEADER + width] int64.

A line holds the row's length, how many tokens were committed, and flags; then the tokens.
"""

from draftsmith.kernels.triton import tl

REPORT_HEADER = 3
"""Numbers of a line before its tokens."""

COMMITTED = 1
"""Which of them is the number of tokens committed."""

FINISHED, STOPPED, INVALID_TARGET, INVALID_DRAFT = 1, 2, 4, 8
"""Flags of a line, added up."""

HEADER_IN_KERNEL = tl.constexpr(REPORT_HEADER)
FINISHED_IN_KERNEL, STOPPED_IN_KERNEL = tl.constexpr(FINISHED), tl.constexpr(STOPPED)
INVALID_TARGET_IN_KERNEL, INVALID_DRAFT_IN_KERNEL = tl.constexpr(INVALID_TARGET), tl.constexpr(INVALID_DRAFT)
