"""Whether a target can be decoded: passes over a cache must give what the model gives for the whole text.

Looked at once, before the first cache is made, layer by layer. The states of a few tokens that are read in two chunks
must be those of the model's own forward. A few tokens do not reach beyond a usual window, so what a layer may see of a
long text is compared as well: by the mask that the model makes for its attention function, and by what cached attention
lets it see.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.visibility import Visibility
from draftsmith.targets.attention import CachedAttention, attention_function
from draftsmith.targets.cache import StaticCache
from draftsmith.targets.fields import field
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.taps import layer_output

# Tokens of the two chunks; the second goes on beyond a window that is no larger than `_SMALL_WINDOW`.
_FIRST, _SECOND = 5, 7
_SMALL_WINDOW = 64
# The farthest query whose view is compared.
_FARTHEST = 1 << 20

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""(row, head, query's index, key's index) -> whether the query sees the key, as transformers builds its masks."""


class RunOverCache(Protocol):
    """One pass of the model's own code over a cache, all layers (`Target`)."""

    def __call__(self, input_ids: Tensor, run: CachedPass, attention: CachedAttention) -> object: ...


def check_cached(
    decoder: Any, info: TargetInfo, allocate: Callable[[int], StaticCache], run_over_cache: RunOverCache
) -> None:
    """Raise `DraftsmithError`, with the reason, unless a decoder's passes over a cache are its forward of a text.

    decoder: the Hugging Face module; info: what its configuration says; allocate: an empty cache of one text of so many
    positions.
    """
    if not _takes_keywords(decoder):
        raise DraftsmithError(
            f"{_cannot(info)}: {type(decoder).__name__} has an attention of its own, which takes no other function"
        )
    device = next(decoder.parameters()).device
    count = min(_tokens(info.text_config), info.max_position_embeddings)
    ids = torch.arange(1, 1 + count, device=device)[None] % info.vocab_size
    positions = torch.arange(count, device=device)[None]
    cache = allocate(count)
    with _layer_states(decoder.layers) as whole:
        decoder(input_ids=ids, position_ids=positions, use_cache=False)
    for begin, end in ((0, _FIRST), (_FIRST, count)):
        valid = torch.tensor([end - begin], device=device)
        run = CachedPass(cache, positions[:, begin:end], valid=valid)
        attention = _Probe(run)
        given = [states[:, begin:end] for states in whole.inputs]
        with _layer_states(decoder.layers, given) as part, attention.told_masks():
            run_over_cache(ids[:, begin:end], run, attention)
        cache.settle()
        _compare_views(attention, info)
        for layer, (found, expected) in enumerate(zip(part.outputs, whole.outputs, strict=True)):
            _compare_states(layer, found, expected[:, begin:end], given[layer], info)


def _cannot(info: TargetInfo) -> str:
    return f"the target {info.source} can be captured and trained for, but not decoded"


