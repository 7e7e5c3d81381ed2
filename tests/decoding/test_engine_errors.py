"""What the engine refuses, and when."""

import sys
from typing import Any

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 97]]}, r"prompt 0 holds token id 97; .*\[0, 97\)"),
        ({"prompts": [[1, -1]]}, "prompt 0 holds token id -1"),
        ({"prompts": [["a"]]}, "prompt 0 holds token id 'a'"),
        ({"prompts": ["Tell me"]}, "prompt 0 is a text, and the target .* has no tokenizer; give token ids"),
        (
            {"prompts": [[1], [{"role": "user", "content": "x"}]]},
            "prompt 1 is a chat, and the target .* has no tokenizer",
        ),
        ({"prompts": "Tell me"}, r"prompts is the text 'Tell me'; give a list of prompts"),
        ({"prompts": [{"role": "user", "content": "x"}]}, "prompt 0 is a message; a chat is a list of messages"),
        ({"prompts": [7]}, "prompt 0 is a int"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_k": 2**63}, r"top_k is 9223372036854775808; .* to 2\^63 - 1"),
        ({"stop_token_ids": [200]}, "stop_token_ids holds token id 200"),
        ({"seed": -4}, "seed is -4"),
        ({"seed": [1, 2, 3]}, "seed holds 3 numbers for 1 prompts"),
        ({"seed": ["x"]}, "seed holds 'x'"),
        ({"prompts": [[1] * 512]}, "prompt 0 has 512 tokens, and the target's window is 512"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    target: Target, draft: Draft, change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(Target, "forward", no_work)
    settings: dict[str, Any] = {"prompts": [[1, 2]], "max_new_tokens": 4, **change}
    prompts = settings.pop("prompts")
    for used in (draft, None):
        with pytest.raises(DraftsmithError, match=named):
            generate(target, used, prompts, **settings)


def test_a_prompt_beyond_the_drafts_positions_is_refused(target: Target) -> None:
    short = tiny_draft(target, max_position_embeddings=8)
    with pytest.raises(DraftsmithError, match=r"prompt 0 has 9 tokens.* max_position_embeddings is 8"):
        generate(target, short, [[1] * 9], max_new_tokens=3)
    assert len(generate(target, short, [[1] * 8], max_new_tokens=3)[0].token_ids) == 3


def test_drafts_of_other_targets_are_refused_at_construction(target: Target) -> None:
    others = {
        "hidden_size": tiny_target("llama", hidden_size=48),
        "vocab_size": tiny_target("llama", vocab_size=96),
        "num_target_layers": tiny_target("llama", num_layers=5),
    }
    for field, other in others.items():
        with pytest.raises(DraftsmithError, match=field):
            Engine(target, tiny_draft(other))


@pytest.mark.parametrize(
    ("drafted", "options", "named"),
    [
        (True, {"verify_width": 4}, "verify_width is 4"),
        (True, {"num_proposals": 7}, "num_proposals is 7"),
        (True, {"proposer": {"threshold": 0.5}}, "threshold"),
        (False, {"num_proposals": 2}, "num_proposals is 2"),
        (False, {"proposer": {"threshold": 0.5}}, "proposer is"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    target: Target, draft: Draft, drafted: bool, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(DraftsmithError, match=named):
        Engine(target, draft if drafted else None, EngineOptions(**options))


def test_decoding_on_cuda_without_triton_is_refused_at_construction(
    target: Target, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(Target, "device", torch.device("cuda", 0))
    for used in (draft, None):
        with pytest.raises(DraftsmithError, match=r"decoding on cuda:0 needs the package triton, .*pip install triton"):
            Engine(target, used)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target)
    with torch.no_grad():
        draft.backbone.norm.weight[3] = float("nan")
    with pytest.raises(DraftsmithError, match=r"draft's hidden states are NaN or infinite for prompts \[0, 1\]"):
        generate(target, draft, [[1, 2], [3]], max_new_tokens=5)
    assert len(generate(target, None, [[1, 2], [3]], max_new_tokens=5)) == 2
    target.ends.embedding_weight[3] = float("inf")
    with pytest.raises(DraftsmithError, match=r"target's logits are NaN or infinite for prompts \[1\]"):
        generate(target, None, [[1, 2], [3]], max_new_tokens=1)


def test_graphs_may_be_switched_as_yaml_reads_it() -> None:
    assert [EngineOptions.model_validate({"graphs": value}).graphs for value in (True, False, "auto")] == [
        "on",
        "off",
        "auto",
    ]
    with pytest.raises(ValueError, match="graphs"):
        EngineOptions.model_validate({"graphs": 1})


def test_no_prompts_give_no_generations(target: Target, draft: Draft) -> None:
    assert generate(target, draft, [], max_new_tokens=3) == []
