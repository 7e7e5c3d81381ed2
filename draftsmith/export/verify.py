"""What was written is read again and compared with what was to be written, bit by bit."""

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.blocks.build import anchor_block_inputs
from draftsmith.decoding.cache import block_masks
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import read_directory
from draftsmith.targets.ends import TargetEnds

_CONTEXT = 11
_ROWS = 2


def verify_export(
    directory: Path, draft: Draft, ends: TargetEnds | None = None, *, seed: int = 0, place: Path | None = None
) -> None:
    """Reads the draft at `directory` and compares with `draft` (in its export dtype, on the CPU): configuration,
    every tensor, and the logits of a block after random features, of every slot and of every token that the method's
    own proposer chooses from.

    ends: the target's, which the directory must hold too, in the same dtype; None: the layout has none, and random
    ones serve as well. place: where the directory is to go once it is right, for the error. Raises `DraftsmithError`
    naming what differs.
    """
    written = Draft.load(directory).eval()
    wanted_fields, found_fields = draft.config.meaning(), written.config.meaning()
    faults = [
        f"{name}: {wanted!r} was to be written, {found_fields[name]!r} is read"
        for name, wanted in wanted_fields.items()
        if wanted != found_fields[name]
    ]
    if not faults:
        tensors = written.state_dict()
        faults = [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, tensors[name])]
    if ends is not None:
        carried = read_directory(directory).target
        held = {} if carried is None else {"embedding": carried.embedding, "output head": carried.output_head}
        wanted_ends = {"embedding": ends.embedding_weight, "output head": ends.head_weight}
        faults += [
            f"the target's {name}"
            for name, weight in wanted_ends.items()
            if name not in held or not torch.equal(weight, held[name])
        ]
    if not faults:
        ends = ends or _random_ends(draft, seed)
        wanted, found = (block_logits(each, ends, seed) for each in (draft, written))
        faults = [f"logits of {name}" for name in wanted if not torch.equal(wanted[name], found[name])]
    if faults:
        fate = "do not use it" if place is None else f"{place} is left as it was"
        raise DraftsmithError(
            f"{directory} was written, but does not read back as the run's draft; {fate}. What differs:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )


@torch.no_grad()
def block_logits(draft: Draft, ends: TargetEnds, seed: int) -> dict[str, Tensor]:
    """Logits of one block a row on random features and tokens: `slots` [rows, B, V], the target's head on every slot;
    `choice N` [rows, V], what the method's proposer chose its N-th token from; `proposals` [rows, P], the tokens
    themselves."""
    config = draft.config
    generator = torch.Generator().manual_seed(seed)
    block_size = config.block_for("the check of an exported draft").size
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(_ROWS, _CONTEXT, width, generator=generator).to(draft.dtype)
    anchors = torch.tensor([_CONTEXT, _CONTEXT - 4])
    anchor_ids = torch.randint(config.vocab_size, (_ROWS,), generator=generator)
    positions = anchors[:, None] + torch.arange(block_size)

    context = draft.context_keys_values(features, torch.arange(_CONTEXT).expand(_ROWS, -1))
    attend = block_masks(anchors, _CONTEXT, block_size, draft.attention_kinds)
    embeddings = anchor_block_inputs(anchor_ids, config, ends)  # [rows, B, H]
    hidden = draft(embeddings[:, None], positions[:, None], context, attend)[:, 0]  # [rows, B, H]

    seen = {"slots": draft.logits(hidden, ends)}

    def choose(logits: Tensor, draw: int) -> tuple[Tensor, None]:
        seen[f"choice {draw}"] = logits
        return logits.argmax(-1), None

    proposals = algorithm_for(config).stepwise_proposer(draft, ends).propose(hidden, anchor_ids, choose)
    return {**seen, "proposals": proposals.token_ids}


def _random_ends(draft: Draft, seed: int) -> TargetEnds:
    """Ends of the draft's shape and dtype, one matrix for both."""
    config = draft.config
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=draft.dtype)
    weight.normal_(std=config.hidden_size**-0.5, generator=generator)
    return TargetEnds(weight, weight)
