"""What was written is read again and compared with what was to be written, bit by bit."""

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.directory import read_directory
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import TargetStates

_CONTEXT = 11
_ROWS = 2


def verify_export(
    directory: Path, draft: Draft, ends: TargetEnds | None = None, *, seed: int = 0, place: Path | None = None
) -> None:
    """Reads the draft at `directory` and compares with `draft` (in its export dtype, on the CPU): configuration,
    every tensor, and the logits of a step after random features, of every slot and of every token that the method's
    own drafter chooses from.

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
        wanted, found = (proposal_of(each, ends, seed) for each in (draft, written))
        faults = [f"{name} of a step" for name in wanted if not torch.equal(wanted[name], found[name])]
    if faults:
        fate = "do not use it" if place is None else f"{place} is left as it was"
        raise DraftsmithError(
            f"{directory} was written, but does not read back as the run's draft; {fate}. What differs:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )


@torch.no_grad()
def proposal_of(draft: Draft, ends: TargetEnds, seed: int) -> dict[str, Tensor]:
    """What one step computes after random features and tokens: `states` [rows, ...], the draft's own; `choice N`
    [rows, V], the logits that the N-th token was chosen from; `proposals` [rows, P], the tokens themselves."""
    config, drafter = draft.config, algorithm_for(draft.config).stepwise_drafter(draft, ends)
    generator = torch.Generator().manual_seed(seed)
    wants = drafter.wants

    def features(width: int) -> Tensor:
        return torch.randn(_ROWS, _CONTEXT, width, generator=generator).to(draft.dtype)

    states = TargetStates(
        features(len(wants.tap_ids) * config.hidden_size) if wants.tap_ids else None,
        features(config.hidden_size) if wants.final_state else None,
    )
    ids = torch.randint(config.vocab_size, (_ROWS, _CONTEXT + 1), generator=generator)
    anchors = torch.tensor([_CONTEXT, _CONTEXT - 4])
    anchor_ids = ids.gather(1, anchors[:, None])[:, 0]
    length = _CONTEXT + drafter.reach
    state = drafter.new_state(_ROWS, length)
    drafter.read(state, ids[:, :_CONTEXT], states, torch.zeros_like(anchors), anchors)
    sampler = _Recorder()
    proposed = drafter.propose(state, anchors, anchor_ids, length, sampler)
    seen = {} if proposed.states is None else {"states": proposed.states}
    seen |= {f"choice {number}": logits for number, logits in enumerate(sampler.logits)}
    return {**seen, "proposals": proposed.token_ids}


class _Recorder:
    """A greedy `Sampler` that keeps what it is given, draw by draw."""

    greedy = True
    filtered = None
    temperature = torch.zeros(_ROWS)
    seeds = anchors = torch.zeros(_ROWS, dtype=torch.int64)

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits)
        return logits.argmax(-1), None


def _random_ends(draft: Draft, seed: int) -> TargetEnds:
    """Ends of the draft's shape and dtype, one matrix for both."""
    config = draft.config
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=draft.dtype)
    weight.normal_(std=config.hidden_size**-0.5, generator=generator)
    return TargetEnds(weight, weight)
