"""A draft network: backbone, perhaps a head, and the way in and out of directories."""

import logging
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from draftsmith.base.devices import resolve_device
from draftsmith.base.dtypes import parse_dtype
from draftsmith.base.paths import user_path
from draftsmith.drafts.attention import AttentionKind, BlockAttention
from draftsmith.drafts.backbone import Backbone, ContextKeysValues
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_draft, write_directory
from draftsmith.drafts.network import Network
from draftsmith.drafts.vocabulary import DraftVocabulary
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import TargetParts

if TYPE_CHECKING:
    from draftsmith.targets.ends import TargetEnds

_log = logging.getLogger(__name__)

HeadT = TypeVar("HeadT", default=Any)
"""The module of a draft's head, or None."""


class DraftWeightsError(DraftsmithError):
    """Weights that do not belong to the configured network, or that are not finite: every fault in one message."""


NetworkT = TypeVar("NetworkT", bound=Network, default=Backbone)
"""The type of a draft's network."""


class Draft(nn.Module, Generic[HeadT, NetworkT]):
    """The network that proposes tokens: by its architecture a `backbone`, mostly the one that runs blocks of slots, and
    perhaps a `head` (`Draft[DominoHead]`; None for one without).

    Embeddings are the target's, and so is the output head, unless the draft has a `vocabulary` of its own: rows for a
    part of the target's tokens. Parameters are named as in files of the z-lab layout, after a first component that says
    whether they belong to the `backbone`, to the `head` or to the `vocabulary`.
    """

    backbone: NetworkT
    head: HeadT
    vocabulary: DraftVocabulary | None

    def __init__(self, config: DraftConfig) -> None:
        """The modules with parameters not set; use `from_config` or `load`."""
        super().__init__()
        self.config = config
        self.backbone = cast(NetworkT, config.head.network(config))
        self.head = cast(HeadT, config.head.build(config))
        self.vocabulary = None
        if config.vocabulary is not None:
            self.vocabulary = DraftVocabulary(config.vocabulary.size, config.hidden_size, config.vocab_size)

    @classmethod
    def from_config(cls, config: DraftConfig | dict[str, Any], *, generator: torch.Generator | None = None) -> Self:
        """A draft with fresh fp32 weights on the CPU, drawn from `generator` (default: torch's own).

        Projections are normal with standard deviation `initializer_range`, norms 1; heads set their own. Raises
        `DraftConfigError` for a configuration that cannot be right.
        """
        config = DraftConfig.parse(config)
        with torch.device("meta"):
            draft = cls(config)
        draft.to_empty(device="cpu")
        with torch.no_grad():
            # A parameter that no rule below reaches must not pass for an initialised one.
            for parameter in draft.parameters():
                parameter.fill_(float("nan"))
            for module in draft.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight.normal_(std=config.initializer_range, generator=generator)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        module.bias.zero_()
            for module in draft.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None and not isinstance(module, nn.Linear | nn.Embedding):
                    reset()
        return draft

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        layout: str | None = None,
        strict: bool = False,
        allow_pickle: bool = False,
    ) -> Self:
        """A draft from a directory of any readable layout (recognised from its files unless `layout` is given).

        dtype: "auto" keeps the stored one; a name of `DTYPES` or a torch dtype converts the parameters in memory
        (`config.dtype` stays what files hold). device: "auto" (cuda if there is one), "cpu", "cuda" or "cuda:N".
        strict: unknown fields of the draft's section are errors instead of logged warnings. strict and allow_pickle:
        as for `layouts.read_directory`. Raises `LayoutError` for files that cannot be read, `DraftConfigError` for a
        configuration that cannot be right, `DraftWeightsError`, with every fault at once, for tensors that are missing,
        not used, of another shape or dtype than the configuration says, or not finite, and `DraftsmithError` for a
        dtype or device that is not known or not there.
        """
        directory = user_path(directory)
        wanted_dtype, resolved_device = parse_dtype(dtype), resolve_device(device)
        canonical, config = read_draft(directory, layout, strict=strict, allow_pickle=allow_pickle)
        for note in canonical.notes:
            _log.warning("%s: %s", directory, note)
        if canonical.ignored and canonical.target is None:  # a layout that carries the target holds more than the draft
            _log.warning("%s: drafts have no %s; not loaded", directory, ", ".join(canonical.ignored))
        # On the meta device no parameter has a value, so one that nobody loads cannot be used by accident.
        with torch.device("meta"):
            draft = cls(config)
        check_weights(draft, canonical.tensors, str(directory))
        kept_dtype = wanted_dtype or config.torch_dtype
        state = {
            name: canonical.tensors[file_name(name)].to(
                device=resolved_device, dtype=kept_dtype if wanted.is_floating_point() else wanted.dtype, copy=True
            )
            for name, wanted in draft.state_dict().items()
        }
        draft.load_state_dict(state, assign=True)
        return draft.to(resolved_device)

    def save(
        self,
        directory: str | Path,
        layout: str = "zlab",
        *,
        extra_files: Mapping[str, str | bytes] | None = None,
        target: TargetParts | None = None,
        check: Callable[[Path], object] | None = None,
    ) -> None:
        """Writes the draft, whole or not at all, in the dtype of `config.dtype`.

        extra_files: further files of the directory, by name. target: what the layout `speculators` carries of the
        target. check: is given what was written before it takes its place, and raises where it must not. Raises
        `DraftWeightsError` when a parameter is not finite and `LayoutError` when the directory may not be written or
        the layout cannot express the draft.
        """
        directory = user_path(directory)
        tensors = {
            file_name(name): tensor.detach().to(
                device="cpu", dtype=self.config.torch_dtype if tensor.is_floating_point() else tensor.dtype
            )
            for name, tensor in self.state_dict().items()
        }
        if faults := _not_finite(tensors):
            raise DraftWeightsError(f"the draft is not written to {directory}:\n" + "\n".join(faults))
        write_directory(directory, layout, self.config.to_dict(), tensors, extra_files, target, check)

    def with_block_size(self, block_size: int) -> Self:
        """The same draft, weights shared, decoding blocks of so many slots: at most those it was trained with.

        Raises `DraftsmithError` for more, and `DraftConfigError` where its head needs more than are left.
        """
        trained = self.config.block_for("a change of block_size").size
        if block_size == trained:
            return self
        if block_size > trained:
            raise DraftsmithError(
                f"block_size is {block_size}, and the draft was trained with {trained}; choose a size up to that"
            )
        view = copy(self)
        view.config = self.config.replace(block_size=block_size)
        return view

    @torch.no_grad()
    def with_ascending_taps(self: "Draft[HeadT, Backbone]") -> "Draft[HeadT, Backbone]":
        """The same draft, reading its taps in ascending order: `fc`'s columns move with their layers.

        Servers hand layers over in that order, whatever order the draft's files name.
        """
        taps, hidden = self.config.target_layer_ids, self.config.hidden_size
        if list(taps) == sorted(taps):
            return self
        order = [taps.index(tap_id) for tap_id in sorted(taps)]
        with torch.device("meta"):
            reordered: Draft[HeadT, Backbone] = Draft(self.config.replace(target_layer_ids=tuple(sorted(taps))))
        reordered.load_state_dict(self.state_dict(), assign=True)
        fc = reordered.backbone.fc
        fc.weight = nn.Parameter(
            fc.weight.unflatten(1, (len(taps), hidden))[:, order].flatten(1), requires_grad=fc.weight.requires_grad
        )
        return reordered.train(self.training)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Each layer's attention pattern; a `BlockAttention` has to know all of them."""
        return self.config.attention_kinds

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters in memory."""
        return self.backbone.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.backbone.fc.weight.device

    def context_keys_values(self: "Draft[HeadT, Backbone]", features: Tensor, positions: Tensor) -> ContextKeysValues:
        """What the layers keep of verified tokens: c = hidden_norm(fc(features)), then each layer's keys and values
        of c.

        features [R, S, T*H], the tapped states of S tokens in the order of `target_layer_ids` (cast to the draft's
        dtype); positions [R, S] int64, absolute within their documents. Returns, per layer, keys (normed, rotated)
        and values, each [R, kv_heads, S, d]. Tokens do not influence each other, so any chunking gives the same.
        """
        return self.backbone.context_keys_values(features.to(self.dtype), positions)

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows [..., H] of the target's embedding as the draft reads tokens: in the draft's dtype, times
        `input_embedding_scale`."""
        rows = rows.to(self.dtype)
        return rows if self.config.input_embedding_scale == 1.0 else rows * self.config.input_embedding_scale

    def forward(
        self: "Draft[HeadT, Backbone]",
        embeddings: Tensor,
        positions: Tensor,
        context: ContextKeysValues,
        attend: BlockAttention,
    ) -> Tensor:
        """One pass over N blocks of B slots in each of R rows.

        embeddings [R, N, B, H], the target's embeddings of the blocks' token ids, not yet `scaled`; positions
        [R, N, B] int64, of the slots; context as from `context_keys_values`, or a cache of it; attend, who sees whom.
        Returns the final normed states [R, N, B, H].
        """
        return self.backbone(self.scaled(embeddings), positions, context, attend)

    def logits(
        self,
        hidden: Tensor,
        ends: "TargetEnds",
        product: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear,
    ) -> Tensor:
        """Unary logits of slots: hidden [..., H] -> [..., V], or [..., V'] in the order of the draft's own vocabulary.

        The target's own output head (soft-cap included, if it has one) or the rows of the draft's vocabulary, then the
        draft's `output_multiplier` and `final_logit_softcapping` c: c * tanh(logits / c). product: what multiplies
        states with the head.
        """
        if self.vocabulary is not None:
            logits = self.vocabulary.logits(hidden, product)
        else:
            logits = ends.project(hidden.to(ends.head_weight.dtype), product)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def argmax(self, hidden: Tensor, ends: "TargetEnds") -> Tensor:
        """The most likely token of slots, by the target's ids, ties to the lowest: hidden [..., H] -> [...] int64.

        A multiplier or a soft-cap of the draft's own can make equal what was not, by rounding; without them the
        target's head need not write any logits.
        """
        if self.vocabulary is not None:
            return self.vocabulary.target_ids(self.logits(hidden, ends).argmax(-1))
        if self.config.output_multiplier != 1.0 or self.config.final_logit_softcapping is not None:
            return self.logits(hidden, ends).argmax(-1)
        return ends.argmax(hidden.to(ends.head_weight.dtype)).ids


