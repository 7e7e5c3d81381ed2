"""Domino from capture to decoding: it learns the counting language, and its output is the target's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from draftsmith.training.warm_start import read_warm_start
from tests.families.counting import assert_commits_maximum, train_counting
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft
from tests.test_losslessness import SAMPLINGS, SMALL, decode_small, p_value, small_models

LAYOUTS = [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1), (False, 2)]
"""(shift_label, pure_draft_prefix_len)"""


def domino_draft(target: Target, shift: bool, prefix: int, **options: Any) -> Draft:
    head = {"gru_hidden_dim": 11, "emb_dim": 6, "shift_label": shift, "pure_draft_prefix_len": prefix}
    return tiny_draft(target, **({"architecture": "domino", "head": head, "block_size": 5} | options))


# --- the counting language --------------------------------------------------------------------------------------------


def reshaped(draft: Draft, **head: Any) -> Draft:
    """The same weights under another configuration of the head."""
    other = Draft.from_config(draft.config.replace(head={**draft.config.head.model_dump(), **head}))
    other.load_state_dict(draft.state_dict())
    return other.eval()


# Training takes seconds: every prefix once, and either alignment of labels; all six are compared in the tests below.
@pytest.mark.parametrize(("shift", "prefix"), [(True, 0), (False, 1), (True, 2)])
def test_the_counting_language_commits_the_maximum(shift: bool, prefix: int) -> None:
    section = {
        "algorithm": "domino",
        "gru_hidden_dim": 16,
        "emb_dim": 8,
        "shift_label": shift,
        "pure_draft_prefix_len": prefix,
    }
    # What the head corrects is learnt in fewer steps than what the backbone has to know by itself.
    target, draft = train_counting(section, steps=110 if prefix == 0 else 200)
    assert draft.config.head.model_dump() == {name: value for name, value in section.items() if name != "algorithm"}
    assert_commits_maximum(target, draft)
    assert_commits_maximum(target, draft, num_proposals=3)
    # Mutated: decoded with the other convention, every verify commits less.
    wrong = generate(target, reshaped(draft, shift_label=not shift), [[3, 4, 5, 6]], max_new_tokens=13)
    assert max(wrong[0].accept_lengths) < 5


def test_a_plain_draft_starts_a_domino_draft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The backbone is the checkpoint's, the head is new, and a warning says so; half a head is an error."""
    target = tiny_target()
    plain, wanted = tiny_draft(target, block_size=5), domino_draft(target, True, 1, seed=4)
    plain.save(tmp_path / "plain")
    fresh = {name: tensor.clone() for name, tensor in wanted.state_dict().items()}
    read_warm_start(str(tmp_path / "plain")).load_into(wanted)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(tensor, fresh[name] if name.startswith("head.") else plain.state_dict()[name])
    assert "prefix_gru" in caplog.text
    assert "embed_proj" in caplog.text
    warm = read_warm_start(str(tmp_path / "plain"))
    half = replace(warm, tensors={**warm.tensors, "embed_proj.0.weight": fresh["head.embed_proj.0.weight"]})
    with pytest.raises(DraftsmithError, match=r"prefix_gru.weight_hh_l0: not in the checkpoint"):
        half.load_into(wanted)


# --- losslessness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "prefix"), LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_greedy_equals_plain_decoding(kind: str, shift: bool, prefix: int) -> None:
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (5, 1, 19, 8)]
    plain = generate(target, None, prompts, max_new_tokens=17)
    draft = domino_draft(target, shift, prefix, input_embedding_scale=2.0 if kind == "gemma3" else 1.0)
    for num_proposals in (None, 2):
        drafted = generate(
            target, draft, prompts, max_new_tokens=17, options=EngineOptions(num_proposals=num_proposals)
        )
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    alone = generate(target, draft, prompts[2:3], max_new_tokens=17, options=EngineOptions(num_proposals=2))
    assert alone == drafted[2:3]


def test_greedy_equals_plain_decoding_when_the_draft_is_often_right() -> None:
    """Three tokens of vocabulary: a random draft is right every third time."""
    target = tiny_target("qwen3", vocab_size=3, seed=5)
    prompts = [[0, 2, 1], [1], [2, 2, 0, 1, 1, 0]]
    plain = generate(target, None, prompts, max_new_tokens=50)
    lengths: set[int] = set()
    for seed, (shift, prefix) in enumerate(LAYOUTS):
        drafted = generate(target, domino_draft(target, shift, prefix, seed=seed), prompts, max_new_tokens=50)
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        lengths.update(length for result in drafted for length in result.accept_lengths)
    assert {1, 2, 3} <= lengths


def sampled(shift: bool, prefix: int, sampling: SamplingOptions, *, wrong_q: bool = False) -> list[Generation]:
    target, _ = small_models()
    draft = domino_draft(target, shift, prefix, num_layers=1, block_size=3, seed=2)
    engine = Engine(target, draft)
    if wrong_q:
        engine.drafter.filler = Forgetful(engine.drafter.filler)
    return decode_small(engine, sampling, new=4)


class Forgetful:
    """Mutated: claims that its tokens were drawn from a uniform distribution."""

    def __init__(self, filler: Any) -> None:
        self.filler, self.num_proposals = filler, filler.num_proposals

    def fill(self, *arguments: Any) -> Any:
        proposals = self.filler.fill(*arguments)
        return type(proposals)(proposals.token_ids, torch.full_like(proposals.q, 1 / SMALL))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (False, 0)])
def test_sampled_output_has_the_targets_distribution(shift: bool, prefix: int, sampling: SamplingOptions) -> None:
    results = sampled(shift, prefix, sampling)
    assert p_value(results, sampling) > 1e-3
    assert len({length for result in results for length in result.accept_lengths}) >= 2


def test_a_wrong_q_is_caught() -> None:
    assert p_value(sampled(True, 1, SAMPLINGS[0], wrong_q=True), SAMPLINGS[0]) < 1e-6
