"""Does this store fit this draft? Asked before training starts, answered with every reason at once."""

import logging

from draftsmith.features.manifest import StoreError, StoreHeader, TargetIdentity, TokenizerIdentity
from draftsmith.features.schema import CaptureLayout

_log = logging.getLogger(__name__)


def check_store(
    manifest: StoreHeader,
    layout: CaptureLayout,
    target: TargetIdentity | None = None,
    tokenizer: TokenizerIdentity | None = None,
) -> None:
    """Raise `StoreError` unless a store serves a draft that needs `layout` of `target`, tokenised by `tokenizer`.

    The error lists every field that does not fit, with what the store has and what the draft needs. A store may hold
    more than the draft needs (a final state), never less; its dtype does not matter. What is passed as None is not
    asked. The same target under another name or revision fits, with a warning: the weights say who it is.
    """
    faults: list[str] = []

    def need(field: str, has: object, needs: object, fits: bool) -> None:
        if not fits:
            faults.append(f"{field}: the store has {has}, the draft needs {needs}")

    need("tap_ids", list(manifest.tap_ids), list(layout.tap_ids), manifest.tap_ids == layout.tap_ids)
    need("hidden_size", manifest.hidden_size, layout.hidden_size, manifest.hidden_size == layout.hidden_size)
    kept = manifest.final_state is not None
    need("final_state", "none", "the target's final state", kept or not layout.final_state)
    if target is not None:
        target = target.beside(manifest.target)
        for field in ("config_hash", "weights_hash", "layers_hash", "vocab_size", "num_layers"):
            has, needs = getattr(manifest.target, field), getattr(target, field)
            need(
                f"target.{field}",
                f"{has} ({manifest.target.source})",
                f"{needs} ({target.source})",
                has == needs,
            )
    if tokenizer is not None:
        stored = manifest.tokenizer
        need("tokenizer", "no record of it", "a known one", stored is not None)
        if stored is not None:
            for field in ("vocabulary_hash", "template_hash"):
                has, needs = getattr(stored, field), getattr(tokenizer, field)
                need(f"tokenizer.{field}", has, needs, has == needs)
    if faults:
        raise StoreError(
            "the feature store does not fit this draft: " + "; ".join(faults) + ". Capture the features again for this "
            "draft and target, or configure the draft for the store"
        )
    if target is not None:
        _warn_of_new_names(manifest.target, target)


def _warn_of_new_names(stored: TargetIdentity, target: TargetIdentity) -> None:
    sampled = "sampled weights" if stored.layers_hash else "sampled weights of the output head (no others are known)"
    for field in ("source", "revision"):
        has, needs = getattr(stored, field), getattr(target, field)
        if has != needs:
            _log.warning(
                "target.%s: the store was captured from %r, this run loads %r; shape and %s are equal, so they are "
                "taken for the same model",
                field,
                has,
                needs,
                sampled,
            )
