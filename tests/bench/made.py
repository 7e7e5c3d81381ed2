"""Benchmark records made by hand, and a target whose drafts are right now and then."""

import torch

from draftsmith.bench.records import PLAIN, AskedPrompt, BenchAnswer, BenchReport, Decoder, Round
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer

SAID = "abc"
"""The letters that `wordy_target` says."""


def wordy_target(kind: str = "llama", *, seed: int = 9, **options) -> Target:
    """A random target that answers in three letters only, so that a random draft agrees with it often."""
    tokenizer = tiny_tokenizer()
    fields = {"num_layers": 2, "tie_word_embeddings": False} | options
    model = tiny_model(kind, vocab_size=len(tokenizer) + 1, seed=seed, **fields)
    said = [tokenizer.convert_tokens_to_ids(letter) for letter in SAID]
    with torch.no_grad():
        # Rows that add up to nothing: one of them always beats the zeros of all others.
        rows = model.lm_head.weight[said]
        model.lm_head.weight.zero_()
        model.lm_head.weight[said] = 2 * (rows - rows.mean(0))
    return Target.from_model(model, tokenizer)


def answer(prompt: str, lengths: list[int], decoder: str = "d", **fields) -> BenchAnswer:
    """An answer of these verifies; all of it equals plain decoding unless `fields` say otherwise."""
    tokens = list(range(1 + sum(lengths)))
    values = {
        "batch_size": 1,
        "seed": 0,
        "turn": 0,
        "category": None,
        "prompt_tokens": 5,
        "token_ids": tokens,
        "finish_reason": "stop",
        "equal_tokens": len(tokens),
        "plain_tokens": len(tokens),
    }
    return BenchAnswer(decoder=decoder, prompt=prompt, accept_lengths=lengths, **(values | fields))


def timed(prompt: str, tokens: int, seconds: float, decoder: str = "d", **fields) -> Round:
    """A round of one prompt, of which a tenth of a second goes to the first token."""
    values = {"batch_size": 1, "seed": 0, "index": 0, "turn": 0, "prompts": [prompt], "cycles": tokens // 2}
    return Round(decoder=decoder, tokens=tokens, seconds=seconds, first_token_seconds=0.1, **(values | fields))


def report(answers: list[BenchAnswer], rounds: list[Round] | None = None, **setting) -> BenchReport:
    """A report of the draft `d` with 5 proposals; without rounds, each answer took a second and plain decoding two."""
    if rounds is None:
        rounds = []
        for index, one in enumerate(answers):
            rounds.append(timed(one.prompt, len(one.token_ids), 1.0, one.decoder, index=index, turn=one.turn))
            rounds.append(timed(one.prompt, len(one.token_ids), 2.0, PLAIN, index=index, turn=one.turn))
    said = {"target": "t", "dtype": "float32", "device": "cpu", "temperature": 0.0, "max_new_tokens": 9}
    return BenchReport(
        setting=said | setting,
        prompts=[AskedPrompt(id=name, turns=(f"what is {name}",)) for name in dict.fromkeys(a.prompt for a in answers)],
        decoders=[Decoder(name=PLAIN), Decoder(name="d", method="dflash", layers=1, block_size=6, proposals=5)],
        rounds=rounds,
        answers=answers,
    )
