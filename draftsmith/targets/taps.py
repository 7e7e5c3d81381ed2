"""Which hidden state a tap id means: the one owner of that fact.

Tap id `i` is 0-based and means the residual stream after decoder layer `i`, before any final norm. Hugging Face's
`output_hidden_states` gives the same tensor at index `i + 1`, except for the last layer, where it gives the normed
state instead; hooks on the layers themselves have no such exception, and let the forward end at the last layer needed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from draftsmith.errors import DraftsmithError


def default_tap_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """The tapped layers that DFlash (arXiv 2602.06036) takes of a target with `num_layers` decoder layers.

    One tap: the middle layer. More: `count` layers spread evenly from layer 1 to layer `num_layers - 3`.
    Raises `DraftsmithError` where that gives no `count` distinct layers.
    """
    if count < 1:
        raise DraftsmithError(f"the number of taps is {count}; at least 1 is needed")
    if count == 1:
        return (num_layers // 2,)
    if num_layers < 4:
        raise DraftsmithError(
            f"the target has {num_layers} layers; {count} taps need at least 4 (use 1 tap, or name the layers)"
        )
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if len(set(ids)) < count:
        raise DraftsmithError(
            f"{count} taps do not spread over {num_layers} layers without repeating one ({list(ids)}); "
            f"at most {num_layers - 3} taps have default layers here (use fewer taps, or name the layers)"
        )
    return ids


def tap_fault(ids: Sequence[int], num_layers: int | None, name: str = "tap ids") -> str | None:
    """Why `ids`, which errors call `name`, cannot be tap ids of a target with `num_layers` layers (None: not known);
    None where they can: distinct layers, at least one."""
    if not ids:
        return f"{name} is empty; allowed: one or more distinct layers of the target"
    outside = [i for i in ids if i < 0 or (num_layers is not None and i >= num_layers)]
    if outside:
        layers = "from 0 on" if num_layers is None else f"0 to {num_layers - 1}, for it has {num_layers}"
        return (
            f"{name} is {list(ids)}, of which {outside} are not layers of the target; allowed: {layers} (ids that "
            "other projects write are often one higher)"
        )
    repeated = sorted(i for i, count in Counter(ids).items() if count > 1)
    if repeated:
        return f"{name} is {list(ids)}, which repeats {repeated}; allowed: distinct layers, each is tapped once"
    return None


def check_tap_ids(ids: Sequence[int], num_layers: int, name: str = "tap ids") -> None:
    """Raise `DraftsmithError` where there is a `tap_fault`."""
    fault = tap_fault(ids, num_layers, name)
    if fault is not None:
        raise DraftsmithError(fault)


class _LastTapReached(Exception):
    """Ends a forward whose upper layers nobody needs; never leaves this file."""


def layer_output(output: Any) -> Tensor:
    """The hidden states [B, w, H] in what a decoder layer returned: the tensor itself, or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def tap_layers(layers: nn.ModuleList, tap_ids: Sequence[int], *, stop_after_last: bool) -> Iterator[dict[int, Tensor]]:
    """While open, a forward through `layers` fills the yielded dict: tap id -> output of that layer [B, w, H].

    With `stop_after_last` the forward is abandoned right after the highest tapped layer: nothing above it runs, and the
    body of the `with` statement ends there.
    """
    outputs: dict[int, Tensor] = {}
    last = max(tap_ids, default=-1)

    def hook_for(tap_id: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[tap_id] = layer_output(output)
            if stop_after_last and tap_id == last:
                raise _LastTapReached

        return hook

    handles = [layers[tap_id].register_forward_hook(hook_for(tap_id)) for tap_id in tap_ids]
    try:
        yield outputs
    except _LastTapReached:
        pass
    finally:
        for handle in handles:
            handle.remove()
