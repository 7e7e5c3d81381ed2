"""Reading a whole store to find out what of it is damaged."""

from pathlib import Path

from draftsmith.features.encoding import finite_rows
from draftsmith.features.files import check_file, open_safetensors
from draftsmith.features.manifest import ShardEntry, StoreError, StoreManifest
from draftsmith.features.reader import Store
from draftsmith.features.tables import ShardTokens
from draftsmith.progress import Progress, SilentProgress


def verify_store(directory: Path | str, progress: Progress | None = None) -> list[str]:
    """Check every checksum, offset and value range of a store; returns one line a fault, none for a sound store."""
    progress = progress or SilentProgress()
    try:
        store = Store.open(directory)
    except StoreError as error:
        return [str(error)]
    faults: list[str] = []
    with progress.stage("verify", total=store.manifest.bytes, unit="bytes") as stage:
        stage.advance(store.manifest.index.bytes)  # read and checked by opening
        first = 0
        for shard in store.manifest.shards:
            faults += _shard_faults(store, shard, first)
            first += shard.samples
            stage.advance(shard.tokens_file.bytes + shard.features_file.bytes)
    return faults


def _shard_faults(store: Store, shard: ShardEntry, first: int) -> list[str]:
    faults: list[str] = []
    for entry in (shard.features_file, shard.tokens_file):
        try:
            check_file(store.directory, entry)
        except StoreError as error:
            faults.append(str(error))
    if faults:
        return faults
    try:
        tokens = ShardTokens.read(store.directory / shard.tokens_file.name)
    except StoreError as error:
        return [str(error)]
    name = shard.tokens_file.name
    documents = slice(first, first + shard.samples)
    if tokens.lengths != store.lengths[documents]:
        faults.append(f"{name}: its offsets give other document lengths than the index")
    if tokens.sample_ids != store.sample_ids[documents]:
        faults.append(f"{name}: its ids are others than those of the index")
    if tokens.input_ids.shape != (shard.tokens,):
        faults.append(f"{name}: it holds {tokens.input_ids.shape[0]} tokens, not {shard.tokens}")
    vocabulary = store.manifest.target.vocab_size
    if int(tokens.input_ids.min()) < 0 or int(tokens.input_ids.max()) >= vocabulary:
        faults.append(f"{name}: token ids outside [0, {vocabulary})")
    if int(tokens.loss_mask.max()) > 1:
        faults.append(f"{name}: loss_mask holds values other than 0 and 1")
    return faults + _feature_faults(store.manifest, store.directory, shard)


def _feature_faults(manifest: StoreManifest, directory: Path, shard: ShardEntry) -> list[str]:
    file = open_safetensors(directory / shard.features_file.name)
    faults: list[str] = []
    for name, (width, dtype) in manifest.layout.stored.items():
        tensor = file.get_tensor(name)
        if tensor.shape != (shard.tokens, width) or tensor.dtype != dtype:
            faults.append(
                f"{shard.features_file.name}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"not {dtype} [{shard.tokens}, {width}]"
            )
        elif not finite_rows({name: tensor}).all():
            faults.append(f"{shard.features_file.name}: {name} holds NaN or Inf")
    return faults
