"""How a sequential head fills a block: the decoding options that such heads share, and what they check.

Three rollouts give the same tokens up to rounding: `plain` hands every step's logits to the request's sampler; `dense`
keeps one key a row and step (`kernels.vocabulary.keys`) and never writes a vocabulary of logits when decoding greedily;
`pruned` does the same and reads only rows of the correction's output matrix that may win
(`kernels.rollout.low_rank_pruning`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from pydantic import StrictBool
from torch import Tensor

from draftsmith.algorithms.options import DecodingOptions
from draftsmith.base.dtypes import DTYPES
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import need_triton
from draftsmith.kernels.rollout.low_rank_pruning import pays
from draftsmith.targets.ends import TargetEnds


class RolloutOptions(DecodingOptions):
    """Decoding options of a sequential head.

    `rollout`: `auto` is `plain` off CUDA devices; on one it is `pruned` for heads where that pays and `dense` for
    others (`low_rank_pruning.pays`). `dense` and `pruned` run kernels on a CUDA device and their PyTorch references
    elsewhere, and need the package triton. `tensor_parallel`: every process of the default group works on its own part
    of the vocabulary, and all of them propose the same tokens; for `dense` and `pruned`.
    """

    rollout: Literal["auto", "plain", "dense", "pruned"] = "auto"
    tensor_parallel: StrictBool = False

    def resolve(self, method: str, weight: Tensor) -> str:
        """`plain`, `dense` or `pruned`, for a head whose correction has the output matrix W2 `weight` [V, E]. Raises
        `DraftsmithError` where the wanted one cannot run."""
        chosen: str = self.rollout
        by_kernels = self.tensor_parallel or weight.device.type == "cuda"
        if chosen == "auto" and not by_kernels:
            chosen = "plain"
        if chosen == "plain" and self.tensor_parallel:
            raise DraftsmithError(
                f"{method}: rollout 'plain' works on the whole vocabulary in one process; with tensor_parallel use "
                "'dense' or 'pruned'"
            )
        if chosen != "plain":
            alone = " and tensor_parallel to false" if self.tensor_parallel else ""
            need_triton(f"{method}: rollout {chosen!r}", f", or set rollout to 'plain'{alone}")
        if chosen == "auto":
            chosen = _by_kernels(weight)
        return chosen


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens that this process scores: [first, last), one of `parts` equal parts of the vocabulary."""

    first: int
    last: int
    parts: int = 1

    def ends(self, ends: TargetEnds) -> TargetEnds:
        """The target's ends for these tokens; shares memory with the whole."""
        return ends if self.parts == 1 else ends.rows(slice(self.first, self.last))

    def exchange(self, keys: Tensor) -> None:
        """Each row's best key of all parts, in place: 8 bytes a row and process."""
        if self.parts > 1:
            torch.distributed.all_reduce(keys, op=torch.distributed.ReduceOp.MAX)

    def gather(self, scores: Tensor) -> Tensor:
        """Scores [..., n] of this part -> [..., V] of all parts."""
        if self.parts == 1:
            return scores
        whole = [torch.empty_like(scores) for _ in range(self.parts)]
        torch.distributed.all_gather(whole, scores)
        return torch.cat(whole, dim=-1)


def check_vocabulary(
    method: str, draft: Draft, ends: TargetEnds, weight: Tensor, options: RolloutOptions
) -> VocabularyPart:
    """The part of the vocabulary that this process works on; weight [V, E] is the correction's output matrix.

    Raises `DraftsmithError` when draft and target disagree on the vocabulary, stand on different devices or in a dtype
    that rollouts do not run in, when the processes cannot share the vocabulary evenly, or when there is no group of
    processes to share it with.
    """
    if options.tensor_parallel and not torch.distributed.is_initialized():
        raise DraftsmithError(
            f"tensor_parallel is True for {method}, and this process belongs to no group that could share the "
            "vocabulary; start the processes with torchrun and call torch.distributed.init_process_group, or leave the "
            "option out"
        )
    # Without it every process decodes by itself, as an evaluation in the midst of distributed training does.
    world_size = torch.distributed.get_world_size() if options.tensor_parallel else 1
    vocab_size = draft.config.vocab_size
    if ends.vocab_size != vocab_size:
        raise DraftsmithError(
            f"{method} corrects the logits of {vocab_size} tokens (vocab_size), and the target's output head has "
            f"{ends.vocab_size}; both must be the same"
        )
    if ends.head_weight.device != draft.device:
        raise DraftsmithError(
            f"{method}'s head is on {draft.device} and the target's output head on {ends.head_weight.device}; put both "
            "on one device"
        )
    for name, tensor in ((f"{method}'s head", weight), ("the target's output head", ends.head_weight)):
        if tensor.dtype not in DTYPES.values():
            raise DraftsmithError(f"{name} is in {tensor.dtype}; rollouts run in {', '.join(DTYPES)}")
    if not weight.isfinite().all():
        raise DraftsmithError(
            f"the output matrix of {method}'s correction holds numbers that are not finite; the draft was not trained "
            "or loaded properly"
        )
    if vocab_size % world_size:
        raise DraftsmithError(
            f"{method}: {world_size} processes cannot share a vocabulary of {vocab_size} tokens evenly; allowed: a "
            f"number of processes that divides {vocab_size}"
        )
    size = vocab_size // world_size
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    return VocabularyPart(rank * size, (rank + 1) * size, world_size)


def _by_kernels(weight: Tensor) -> str:
    """The rollout by kernels that is expected to be faster for W2 `weight`."""
    return "pruned" if weight.device.type == "cuda" and pays(weight) else "dense"


T = TypeVar("T")


class Derived(Generic[T]):
    """Something computed from weights, made once and again whenever a weight was replaced or changed in place.

    It holds the weights it was made from, so a new tensor at an old address is not taken for it. A change inside a
    running CUDA graph is not seen: the check is the host's.
    """

    def __init__(self, weights: Callable[[], tuple[Tensor, ...]], make: Callable[..., T]) -> None:
        self._weights, self._make = weights, make
        self._sources: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._value: T | None = None

    def __call__(self) -> T:
        weights = self._weights()
        versions = [weight._version for weight in weights]
        same = len(weights) == len(self._sources) and all(
            new is old for new, old in zip(weights, self._sources, strict=True)
        )
        if self._value is None or not same or versions != self._versions:
            self._sources, self._versions = weights, versions
            with torch.no_grad():
                self._value = self._make(*weights)
        return self._value
