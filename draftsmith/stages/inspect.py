"""Says what a directory of draftsmith holds."""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.costs import QWEN3_8B, costs, in_dimensions_of
from draftsmith.algorithms.registry import all_algorithms
from draftsmith.base.progress import Progress
from draftsmith.base.readable import readable_bytes
from draftsmith.bench.compare import Comparisons, compare
from draftsmith.bench.headline import estimate
from draftsmith.bench.records import read_report
from draftsmith.data.chat import tokenizer_fingerprint
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.manifest import MANIFEST_FILE, STORE_DTYPES
from draftsmith.features.reader import Store
from draftsmith.features.verify import verify_store
from draftsmith.run.recipe import Recipe, RunDirectory
from draftsmith.run.stamps import STAGES
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.location import locate
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.record import CHECKPOINTS, RECORD_FILE, read_record
from draftsmith.training.warm_start import read_warm_start


def inspect_directory(path: Path) -> RenderableType:
    """What a feature store, a training directory, a draft directory or a whole run directory is and holds.

    Raises `DraftsmithError` for anything else.
    """
    if not path.is_dir():
        raise DraftsmithError(f"there is no directory {path}; inspect a store, a run, a training or a draft directory")
    if (path / MANIFEST_FILE).is_file():
        return facts(f"feature store {path}", store_facts(path))
    if (path / RECORD_FILE).is_file():
        return facts(f"training {path}", training_facts(path))
    if (path / "config.json").is_file():
        return facts(f"draft {path}", draft_facts(path))
    if (path / STAGES).is_dir():
        return run_overview(path)
    raise DraftsmithError(
        f"{path} is none of draftsmith's directories: a feature store has {MANIFEST_FILE}, a training {RECORD_FILE}, a "
        f"draft config.json, a run {STAGES}/"
    )


def store_directory(path: Path) -> Path:
    """The feature store at `path`: the directory itself, or `features` of a run. Raises `DraftsmithError`."""
    for directory in (path, RunDirectory(path).features):
        if (directory / MANIFEST_FILE).is_file():
            return directory
    raise DraftsmithError(f"{path} is no finished feature store, and no run with one; name the directory of a store")


def verified_directory(path: Path, progress: Progress, say: Callable[[str], object]) -> Path:
    """The feature store at `path` (as `store_directory` finds it) after all of it was read: checksums, offsets, values.

    Raises `DraftsmithError` where something is damaged, after `say` got a line for each fault.
    """
    store = store_directory(path)
    faults = verify_store(store, progress)
    for fault in faults:
        say(f"damaged: {fault}")
    if faults:
        raise DraftsmithError(
            f"{store} has {len(faults)} faults; delete both files of a damaged shard and capture again"
        )
    return store


def sample_view(path: Path, sample_id: str, tokenizer: str | None = None) -> RenderableType:
    """One document of a store as text: what is supervised green and between brackets, the rest dim.

    tokenizer: where it lies; None: beside the target that the store names. Raises `DraftsmithError` where the store has
    no such document, or the tokenizer is missing or another than the store's.
    """
    store = Store.open(store_directory(path), features=())
    record = store[store.index_of(sample_id)]
    source = tokenizer or store.manifest.target.source
    location = locate(source)
    if not location.has_tokenizer:
        raise DraftsmithError(f"{source} has no tokenizer; name one with --tokenizer")
    decoder = AutoTokenizer.from_pretrained(location.name)
    stored, found = store.manifest.tokenizer, tokenizer_fingerprint(decoder)
    if stored is not None and stored.vocabulary_hash != found:
        raise DraftsmithError(
            f"the tokenizer of {source} has the vocabulary {found[:12]}, the store's had "
            f"{stored.vocabulary_hash[:12]}; name the one that the store was captured with (--tokenizer)"
        )
    text = Text()
    end = 0
    for supervised, run in groupby(record.loss_mask.tolist()):
        start, end = end, end + len(list(run))
        piece = decoder.decode(record.input_ids[start:end].tolist())
        text.append(f"⟦{piece}⟧" if supervised else piece, style="bold green" if supervised else "dim")
    count = int(record.loss_mask.sum())
    title = f"sample {sample_id}: {len(record.input_ids):,} tokens, {count:,} of them ⟦supervised⟧"
    return Group(Text(title), Text(), text)


