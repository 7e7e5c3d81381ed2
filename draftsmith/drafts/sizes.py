"""Whether a configuration's sizes can be those of some weights, before a network of such sizes is made."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.fields import declared

_LAYER = re.compile(r"layers\.(\d{1,9})\.")


def check_sizes(config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """`DraftConfigError`, a line for each fault, for sizes that these tensors (by their canonical names) cannot have:
    more layers than there are tensors, or a dimension larger than any of theirs.

    Sizes that could be are compared tensor by tensor (`check_weights`), which takes a network, and with it the time and
    memory that layers and rotary frequencies take.
    """
    faults = list(_faults(config, tensors))
    if faults:
        raise DraftConfigError("\n".join(faults))


def _faults(config: DraftConfig, tensors: Mapping[str, Tensor]) -> Iterable[str]:
    if config.num_hidden_layers > len(tensors):
        layers = {match[1] for name in tensors if (match := _LAYER.match(name))}
        yield f"num_hidden_layers is {config.num_hidden_layers}, and the weights hold {len(layers)} layers"
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    flat = config.flat()
    values = {name: flat[name] for name, field in FIELDS.items() if field.note.dimension}
    head = type(config.head)
    own = [field.name for field in declared(head.model_fields, head) if field.note.dimension]
    values |= {name: getattr(config.head, name) for name in own}
    values |= {
        "num_attention_heads x head_dim": config.num_attention_heads * config.head_dim,
        "the width of the features (hidden_size x taps)": config.hidden_size * len(config.target_layer_ids),
    }
    for name, value in values.items():
        if value is not None and value > largest:
            yield f"{name} is {value}, and no dimension of the weights is above {largest}"
