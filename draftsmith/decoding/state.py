"""What of answers goes into the state of the slots (`kernels.state.decoding_state`), and what comes out of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.sampling import RowSampling, SamplingBounds
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.state.place_rows import pack_rows, place_rows


def place(state: DecodingState, first: int, answers: Sequence[Answer]) -> None:
    """Puts rows into the slots from `first` on, as they are before their prompts are read."""
    packed = pack_rows(
        [
            (
                len(a.prompt),
                a.limit,
                a.seed,
                len(a.stop_token_ids),
                chosen.top_k,
                chosen.fp32_temperature,
                chosen.top_p,
            )
            for a in answers
            for chosen in (a.sampling,)
        ],
        [answer.stop_token_ids for answer in answers],
        [answer.prompt for answer in answers],
    )
    stops = max(len(answer.stop_token_ids) for answer in answers)
    place_rows(state, to_device(packed, state.length.device), first, stops)


def row_sampling(state: DecodingState, bounds: SamplingBounds) -> RowSampling:
    """Each row's sampling options."""
    return RowSampling(state.temperature, state.top_k, state.top_p, bounds)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