def facts(title: str, rows: dict[str, Any]) -> Table:
    """A two-column table."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def store_facts(path: Path) -> dict[str, Any]:
    """Counts, layers, dtype and provenance of a feature store."""
    store = Store.open(path)
    manifest = store.manifest
    tokenizer = manifest.tokenizer
    return {
        "samples": f"{manifest.samples:,}",
        "tokens": f"{manifest.tokens:,} ({manifest.supervised_tokens:,} supervised)",
        "longest sample": f"{max(store.lengths):,} tokens",
        "bytes": readable_bytes(manifest.bytes),
        "shards": len(manifest.shards),
        "dtype": manifest.dtype,
        "tapped layers": f"{list(manifest.tap_ids)} ({manifest.tap_convention})",
        "final state": manifest.final_state or "not kept",
        "hidden size": manifest.hidden_size,
        "target": f"{manifest.target.source} {manifest.target.revision or ''}".strip(),
        "target layers, vocabulary": f"{manifest.target.num_layers}, {manifest.target.vocab_size:,}",
        "target config, weights": f"{manifest.target.config_hash[:12]}, {manifest.target.weights_hash[:12]}",
        "tokenizer, template": "not recorded"
        if tokenizer is None
        else f"{tokenizer.vocabulary_hash[:12]}, {(tokenizer.template_hash or 'none')[:12]}",
        "format version": manifest.version,
    }


def training_facts(path: Path) -> dict[str, Any]:
    """Method, shape, progress and checkpoints of a training directory."""
    record = read_record(path)
    checkpoints = RunCheckpoints(path / CHECKPOINTS)
    kept, best = checkpoints.all(), checkpoints.best()
    config = record.draft_config
    rows: dict[str, Any] = {
        "method": record.draft_section["algorithm"],
        "draft": _shape(DraftConfig.parse(config)),
        "tapped layers": list(config["target_layer_ids"]),
        "target": record.target["source"],
        "feature store": f"{record.store_directory} (index {record.store[:12]})",
        "checkpoints": ", ".join(f"step {c.position.step}" for c in kept) or "none yet",
    }
    if best is not None:
        scores = {name: value for name, value in (best.position.evaluation or {}).items() if isinstance(value, float)}
        rows["best"] = f"step {best.position.step}: " + ", ".join(f"{n} {v:.3f}" for n, v in scores.items())
    rows |= {f"train.{name}": value for name, value in record.options.items()}
    return rows


def draft_facts(path: Path) -> dict[str, Any]:
    """Method, shape, tensors and layout of a draft directory."""
    draft, checked = read_draft(path)
    config = checked.to_dict()
    parameters = sum(tensor.numel() for tensor in draft.tensors.values())
    stored = sum(tensor.numel() * tensor.element_size() for tensor in draft.tensors.values())
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in draft.tensors.values())
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "layout": draft.layout,
        "method": config["architecture"],
        **({"block size": config["block_size"]} if "block_size" in config else {}),
        **{name: config[name] for name in shape},
        **({"mask token": config["mask_token_id"]} if "mask_token_id" in config else {}),
        "tapped layers": f"{list(config['target_layer_ids'])} of {config['num_target_layers']}",
        "vocabulary": f"{config['vocab_size']:,}",
        "rope": config["rope"],
        "layer types": ", ".join(f"{count} {kind}" for kind, count in Counter(config["layer_types"]).items()),
        "tensors": f"{len(draft.tensors)}, {parameters:,} parameters",
        "dtype": ", ".join(f"{name} ({count})" for name, count in dtypes.items()),
        "bytes": readable_bytes(stored),
        **({"ignored tensors": ", ".join(draft.ignored)} if draft.ignored else {}),
        **({"notes": "\n".join(draft.notes)} if draft.notes else {}),
    }


def run_overview(path: Path) -> RenderableType:
    """The stages of a run directory, and what each of its parts holds."""
    parts: list[RenderableType] = []
    run = RunDirectory(path)
    for place, marker, detail in (
        (run.features, MANIFEST_FILE, store_facts),
        (run.training, RECORD_FILE, training_facts),
        (run.draft_directory, "config.json", draft_facts),
    ):
        if (place / marker).is_file():
            parts.append(facts(f"{place.name}: {place}", detail(place)))
    files = {
        file.name: readable_bytes(file.stat().st_size)
        for file in (run.answers, run.bench_json, run.bench_lines, run.bench_page, run.tuned)
        if file.is_file()
    }
    stages = sorted(stamp.stem for stamp in (path / STAGES).glob("*.json"))
    return Group(facts(f"run {path}", {"stages": ", ".join(stages), **files}), *parts)


def _shape(config: DraftConfig) -> str:
    block = "" if config.block is None else f", block {config.block.size}"
    return f"{config.num_hidden_layers} layers, hidden {config.hidden_size}{block}"


def algorithm_table(recipe: Recipe | None = None) -> RenderableType:
    """Every method, and what it costs in the dimensions of a recipe's draft (None: the published one of Qwen3-8B).

    Reads no weights. Raises `DraftsmithError` as `draft_config` does, and where a method's head does not fit.
    """
    base = QWEN3_8B if recipe is None else recipe_draft(recipe)
    dtype = STORE_DTYPES["bfloat16" if recipe is None else recipe.capture.dtype]
    of = "Qwen3-8B" if recipe is None else recipe.target.path
    table = Table(title=f"Methods, for a draft of {of}: {_shape(base)}", title_justify="left", show_lines=False)
    table.add_column("draft.algorithm", no_wrap=True)
    for column in ("bytes a token", "proposals", "parameters", "its own"):  # 80 columns hold them whole
        table.add_column(column, justify="right", no_wrap=True)
    about = [Text()]
    for method in all_algorithms():
        cost = costs(method, in_dimensions_of(base, method), dtype)
        numbers = (cost.bytes_per_token, cost.proposals, cost.parameters, cost.extra_parameters)
        table.add_row(method.name, *(f"{number:,}" for number in numbers))
        about.append(Text(f"{method.name}: {method.summary} ({method.paper})"))
    return Group(table, *about)


def recipe_draft(recipe: Recipe) -> DraftConfig:
    """The configuration of the draft that a recipe describes, from its target's configuration alone."""
    source = recipe.draft.init_from
    checkpoint = None if source is None else read_warm_start(source).config
    return draft_config(recipe.draft, TargetInfo.load(recipe.target), checkpoint)


def comparison(first: Path, second: Path, first_draft: str | None, second_draft: str | None) -> RenderableType:
    """Two reports of `bench` held against each other; the names say which draft, where a report has several.

    Raises `DraftsmithError` for reports that cannot be read or not be compared.
    """
    return comparison_table(compare(read_report(first), read_report(second), first_draft, second_draft))


def comparison_table(found: Comparisons) -> RenderableType:
    """Two drafts' figures side by side, with the change and what may be said of it."""
    table = Table(title=f"{found.second} against {found.first}", title_justify="left", box=box.SIMPLE)
    table.add_column("figure")  # 80 columns hold all but the longest name of a figure, which wraps
    for column in ("batch", "A", "B", "change (95 %)", "pairs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in found.rows:
        change = estimate(row.change, 2, "" if row.neutral == 0 else "x")
        pairs = (f"{row.first:,.2f}", f"{row.second:,.2f}", change, str(row.units))
        table.add_row(row.figure, str(row.batch_size), *pairs, row.verdict)
    return Group(table, *(f"note: {note}" for note in found.notes))
