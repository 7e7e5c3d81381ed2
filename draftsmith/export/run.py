"""`export`: a run checkpoint -> a draft directory with its model card, read again and compared before it counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.convert import parts_of
from draftsmith.drafts.draft import Draft, file_name
from draftsmith.errors import DraftsmithError
from draftsmith.export.card import CARD_FILE, Measured, Training, model_card
from draftsmith.export.fingerprint import fingerprint
from draftsmith.export.options import ExportOptions
from draftsmith.export.serve import ServedTarget
from draftsmith.export.verify import verify_export
from draftsmith.layouts import CARRY_TARGET, WRITABLE, TargetParts
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.options import TargetOptions
from draftsmith.training.record import find_checkpoint, load_run, read_record


@dataclass(frozen=True)
class Exported:
    """What was written: the draft (in its export dtype, on the CPU), where, and of which step."""

    draft: Draft
    directory: Path
    step: int


def export_run(
    run_dir: Path,
    options: ExportOptions,
    out: Path,
    *,
    target: TargetOptions | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> Exported:
    """Writes the draft of a training directory to `out`, whole or not at all, once what is read from there is compared.

    target: where the target lies, None: where the run's features came from; it is loaded (embedding and output head)
    only for layouts that carry them. measured: what a benchmark found, by the draft's `fingerprint`.
    Raises `DraftsmithError` for a run without the checkpoint asked for, a layout that is not there or cannot express
    the draft, a directory that may not be written, and a draft that does not read back as it was.
    """
    if options.layout not in WRITABLE:
        raise DraftsmithError(f"export.layout is {options.layout!r}; allowed: {', '.join(map(repr, WRITABLE))}")
    checkpoint = find_checkpoint(run_dir, options.which)
    record = read_record(run_dir)
    draft = load_run(run_dir, options.which).with_ascending_taps()
    if options.rope_scaling is not None:
        draft = _reconfigured(draft, options.rope_scaling.applied_to(draft.config))
    target = target or TargetOptions(path=record.target["source"], revision=record.target["revision"])
    ends, parts = _target_parts(target, draft) if options.layout in CARRY_TARGET else (None, None)
    training = Training(
        record,
        checkpoint.position.step,
        checkpoint.position.evaluation,
        (measured or {}).get(_fingerprint(draft)),
    )
    card = model_card(draft.config, options.layout, ServedTarget.at_hand(target), str(out), training)

    def check(written: Path) -> None:
        verify_export(written, draft, ends, place=out)

    draft.save(out, options.layout, extra_files={CARD_FILE: card}, target=parts, check=check)
    return Exported(draft, out, checkpoint.position.step)


def _reconfigured(draft: Draft, config: DraftConfig) -> Draft:
    """The same weights under another configuration of the same shapes."""
    with torch.device("meta"):
        changed = Draft(config)
    changed.load_state_dict(draft.state_dict(), assign=True)
    return changed.eval()


def _fingerprint(draft: Draft) -> str:
    return fingerprint(draft.config, {file_name(name): tensor for name, tensor in draft.state_dict().items()})


def _target_parts(target: TargetOptions, draft: Draft) -> tuple[TargetEnds, TargetParts]:
    """The target's ends in the draft's dtype, for the check, and what files carry of them."""
    ends = TargetEnds.load(
        target.path,
        dtype=draft.config.torch_dtype,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )
    return ends, parts_of(ends, target.path, revision=target.revision, trust_remote_code=target.trust_remote_code)
