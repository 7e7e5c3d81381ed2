"""Draft directories from strangers: whatever their files are and say, a refusal, at once, before a network is made."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafts.backbone import Backbone
from draftsmith.drafts.convert import convert
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.export.fingerprint import directory_fingerprint
from draftsmith.layouts import LayoutError
from draftsmith.stages.inspect import draft_facts
from draftsmith.training.warm_start import read_warm_start
from tests.layouts.drafts import HEADS, simple_draft, target_ends

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WRITTEN = [(architecture, "zlab") for architecture in sorted(HEADS)]
WRITTEN += [(architecture, "speculators") for architecture in ("dflash", "dflash2", "dspark")]


@contextmanager
def no_hang(seconds: int = 20) -> Iterator[None]:
    """Ends a read that would never end."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


Files = dict[str, bytes]


class Written(dict[tuple[str, str], Files]):
    """(architecture, layout) -> the files of a sound draft."""

    def __repr__(self) -> str:  # shown with every failing example
        return "Written(...)"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The files of a sound draft of every architecture, in the layouts that strangers write."""
    root, found = tmp_path_factory.mktemp("written"), Written()
    for architecture, layout in WRITTEN:
        directory = root / f"{architecture}-{layout}"
        simple_draft(architecture).save(directory, layout, target=target_ends())
        found[architecture, layout] = {path.name: path.read_bytes() for path in directory.iterdir()}
    return found


def put(files: Files, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def plain(written: Written, tmp_path: Path) -> Path:
    """A sound DFlash draft."""
    return put(written["dflash", "zlab"], tmp_path / "draft")


def read_all(directory: Path) -> list[str]:
    """Reads a draft in every way that a stranger's may be read, each of which must refuse it; what they say."""
    ways = (Draft.load, lambda path: read_warm_start(str(path)), draft_facts, directory_fingerprint)
    said = []
    for read in ways:
        with no_hang(), pytest.raises(DraftsmithError) as raised:
            read(directory)
        said.append(str(raised.value))
    with no_hang(), pytest.raises(DraftsmithError) as raised:
        convert(directory, directory.parent / "converted", "zlab", allow_pickle=True)
    assert not (directory.parent / "converted").exists()
    return [*said, str(raised.value)]


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("a network is made of sizes that nobody checked")

    monkeypatch.setattr(Backbone, "__init__", build)


def rewrite(directory: Path, **fields: Any) -> None:
    """Sets fields of a config.json wherever they stand, at the top level where they stand nowhere."""
    config = json.loads((directory / "config.json").read_text())
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for name, value in fields.items():
        for part in [part for part in parts if name in part] or [config]:
            part[name] = value
    (directory / "config.json").write_text(json.dumps(config))


# --- sizes ------------------------------------------------------------------------------------------------------------

SIZES: dict[str, list[str]] = {
    "dflash": [],
    "dflash2": ["conv_kernel_size", "conv_group_size", "selector_rank"],
    "domino": ["gru_hidden_dim", "emb_dim"],
    "dspark": ["markov_rank"],
}
SHARED = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"]


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("value", [10**9, 2**31 - 1, 2**63, 10**400])
@pytest.mark.parametrize(("architecture", "layout"), WRITTEN)
def test_sizes_are_held_against_the_weights_first(
    written: Written, tmp_path: Path, architecture: str, layout: str, value: int
) -> None:
    for name in (*SHARED, *SIZES[architecture], "num_hidden_layers", "block_size"):
        directory = put(written[architecture, layout], tmp_path / "draft")
        rewrite(directory, **{name: value})
        for said in read_all(directory):
            assert name in said
            assert len(said) < 10_000


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("layers", [1000, 100_000])
def test_layers_that_the_weights_do_not_hold(plain: Path, layers: int) -> None:
    rewrite(plain, num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    assert all(f"num_hidden_layers is {layers}, and the weights hold 2 layers" in said for said in read_all(plain))


def test_other_numbers_that_no_draft_has(plain: Path) -> None:
    good = (plain / "config.json").read_text()
    for name in ("mask_token_id", "vocab_size", "max_position_embeddings", "num_target_layers", "sliding_window"):
        for value in (2**31, 2**64, -(2**64), 10**4000):
            rewrite(plain, **{name: value}, layer_types=["sliding_attention"] * 2, use_sliding_window=True)
            assert all(name in said for said in read_all(plain))
            (plain / "config.json").write_text(good)
    for name in ("rms_norm_eps", "initializer_range", "output_multiplier", "final_logit_softcapping"):
        for number in ("1" + "0" * 400, "-1e999", "NaN", "1" + "0" * 5000):
            (plain / "config.json").write_text(good.replace("{", f'{{"{name}_": 0, ', 1))
            content = json.loads(good)
            content.pop(name, None)
            text = json.dumps(content)
            (plain / "config.json").write_text(text.replace("{", f'{{"{name}": {number}, ', 1))
            for said in read_all(plain):
                assert name in said or "is not valid JSON" in said
            (plain / "config.json").write_text(good)


def test_many_taps(plain: Path) -> None:
    rewrite(plain, target_layer_ids=list(range(200_000)), num_target_layers=200_000)
    assert all("the width of the features" in said for said in read_all(plain))
    rewrite(plain, target_layer_ids=[7] * 200_000)
    assert all("repeats [7]" in said for said in read_all(plain))
    assert all(len(said) < 10_000 for said in read_all(plain))


def test_many_tensors(plain: Path) -> None:
    save_file({f"layers.{i}.x": torch.zeros(1) for i in range(20_001)}, plain / WEIGHTS)
    assert all("holds 20,001 tensors; allowed: up to 20,000" in said for said in read_all(plain))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, INDEX, "shard.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device or socket"])
