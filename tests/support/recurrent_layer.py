"""A layer kind that the package does not know: a recurrent state a slot, registered from outside.

The layer is a gated recurrence (as minGRU, arXiv 2410.01201): h <- g * h + (1 - g) * c with gate and candidate from the
token alone. A tentative pass leaves the state alone and gives one state a token; `keep` makes that of the last token
that stands the state.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import KeysValuesShape, LayerCache, Room
from draftsmith.targets.layers import LayerKind, register_layer_kind
from draftsmith.targets.layers.kind import replaced_forward
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.target import Target


class GatedRecurrence(nn.Module):
    """The mixing module, as a model without a cache runs it: hidden [B, S, H] -> the same."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gate, self.candidate, self.read, self.out = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def after(self, state: Tensor, token: Tensor) -> Tensor:
        """The state [B, H] after a token [B, H]."""
        gate = self.gate(token).sigmoid()
        return gate * state + (1 - gate) * self.candidate(token).tanh()

    def output(self, state: Tensor, token: Tensor) -> Tensor:
        """What the layer adds for a token [B, H], whose state this is."""
        return self.out(state * self.read(token))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        state = torch.zeros_like(hidden_states[:, 0])
        outputs = []
        for token in hidden_states.unbind(1):
            state = self.after(state, token)
            outputs.append(self.output(state, token))
        return torch.stack(outputs, dim=1), None


class StateCache(LayerCache):
    """state [slots, H]: after the tokens that stand; of_tokens [slots, width, H]: after each of a tentative pass."""

    def __init__(self, state: Tensor, of_tokens: Tensor) -> None:
        self.state, self.of_tokens = state, of_tokens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.of_tokens

    def rows(self, begin: int, end: int) -> "StateCache":
        return StateCache(self.state[begin:end], self.of_tokens[begin:end])

    def view(self, extent: int) -> "StateCache":
        return self

    def keep(self, count: Tensor, path: Tensor | None) -> None:
        assert path is None  # a tree would need one state a branch
        last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, self.state.shape[1])
        self.state.copy_(torch.where(count[:, None] > 0, self.of_tokens.gather(1, last)[:, 0], self.state))


class StateShape:
    """Of a layer of this width."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def allocate(self, room: Room) -> StateCache:
        state = torch.zeros(room.slots, self.hidden_size, dtype=room.dtype, device=room.device)
        of_tokens = torch.zeros(room.slots, room.width, self.hidden_size, dtype=room.dtype, device=room.device)
        return StateCache(state, of_tokens)


class Recurrent(LayerKind):
    """The kind: configurations of its model call it `linear_attention`."""

    name = "linear_attention"
    model_types = ("toy_hybrid",)

    def shape(self, text_config: Any, index: int, attention: KeysValuesShape | None) -> StateShape:
        return StateShape(text_config.hidden_size)

    def running(self, layer: Any, index: int, run: CachedPass) -> AbstractContextManager[None]:
        return replaced_forward(layer.self_attn, partial(_run, layer.self_attn, index, run))


def _run(mixer: GatedRecurrence, index: int, run: CachedPass, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """One pass over what the cache keeps."""
    cache = run.cache.layers[index]
    assert isinstance(cache, StateCache)
    if run.ancestors is not None:
        raise DraftsmithError("the layer keeps a state, which follows one path of tokens and no tree; propose a chain")
    assert run.valid is not None
    state = torch.where(run.positions[:, :1] == 0, 0.0, cache.state)  # a text begins
    outputs = []
    for step, token in enumerate(hidden_states.unbind(1)):
        after = mixer.after(state, token)
        outputs.append(mixer.output(after, token))
        if run.tentative:
            cache.of_tokens[:, step] = after
        state = torch.where(step < run.valid[:, None], after, state)
    if not run.tentative:
        cache.state.copy_(torch.where(run.valid[:, None] > 0, state, cache.state))
    run.ran(index)
    return torch.stack(outputs, dim=1), None


class ToyHybridConfig(LlamaConfig):
    model_type = "toy_hybrid"


register_layer_kind(Recurrent())


def toy_hybrid(seed: int = 0, vocab_size: int = 97, recurrent: tuple[int, ...] = (0, 2)) -> Target:
    """A tiny random target of four layers, of which `recurrent` are of this kind and the others attend."""
    kinds = ["linear_attention" if layer in recurrent else "full_attention" for layer in range(4)]
    config = ToyHybridConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        layer_types=kinds,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for layer in recurrent:
            mixer = GatedRecurrence(32)
            for parameter in mixer.parameters():
                nn.init.normal_(parameter, std=0.4)
            model.model.layers[layer].self_attn = mixer
    return Target.from_model(model)
