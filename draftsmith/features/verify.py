"""Reading a whole store to find out what of it is damaged."""

from pathlib import Path

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.features.encoding import finite_rows
from draftsmith.features.files import check_file, open_safetensors
from draftsmith.features.manifest import ShardEntry, StoreError
from draftsmith.features.reader import Store
from draftsmith.features.shards import checksum
from draftsmith.features.tables import ShardTokens


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
    if faults:
        return faults
    return _feature_faults(store, shard, tokens)


def _feature_faults(store: Store, shard: ShardEntry, tokens: ShardTokens) -> list[str]:
    name = shard.features_file.name
    file = open_safetensors(store.directory / name)
    faults: list[str] = []
    for feature, (width, dtype) in store.manifest.layout.stored.items():
        tensor = file.get_tensor(feature)
        if tensor.shape != (shard.tokens, width) or tensor.dtype != dtype:
            faults.append(
                f"{name}: {feature} is {tensor.dtype} {list(tensor.shape)}, not {dtype} [{shard.tokens}, {width}]"
            )
            continue
        if not finite_rows({feature: tensor}).all():
            faults.append(f"{name}: {feature} holds NaN or Inf")
        if feature not in tokens.checksums:
            faults.append(f"{shard.tokens_file.name}: it lists no CRC-32 of {feature}")
            continue
        documents = zip(tokens.sample_ids, tensor.split(tokens.lengths), tokens.checksums[feature], strict=True)
        wrong = [sample_id for sample_id, rows, listed in documents if checksum(rows) != listed]
        if wrong:
            faults.append(
                f"{name}: {feature} of {len(wrong)} samples has another CRC-32 than listed, {wrong[0]!r} first"
            )
    return faults
