"""The two forms of a training document before features: a conversation, and its tokens with a loss mask."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Conversation:
    """One conversation: `id` (unique in its file) and chat `messages` ({"role": ..., "content": ...}, in order).

    `finished` False says that the last answer was cut off by a length limit, so that the assistant did not end its turn
    there and the end-of-turn token after it is not the assistant's. `answer_ids`: the tokens of each answer as they
    were generated, its stop token included; empty where they are not known.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    finished: bool = True
    answer_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Sample:
    """A tokenised conversation.

    `input_ids` [S] int64; `loss_mask` [S] bool, True on the tokens that the assistant wrote (end-of-turn token
    included).
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
