"""Runs other projects' drafters on directories that draftsmith wrote: inputs come and outputs go as files.

    python foreign.py JOBS

JOBS holds a directory for each job: `job.json` (the package, the architecture), `draft/`, `inputs.safetensors`. Written
beside them: `outputs.safetensors` and, once, `versions.json`. Nothing of draftsmith is imported here.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional


def speculators(directory: Path, architecture: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """`SpeculatorModel.from_pretrained`, and one block after the context; the ends are those of the file."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(directory, config=config).eval()
    size, context = config.block_size, given["features"].shape[1]
    length = context + size + 1  # a block is not anchored in the last block's room
    features = torch.cat((given["features"], torch.randn(1, length - context, given["features"].shape[2])), dim=1)
    ids = torch.zeros(1, length, dtype=torch.int64)
    ids[0, context] = given["anchor"][0]
    only_anchor = (torch.arange(length) == context).long()[None]
    hidden, logits, *_ = model._backbone_forward(
        features,
        ids,
        only_anchor,
        torch.zeros(1, length, features.shape[2] // len(config.aux_hidden_state_layer_ids)),
        torch.zeros(1, length, dtype=torch.int64),
        max_anchors=1,
    )
    outputs = {"hidden": hidden, "logits": logits}
    if architecture == "dspark":
        previous = given["previous"]
        embedded = model.markov_head.prev_embeddings(previous)
        bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        outputs["corrected"] = logits + bias
        if model.confidence_head is not None:
            read = torch.cat((hidden, embedded), -1) if config.confidence_head_with_markov else hidden
            outputs["confidence"] = model.confidence_head(read)
    if architecture == "dflash2":
        path, last = [], given["anchor"]
        for slot in range(1, size):
            ids, scores = model.candidate_selector.select(logits[:, slot], hidden[:, slot], last)
            last = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(last)
        outputs["path"] = torch.stack(path, dim=1)
    return outputs


def modelopt(directory: Path, architecture: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module of Model-Optimizer that this architecture has, with a strict `load_state_dict`."""
    from modelopt.torch.speculative.plugins.modeling_dflash import DFlashModule
    from modelopt.torch.speculative.plugins.modeling_domino import DominoModule
    from modelopt.torch.speculative.plugins.modeling_dspark import DSparkModule
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    written = json.loads((directory / "config.json").read_text())
    config = Qwen3Config(**{name: value for name, value in written.items() if name != "dflash_config"})
    for name, value in written["dflash_config"].items():
        setattr(config, name, value)
    config.attention_sink_bias = bool(getattr(config, "attention_sink_bias", False))
    config._attn_implementation = "eager"
    module = {"dflash": DFlashModule, "domino": DominoModule, "dspark": DSparkModule}[architecture](config).eval()
    module.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    # The module makes it on first use, with an argument that newer releases of transformers no longer have.
    module.rotary_emb = Qwen3RotaryEmbedding(config)
    positions = torch.arange(given["features"].shape[1] + given["embeddings"].shape[1])[None]
    hidden = module(given["embeddings"], given["features"], positions)
    logits = functional.linear(hidden, given["head"])
    outputs = {"hidden": hidden, "logits": logits}
    if architecture == "dspark":
        outputs["corrected"] = logits + module.compute_markov_bias(given["previous"], hidden)
        if module.use_confidence_head:
            outputs["confidence"] = module.compute_confidence_logits(given["previous"], hidden)
    if architecture == "domino":
        states, _ = module.prefix_gru(functional.embedding(given["previous"], given["embedding"]))
        outputs["corrected"] = logits + module.embed_proj(torch.cat((hidden, states), -1))
    return outputs


def dflash(directory: Path, architecture: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """z-lab's own package: `from_pretrained`, and DFlash 2's path."""
    import dflash.model as zlab

    model_class = {"dflash": zlab.DFlashDraftModel, "dflash2": zlab.DFlash2DraftModel}[architecture]
    model = model_class.from_pretrained(directory).eval()
    positions = torch.arange(given["features"].shape[1] + given["embeddings"].shape[1])[None]
    hidden = model(position_ids=positions, noise_embedding=given["embeddings"], target_hidden=given["features"])
    head = torch.nn.Linear(given["head"].shape[1], given["head"].shape[0], bias=False)
    head.weight = torch.nn.Parameter(given["head"])
    outputs = {"hidden": hidden, "logits": model.compute_logits(hidden, head)}
    if architecture == "dflash2":
        proposed = model.propose(hidden[:, 1:], given["anchor"], head, 0.0)
        outputs["path"] = proposed[0] if isinstance(proposed, tuple) else proposed
    return outputs


@torch.no_grad()
def main(jobs: Path) -> None:
    """Every job below `jobs`."""
    run = {"speculators": speculators, "nvidia-modelopt": modelopt, "dflash": dflash}
    for file in sorted(jobs.glob("*/job.json")):
        job = json.loads(file.read_text())
        torch.manual_seed(0)
        outputs = run[job["package"]](
            file.parent / "draft", job["architecture"], load_file(file.parent / "inputs.safetensors")
        )
        save_file({n: t.detach().contiguous() for n, t in outputs.items()}, file.parent / "outputs.safetensors")
    names = (*run, "torch", "transformers")
    (jobs / "versions.json").write_text(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
