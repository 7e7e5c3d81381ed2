"""How many rows of W2 the bound of exact pruning leaves on a trained head, over real blocks of real answers.

    python benchmarks/pruning_shares.py TARGET DRAFT PROMPTS [--rows 24] [--tokens 64] [--device cuda]

DRAFT: a directory with a Domino or DSpark draft for TARGET; PROMPTS: JSON lines with `turns` or `messages`, of which
the first turn is asked. The engine decodes greedily, row by row of a batch, and every step's base logits and latent are
put to the rule of `kernels.rollout.low_rank_pruning`, and to tighter bounds that it might use instead. One JSON line.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import Draft, Target, generate
from draftsmith.algorithms.search import BlockSearch
from draftsmith.decoding.options import EngineOptions
from draftsmith.kernels.rollout.low_rank_pruning import leaders
from draftsmith.kernels.rollout.row_bounds import row_bounds, share_beside, upper_bounds
from draftsmith.kernels.vocabulary.keys import key_ids

LEADING = (16, 32)
BITS = (8, 4)


class Shares:
    """Sums over steps; `record` takes one step of all rows of a batch."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.weight: Tensor | None = None
        self.parts: dict[str, Any] = {}

    def prepare(self, weight: Tensor) -> None:
        """What bounds need of W2 [V, E], once a matrix."""
        if self.weight is weight:
            return
        self.weight = weight
        wide = weight.float()
        self.parts = {
            "bounds": row_bounds(weight),
            "norms": wide.norm(dim=-1),
            "wide": wide,
            "share beside": share_beside(weight),
        }
        directions = torch.linalg.svd(wide.T @ wide).Vh  # [E, E], the leading ones first
        for count in LEADING:
            if count < wide.shape[1]:
                lead = directions[:count]
                inside = wide @ lead.T
                self.parts[f"{count} leading directions"] = (lead, inside, (wide - inside @ lead).norm(dim=-1))
        for bits in BITS:
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
            rounded = (wide / scale).round() * scale
            self.parts[f"copy of {bits} bits"] = (rounded, (wide - rounded).norm(dim=-1))

    def record(self, base: Tensor, weight: Tensor, latent: Tensor) -> None:
        """base [batch, V], weight [V, E], latent [batch, E]."""
        self.prepare(weight)
        wide, b, u = self.parts["wide"], base.float(), latent.float()
        change = u @ wide.T
        scores = b + change
        firsts = leaders(base).firsts
        lower = scores.gather(-1, firsts.long()).amax(-1, keepdim=True)
        length = u.norm(dim=-1, keepdim=True)
        bounds = upper_bounds(base, self.parts["bounds"], latent)
        left = {"bounds": bounds >= lower, "bounds, were the best known": bounds >= scores.amax(-1, keepdim=True)}
        left["norms"] = b + length * self.parts["norms"] >= lower
        for name, kept in self.parts.items():
            if "leading" in name:
                lead, inside, outside = kept
                along = u @ lead.T
                across = (u - along @ lead).norm(dim=-1, keepdim=True)
                left[name] = b + along @ inside.T + across * outside >= lower
            elif "copy" in name:
                left[name] = b + u @ kept[0].T + length * kept[1] >= lower
        for name, mask in left.items():
            self.sums[f"share left: {name}"] += float(mask.float().mean(-1).sum())
        for name in ("norms", "bounds"):
            left_behind = left[name].scatter(-1, leaders.ids.long(), False)
            self.sums[f"steps with nothing but leaders: {name}"] += float((~left_behind.any(-1)).sum())
            self.sums[f"share left over all rows of the batch: {name}"] += float(
                left[name].any(0).float().mean()
            ) * len(b)
        best = scores.argmax(-1, keepdim=True)
        self.sums["token changed by the head"] += float((best != b.argmax(-1, keepdim=True)).sum())
        self.sums["token among the 4 likeliest"] += float((leaders.firsts[:, :4] == best).any(-1).sum())
        self.sums["spread of base"] += float(b.std(-1).sum())
        self.sums["top of base over its mean"] += float((b.amax(-1) - b.mean(-1)).sum())
        self.sums["spread of the correction"] += float(change.std(-1).sum())
        self.sums["mean bound on the correction"] += float((length * self.parts["norms"]).mean(-1).sum())
        self.sums["share of W2 beside its directions"] += self.parts["share beside"] * len(base)
        self.steps += len(base)

    def means(self) -> dict[str, float]:
        """Of every sum, a step."""
        return {name: total / max(1, self.steps) for name, total in self.sums.items()}


def prompts_of(path: Path, target: Target, count: int) -> list[list[int]]:
    """The first turn of the last `count` lines, as the target's chat template writes it."""
    prompts = []
    for line in path.read_text().splitlines()[-count:]:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["messages"][0]["content"]
        messages = [{"role": "user", "content": text}]
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts.append(list(ids))
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    # By the target's own code: nothing is timed.
    target = Target.load(arguments.target, dtype=arguments.dtype, device=arguments.device, fuse="off")
    draft = Draft.load(arguments.draft, dtype=arguments.dtype, device=arguments.device)
    shares = Shares()
    choose = BlockSearch.choose

    def recording(block: BlockSearch, step: int, latent: Tensor | None, *, of_previous: bool = False) -> None:
        if latent is not None:
            rows = latent[key_ids(block.keys[step])] if of_previous else latent
            shares.record(block.base[:, step], block.weight, rows)
        choose(block, step, latent, of_previous=of_previous)

    setattr(BlockSearch, "choose", recording)  # noqa: B010
    options = EngineOptions(graphs="off", proposer={"rollout": "pruned"})
    prompts = prompts_of(arguments.prompts, target, arguments.rows)
    lengths = []
    for first in range(0, len(prompts), arguments.batch):
        batch = prompts[first : first + arguments.batch]
        for answer in generate(target, draft, batch, max_new_tokens=arguments.tokens, options=options):
            lengths += answer.accept_lengths
    line = {
        "part": "share left", "method": draft.config.architecture, "steps": shares.steps,
        "vocabulary": draft.config.vocab_size, "accept_length": sum(lengths) / len(lengths), **shares.means(),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
