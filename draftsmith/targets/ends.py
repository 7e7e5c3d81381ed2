"""The two ends of the target that a draft shares: token embeddings going in, output head coming out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.base.devices import current, resolve_device
from draftsmith.base.dtypes import parse_dtype
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.vocabulary.vocabulary_argmax import vocabulary_argmax
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.location import empty_model, locate, read_config
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.tensors import TensorFiles


class TokenChoice(NamedTuple):
    """The head's most likely tokens: ids [...] int64, ties to the lowest; finite [...] bool, False where the logits
    held a NaN, plus infinity, or nothing above minus infinity, so that the id means nothing."""

    ids: Tensor
    finite: Tensor


class TargetEnds(nn.Module):
    """The target's embedding and output head, frozen. Its tensors are buffers outside the state dict.

    embedding_weight, head_weight [V, H] (one tensor where the model ties them); softcap: None, or c in
    logits = c * tanh(logits / c); embedding_scale: None, or what the model multiplies embeddings with (Gemma).
    """

    embedding_weight: Tensor
    head_weight: Tensor
    _scale: Tensor | None

    def __init__(
        self,
        embedding_weight: Tensor,
        head_weight: Tensor,
        *,
        embedding_scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if embedding_weight.shape != head_weight.shape:
            raise DraftsmithError(
                f"the target's embedding is {tuple(embedding_weight.shape)} and its output head "
                f"{tuple(head_weight.shape)}; both must be [vocabulary, hidden]"
            )
        self.register_buffer("embedding_weight", embedding_weight.detach(), persistent=False)
        self.register_buffer("head_weight", head_weight.detach(), persistent=False)
        # The models round their scale to the weights' dtype before multiplying; a Python float would not be rounded.
        scale = None if embedding_scale is None else torch.tensor(embedding_scale).to(embedding_weight)
        self.register_buffer("_scale", scale, persistent=False)
        self.embedding_scale = embedding_scale
        self.softcap = softcap

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output head."""
        return self.head_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.head_weight.shape[1]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] int64 -> what the target's first layer reads [..., H], the model's own scale included."""
        embedded = self.embedding_rows(ids)
        return embedded if self._scale is None else embedded * self._scale

    def embedding_rows(self, ids: Tensor) -> Tensor:
        """Token ids [...] int64 -> rows of the embedding matrix [..., H], not scaled: what a draft is given, whose own
        configuration says by how much it scales them (`DraftConfig.input_embedding_scale`)."""
        return functional.embedding(ids, self.embedding_weight)

    def project(self, hidden: Tensor, product: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> Tensor:
        """States after the final norm [..., H], in the weights' dtype -> the target's logits [..., V]; product: what
        multiplies states with the head."""
        logits = product(hidden, self.head_weight)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def argmax(self, hidden: Tensor) -> TokenChoice:
        """States after the final norm [..., H], in the weights' dtype -> the most likely token of each.

        On a CUDA device no logits are written (`kernels.vocabulary.vocabulary_argmax`).
        """
        with current(hidden.device):
            return TokenChoice(*vocabulary_argmax(hidden, self.head_weight, self.softcap))

    def rows(self, token_ids: Tensor | slice) -> "TargetEnds":
        """The ends of a target that knows only these tokens: token_ids [n] int64 -> copies of their rows, in this
        order; a slice of the vocabulary -> its rows, which share memory with the whole."""
        return TargetEnds(
            self.embedding_weight[token_ids],
            self.head_weight[token_ids],
            embedding_scale=self.embedding_scale,
            softcap=self.softcap,
        )

    @classmethod
    def from_model(cls, model: Any, info: TargetInfo) -> "TargetEnds":
        """The ends of a Hugging Face causal LM in memory, which `info` describes; shares its tensors."""
        embedding, head = _end_modules(model)
        return cls._of(info, embedding.weight, head.weight)

    @classmethod
    def _of(cls, info: TargetInfo, embedding: Tensor, head: Tensor) -> "TargetEnds":
        wanted = (info.vocab_size, info.hidden_size)
        if tuple(head.shape) != wanted:
            raise DraftsmithError(
                f"the output head of {info.source} is {tuple(head.shape)} and its configuration says {wanted} "
                "(vocab_size, hidden_size); the configuration is another model's"
            )
        return cls(embedding, head, embedding_scale=info.embedding_scale, softcap=info.softcap)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "TargetEnds":
        """The ends of a target by path (as for `Target.load`), reading no other weights.

        Raises `DraftsmithError` for a path without a model, weights that are not safetensors or cannot be read
        (`TensorFiles.read`), sizes other than the configuration's, or scales that draftsmith does not know.
        """
        options = TargetOptions(path=str(path), revision=revision, trust_remote_code=trust_remote_code)
        location = locate(path)
        config = read_config(location, revision, trust_remote_code)
        model = empty_model(config, trust_remote_code)
        info = TargetInfo.of_model(model, location.source, options)
        names = {module: name for name, module in model.named_modules()}
        embedding_name, head_name = (f"{names[module]}.weight" for module in _end_modules(model))
        stored = TensorFiles(location, revision, model).read([embedding_name, head_name])
        embedding, head = stored.get(embedding_name), stored.get(head_name)
        if info.tied:  # one of the two may be left out of the files
            embedding, head = (head if embedding is None else embedding), (embedding if head is None else head)
        if embedding is None or head is None:
            raise DraftsmithError(
                f"the weights of {location.source} lack {embedding_name if embedding is None else head_name} "
                f"(tie_word_embeddings is {info.tied}); the checkpoint is incomplete or another model's"
            )
        resolved = parse_dtype(dtype) or info.text_config.dtype or embedding.dtype
        return cls._of(info, embedding.to(resolved), head.to(resolved)).to(resolve_device(device))


def _end_modules(model: Any) -> tuple[Any, Any]:
    """A Hugging Face model's embedding and output head. Raises `DraftsmithError` for a model without a head, or one
    whose head has a bias."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise DraftsmithError(f"{type(model).__name__} has no output head; a causal language model is needed")
    if getattr(head, "bias", None) is not None:
        raise DraftsmithError(f"{type(model).__name__} has a bias on its output head; that is not supported")
    return embedding, head


@dataclass(frozen=True)
class TargetOutline:
    """A target without its layers: what its configuration says, and its two ends."""

    info: TargetInfo
    ends: TargetEnds