def file_name(parameter: str) -> str:
    """A parameter's canonical name in files: its name in the module without the first component."""
    return parameter.split(".", 1)[1]


def check_weights(draft: Draft[Any, Any], tensors: dict[str, Tensor], source: str) -> None:
    """`DraftWeightsError`, with every fault at once, unless tensors (by their canonical names) are exactly those of a
    draft (which may be on the meta device): none missing or over, shapes and dtypes as configured, all finite."""
    wanted = {file_name(name): parameter for name, parameter in draft.state_dict().items()}
    faults = [f"missing: {name} {list(wanted[name].shape)}" for name in sorted(set(wanted) - set(tensors))]
    faults += [f"not used: {name} {list(tensors[name].shape)}" for name in sorted(set(tensors) - set(wanted))]
    for name in sorted(set(wanted) & set(tensors)):
        found = tensors[name]
        if found.shape != wanted[name].shape:
            faults.append(f"wrong shape: {name} is {list(found.shape)}; wanted {list(wanted[name].shape)}")
        if not wanted[name].is_floating_point():
            if found.dtype != wanted[name].dtype:
                faults.append(f"wrong dtype: {name} is {found.dtype}; wanted {wanted[name].dtype}")
        elif found.dtype != draft.config.torch_dtype:
            faults.append(f"wrong dtype: {name} is {found.dtype}; the configuration declares {draft.config.dtype}")
    faults += _not_finite(tensors)
    ids = tensors.get("draft_ids")
    if not faults and draft.vocabulary is not None and ids is not None and (fault := draft.vocabulary.fault(ids)):
        faults.append(fault)
    if faults:
        raise DraftWeightsError(f"{source}: the weights are not those of the configured draft:\n" + "\n".join(faults))


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any floating-point dtype holds neither NaN nor Inf."""
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # 8 bits have no such test
    return bool(torch.isfinite(wide).all())


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    return [
        f"not finite: {name} holds NaN or Inf"
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and not all_finite(tensor)
    ]
