"""What a kind of layer has to say."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn

from draftsmith.targets.cache import KeysValuesShape, LayerShape
from draftsmith.targets.passes import CachedPass


class LayerKind(ABC):
    """A kind of decoder layer. Instances carry no state."""

    name: ClassVar[str]
    """As the `layer_types` of configurations name it."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """The types of text models whose layers of this name are of this kind, where several kinds share a name; empty: all
    others."""

    @abstractmethod
    def shape(self, text_config: Any, index: int, attention: KeysValuesShape | None) -> LayerShape:
        """What layer `index` keeps of each text. attention: the keys and values that it hands to the model's attention
        function, None for a layer that calls none."""

    def running(self, layer: nn.Module, index: int, run: CachedPass) -> AbstractContextManager[None]:
        """While open, the model's own `layer` runs over `run.cache.layers[index]`, and notes that with `run.ran`.

        Layers that call the model's attention function, which is draftsmith's in a cached pass, need nothing
        (`targets.attention`). Others have the forward of their own mixing module replaced (`replaced_forward`).
        """
        return nullcontext()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, calls of `module` are calls of `forward`; its hooks run as before."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