def test_what_is_no_regular_file_is_not_read(plain: Path, name: str, kind: str) -> None:
    if name == "shard.safetensors":
        (plain / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    if name != "config.json":
        (plain / WEIGHTS).unlink()
    place = plain / name
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    with no_hang(), pytest.raises(LayoutError, match=f"{name} is a {kind}; allowed: a regular file"):
        Draft.load(plain, allow_pickle=True)


def test_a_pipe_beside_the_draft_is_no_matter(plain: Path) -> None:
    os.mkfifo(plain / "notes.txt")
    with no_hang():
        Draft.load(plain)


def test_a_configuration_of_gigabytes_is_not_read(plain: Path) -> None:
    with open(plain / "config.json", "r+b") as file:
        file.truncate(2**40)  # a hole: it takes no room
    assert all("config.json has 1,099,511,627,776 bytes; allowed: up to" in said for said in read_all(plain))


@pytest.mark.parametrize("depth", [33, 400, 200_000])
def test_a_configuration_that_is_nested_deeply(plain: Path, depth: int) -> None:
    content = (plain / "config.json").read_text().rstrip().rstrip("}")
    (plain / "config.json").write_text(f'{content}, "deep": {"[" * depth}{"]" * depth}}}')
    assert all("nested more than 32 levels deep" in said or "not valid JSON" in said for said in read_all(plain))


def test_an_integer_of_thousands_of_digits_is_not_json(plain: Path) -> None:
    content = (plain / "config.json").read_text().rstrip().rstrip("}")
    (plain / "config.json").write_text(f'{content}, "n": 1{"0" * 5000}}}')
    assert all("config.json is not valid JSON" in said for said in read_all(plain))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(plain: Path) -> None:
    for name in ("config.json", WEIGHTS):
        (plain / name).chmod(0)
        assert all("cannot be read" in said for said in read_all(plain))
        (plain / name).chmod(0o600)


# --- whatever they say ------------------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.sampled_from([0, -1, 10**9, 2**31, 2**63, 10**30]) | st.floats()
WORDS = st.text(max_size=5) | st.sampled_from(["full_attention", "sliding_attention", "yarn", "bfloat16", "rnn"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


def places(config: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a configuration: keys and indices on the way to it."""
    inner = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [place for key, value in inner for place in ((*above, key), *places(value, (*above, key)))]


def either_way(directory: Path, strict: bool) -> None:
    """A draft is read, or refused by name; nothing else happens."""
    said = "read"
    try:
        with no_hang():
            Draft.load(directory, strict=strict)
    except DraftsmithError as error:
        said = str(error)
    assert 0 < len(said) < 20_000


RELAXED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("architecture", "layout"), WRITTEN)
@RELAXED
@given(data=st.data())
def test_any_value_in_any_place(
    written: Written,
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    layout: str,
    data: st.DataObject,
) -> None:
    files = written[architecture, layout]
    config = json.loads(files["config.json"])
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(config)))
        part = config
        for step in way:
            part = part[step]
        if data.draw(st.integers(0, 9)) == 0 and isinstance(part, dict):
            del part[last]
        else:
            part[last] = data.draw(JSON)
    directory = put({**files, "config.json": json.dumps(config).encode()}, tmp_path_factory.mktemp("any"))
    either_way(directory, data.draw(st.booleans()))


SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize(("architecture", "layout"), WRITTEN)
@settings(RELAXED, max_examples=40)
@given(data=st.data())
def test_any_tensor_under_any_name(
    written: Written,
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    layout: str,
    data: st.DataObject,
) -> None:
    directory = put(written[architecture, layout], tmp_path_factory.mktemp("any"))
    tensors: dict[str, Tensor] = load_file(directory / WEIGHTS)
    names = [*tensors, "embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "confidence_head.proj.weight"]
    for _ in range(data.draw(st.integers(1, 2))):
        shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(DTYPES))
        tensors[data.draw(st.sampled_from(names))] = torch.ones(shape).to(dtype)
    save_file(tensors, directory / WEIGHTS)
    either_way(directory, data.draw(st.booleans()))
