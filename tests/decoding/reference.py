"""The plain way, one row and one token at a time, of what the engine does with tensors."""

import math

import torch

from draftsmith.decoding.sampling import SamplingOptions


def reference_distribution(logits: list[float], options: SamplingOptions) -> list[float]:
    """Temperature, then top-k, then top-p, then renormalised."""
    scaled = [value / options.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = order
    if options.top_k:
        kept = [token for token in order if scaled[token] >= scaled[order[min(options.top_k, len(order)) - 1]]]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total = sum(weights.values())
    nucleus: dict[int, float] = {}
    mass = 0.0
    for token in kept:
        if options.top_p < 1.0 and mass >= options.top_p:
            break
        nucleus[token] = weights[token]
        mass += weights[token] / total
    return [nucleus.get(token, 0.0) / sum(nucleus.values()) for token in range(len(scaled))]


def reference_draw(weights: list[float], uniform: float) -> int:
    """Inverse CDF."""
    threshold, mass = uniform * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > threshold:
            return token
    raise AssertionError("the weights are all zero")


def reference_verify(
    p: list[list[float]],
    proposed: list[int],
    q: list[list[float]],
    count: int,
    uniform: list[float],
    accept_uniform: list[float],
) -> list[int]:
    """The tokens that one row commits for proposals drawn from q."""
    committed: list[int] = []
    for slot, token in enumerate(proposed[:count]):
        if accept_uniform[slot] < min(1.0, p[slot][token] / q[slot][token]):
            committed.append(token)
            continue
        residual = [max(there - here, 0.0) for there, here in zip(p[slot], q[slot], strict=True)]
        return [*committed, reference_draw(residual, uniform[slot])]
    return [*committed, reference_draw(p[len(committed)], uniform[len(committed)])]


def plain_greedy(model: torch.nn.Module, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding by the model's own full forward over the whole text, once a token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
