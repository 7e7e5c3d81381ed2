"""What a kind of layer has to say."""

from typing import Any, ClassVar, Protocol

from draftsmith.targets.cache import LayerShape


class LayerKind(Protocol):
    """A kind of decoder layer. Instances carry no state."""

    name: ClassVar[str]
    """As the `layer_types` of configurations name it."""

    def shape(self, text_config: Any, index: int) -> LayerShape:
        """What layer `index` keeps of each text."""
        ...
