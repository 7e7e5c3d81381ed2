"""What is written is what other software's loaders look for, by the tables of `loaders`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from draftsmith.drafts.directory import family
from draftsmith.layouts import LayoutError
from draftsmith.layouts.consumers import SGLANG, SPECULATORS, VLLM, VLLM_SPECULATORS, lookup
from tests.layouts.drafts import FULL, HEADS, SLIDING, simple_draft, target_ends
from tests.layouts.loaders import BACKBONE, MARKOV, READERS, SINKS, Reader

OPTIONS: list[dict[str, Any]] = [
    {},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 4},
    {"rope": {"rope_theta": 7e5, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}},
]


def find(config: dict[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        assert part in value, f"{path} is not written"
        value = value[part]
    return value


def is_written(config: dict[str, Any], path: str) -> bool:
    *sections, name = path.split(".")
    return name in (find(config, ".".join(sections)) if sections else config)


def wanted(config: dict[str, Any], means: str) -> Any:
    """The value that a table's right-hand side stands for."""
    if means in ("true", "false") or means.startswith('"'):
        return json.loads(means)
    name, _, added = means.partition(" + ")
    value = lookup(config, name)
    return [layer + int(added) for layer in value] if added else value


def mismatches(reader: Reader, directory: Path, config: dict[str, Any]) -> list[str]:
    """What a loader would not find, or find otherwise than it was meant."""
    loader = reader.loaders[config["architecture"]]
    written = json.loads((directory / "config.json").read_text())
    wrong = [] if written["architectures"][0] in loader.class_names else ["architectures"]
    wrong += [path for path, means in loader.reads.items() if find(written, path) != wanted(config, means)]
    wrong += [path for path in loader.refuses if is_written(written, path)]
    layers = range(config["num_hidden_layers"])
    named = {name.format(layer=layer) for name in (*BACKBONE, *loader.tensors) for layer in layers}
    held = set(load_file(directory / "model.safetensors"))
    optional = re.compile(r"(markov_head\.)?(gate|joint)_proj\.|confidence_(head\.)?proj\.")
    if config["head"].get("markov_rank") == 0:
        named -= {*MARKOV}
    wrong += sorted(named - held)
    return wrong + sorted(name for name in held - named if not optional.match(name))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "sliding", "yarn"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.consumer.name}-{reader.layout}")
@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_loaders_find_what_they_look_for(
    tmp_path: Path, architecture: str, reader: Reader, options: dict[str, Any]
) -> None:
    draft = simple_draft(architecture, num_taps=3, **options)
    config = draft.config.to_dict()
    if reader.consumer.faults(config, family()):
        assert architecture not in reader.loaders
        return
    draft.save(tmp_path / "draft", reader.layout, target=target_ends())
    without_layers = {"layer_types"} if reader.layout == "modelopt" else set()
    assert set(mismatches(reader, tmp_path / "draft", config)) <= without_layers
    # The comparison sees a wrong value: the same files, held against a draft that taps other layers.
    other = {**config, "target_layer_ids": [4, 0, 1], "mask_token_id": 3}
    assert len(mismatches(reader, tmp_path / "draft", other)) == 2


@pytest.mark.parametrize("head", range(len(HEADS["dspark"])))
def test_every_dspark_head_is_found(tmp_path: Path, head: int) -> None:
    draft = simple_draft("dspark", head)
    kind, rank = (draft.config.to_dict()["head"][name] for name in ("markov_head_type", "markov_rank"))
    for reader in READERS[:4]:
        consumer, faults = reader.consumer, []
        if consumer in (VLLM, VLLM_SPECULATORS) and kind != "vanilla":
            faults = [f"head.markov_head_type is {kind!r}; vllm 0.32.0 computes 'vanilla' only"]
        if consumer is SGLANG and rank == 0:
            faults = ["head.markov_rank is 0; sglang 0.5.23 computes 1 or more only"]
        assert consumer.faults(draft.config.to_dict(), family()) == faults
        if faults and reader.layout == "sglang":
            with pytest.raises(LayoutError, match=re.escape(faults[0])):
                draft.save(tmp_path / reader.layout, reader.layout)
            continue
        draft.save(tmp_path / reader.layout, reader.layout, target=target_ends())
        assert mismatches(reader, tmp_path / reader.layout, draft.config.to_dict()) == []


def test_sinks_are_where_loaders_want_them(tmp_path: Path) -> None:
    draft = simple_draft("dflash", attention_sinks=True, layer_types=(FULL, SLIDING), sliding_window=4)
    draft.save(tmp_path / "draft")
    (vllm,) = (reader for reader in READERS if reader.consumer is VLLM)
    assert mismatches(vllm, tmp_path / "draft", draft.config.to_dict()) == [SINKS.format(layer=i) for i in range(2)]
    written = json.loads((tmp_path / "draft/config.json").read_text())
    assert written["dflash_config"]["attention_sink_bias"] is True


def test_there_is_a_loader_of_every_architecture_that_is_not_refused() -> None:
    for reader in READERS:
        assert set(reader.loaders) == set(reader.consumer.only(family()))
    assert set(SPECULATORS.only(family())) == set(VLLM_SPECULATORS.only(family()))


def test_tables_name_their_version() -> None:
    for consumer in (*(reader.consumer for reader in READERS), SPECULATORS):
        assert re.fullmatch(r"\d+\.\d+\.\d+", consumer.version)