def _takes_keywords(decoder: Any) -> bool:
    parameters = inspect.signature(decoder.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _tokens(text_config: Any) -> int:
    """How many tokens are read: some more than a small window."""
    window = field(text_config, "sliding_window")
    small = window if isinstance(window, int) and window <= _SMALL_WINDOW else 0
    return max(_FIRST + _SECOND, small + _SECOND)


# --- states -----------------------------------------------------------------------------------------------------------


class _LayerStates:
    """Inputs and outputs [1, w, H] of each layer of a pass."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []


@contextmanager
def _layer_states(layers: nn.ModuleList, given: Sequence[Tensor] | None = None) -> Iterator[_LayerStates]:
    """While open, notes what each layer reads and writes; given: what it reads in place of the layer before's output,
    so that roundings do not add up over the layers."""
    states = _LayerStates()

    def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = args[0] if args else kwargs["hidden_states"]
        states.inputs.append(found)
        if given is None:
            return None
        wanted = given[len(states.inputs) - 1]
        return ((wanted, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": wanted})

    def wrote(module: nn.Module, args: Any, output: Any) -> None:
        states.outputs.append(layer_output(output))

    handles = [layer.register_forward_pre_hook(read, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(wrote) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _compare_states(layer: int, found: Tensor, expected: Tensor, inputs: Tensor, info: TargetInfo) -> None:
    """Raise `DraftsmithError` unless a layer adds the same to its inputs over a cache, up to rounding.

    In 16 bits a token may differ more, since a router may choose other experts after another rounding: there, half of
    the tokens must agree.
    """
    exact = expected.dtype == torch.float32
    difference = (found.float() - expected.float()).norm(dim=-1)
    added = (expected.float() - inputs.float()).norm(dim=-1)
    rounding = 2 * torch.finfo(expected.dtype).eps * expected.float().norm(dim=-1)
    agrees = difference <= (1e-4 if exact else 6e-2) * added + rounding
    # Tokens for which the model itself gives no numbers tell nothing.
    agree = (agrees | ~added.isfinite()).float().mean()
    if not bool(agree == 1 if exact else agree >= 0.5):
        share = float((difference / added.clamp_min(torch.finfo(torch.float32).tiny)).max())
        raise DraftsmithError(
            f"{_cannot(info)}: layer {layer} ({info.layer_kinds[layer]}) gives other states over a cache than in the "
            f"model's own forward (different by up to {share:.0%} of what it adds)"
        )


# --- views ------------------------------------------------------------------------------------------------------------

_PROBE = "draftsmith_probe"
_told: ContextVar[dict[int, tuple[Tensor, MaskFunction]] | None] = ContextVar("told masks", default=None)


def _mask(*, q_length: int, kv_length: int, mask_function: MaskFunction, device: Any = None, **_: Any) -> Tensor | None:
    """What models get as a mask in a probe: a tensor by which its function is found again."""
    told = _told.get()
    if told is None:
        return None
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    told[id(mask)] = (mask, mask_function)
    return mask


AttentionInterface.register(_PROBE, attention_function)
AttentionMaskInterface.register(_PROBE, _mask)


class _Probe(CachedAttention):
    """Attends as its base does, and notes the window and the mask of each layer."""

    implementation = _PROBE

    def __init__(self, run: CachedPass) -> None:
        super().__init__(run)
        self.windows: dict[int, int | None] = {}
        self.masks: dict[int, Tensor] = {}
        self.functions: dict[int, tuple[Tensor, MaskFunction]] = {}

    @contextmanager
    def told_masks(self) -> Iterator[None]:
        """While open, masks that the model makes are noted."""
        token = _told.set(self.functions)
        try:
            yield
        finally:
            _told.reset(token)

    def take_mask(self, layer: int, mask: Tensor | None, name: str) -> None:
        if mask is not None:
            self.masks[layer] = mask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.windows[layer] = options["window"]
        return super().attend(layer, query, key, value, **options)


def _compare_views(attention: _Probe, info: TargetInfo) -> None:
    """Raise `DraftsmithError` where a layer may see other tokens over a cache than the model's own mask shows it."""
    faults: dict[str, list[int]] = {}
    known: dict[tuple[int, int | None], str | None] = {}
    for layer, window in attention.windows.items():
        _, function = attention.functions.get(id(attention.masks.get(layer)), (None, None))
        if function is None:  # the model makes its masks in a way of its own
            fault = _unnamed_window(info, layer, window)
        else:
            key = (id(function), window)
            if key not in known:
                known[key] = _other_view(function, window, info, attention.run.positions.device)
            fault = known[key]
        if fault is not None:
            faults.setdefault(fault, []).append(layer)
    for fault, layers in faults.items():
        named = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        raise DraftsmithError(f"{_cannot(info)}: {fault} (layers {named})")


def _other_view(function: MaskFunction, window: int | None, info: TargetInfo, device: torch.device) -> str | None:
    """How a mask differs from causal attention with this window; None where it does not, for the texts that the target
    may have."""
    last = min(info.max_position_embeddings, _FARTHEST) - 1
    queries = torch.tensor([[last // 3, last // 2 + 1, last]], device=device)
    keys = torch.arange(last + 1, device=device)
    ours = Visibility.over_cache(queries, last + 1, causal=True, window=window).mask()[0]
    ours = ours.view(3, last + 1)
    theirs = function(0, 0, queries[0, :, None], keys[None])
    differing = (ours != theirs).nonzero()
    if not len(differing):
        return None
    query, key = differing[-1].tolist()
    distance = int(queries[0, query]) - key
    given = "no window" if window is None else f"a window of {window}"
    sees = "hides" if ours[query, key] else "shows"
    return f"its mask {sees} tokens that are {distance} back, and its attention function is given {given}"


def _unnamed_window(info: TargetInfo, layer: int, window: int | None) -> str | None:
    """How the window that a layer's attention function is given differs from what the configuration names."""
    config = info.text_config
    named = field(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    if getattr(config, "layer_types", None) and info.layer_kinds[layer] != "sliding_attention":
        named = None
    limit = info.max_position_embeddings
    if ((named or limit) >= limit and (window or limit) >= limit) or named == window:
        return None
    return f"its configuration names a window of {named}, and its attention function is given {window}"
