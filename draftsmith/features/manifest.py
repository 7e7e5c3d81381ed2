"""The manifest of a feature store: what it holds, of which target, and which files make it up (docs/store.md)."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from draftsmith.base.dtypes import DTYPES
from draftsmith.errors import DraftsmithError, differences
from draftsmith.features.schema import FP8, CaptureLayout

MANIFEST_FILE = "manifest.json"
FORMAT: Final = "draftsmith-features"
VERSION: Final = 1
TAP_CONVENTION: Final = "0-based decoder layer; residual stream after the layer, before any final norm"
FINAL_STATE_CONVENTION: Final = "post_norm"

StoreDtype = Literal["bfloat16", "float32", "fp8"]
STORE_DTYPES = {name: FP8 if name == "fp8" else DTYPES[name] for name in get_args(StoreDtype)}

# A bare file name: nothing in a manifest can name a path outside its directory.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class StoreError(DraftsmithError):
    """A feature store that is missing, damaged, unfinished or of an unknown kind."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetIdentity(_Entry):
    """Which target the features are of.

    `source` and `revision` say where it was loaded from and may change when a model moves; `config_hash` (its shape),
    `weights_hash` (a sample of its output head) and `layers_hash` (a sample of its layers; None: not known, for models
    in memory, on the hub, and of older stores) are what two equal targets share.
    """

    source: str
    revision: str | None
    config_hash: Sha256
    weights_hash: Sha256
    layers_hash: Sha256 | None = None
    vocab_size: Positive
    num_layers: Positive

    def beside(self, other: "TargetIdentity") -> "TargetIdentity":
        """This identity as it is compared with another: what only one of the two knows is no difference."""
        if None in (self.layers_hash, other.layers_hash):
            return self.model_copy(update={"layers_hash": other.layers_hash})
        return self


class TokenizerIdentity(_Entry):
    """Which tokenizer and chat template made the token ids; `template_hash` is None where no template was used."""

    vocabulary_hash: Sha256
    template_hash: Sha256 | None


class StoreHeader(_Entry):
    """What a store holds, known before the first record: the part of the manifest that a resumed capture must match."""

    format: Literal["draftsmith-features"] = FORMAT
    version: Literal[1] = VERSION
    target: TargetIdentity
    tokenizer: TokenizerIdentity | None
    tap_ids: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    tap_convention: Literal["0-based decoder layer; residual stream after the layer, before any final norm"] = (
        TAP_CONVENTION
    )
    final_state: Literal["post_norm"] | None
    hidden_size: Positive
    dtype: StoreDtype

    @classmethod
    def for_layout(
        cls, layout: CaptureLayout, target: TargetIdentity, tokenizer: TokenizerIdentity | None
    ) -> "StoreHeader":
        """The header of a store of `layout`. Raises `DraftsmithError` for a dtype that stores cannot hold."""
        names = {dtype: name for name, dtype in STORE_DTYPES.items()}
        if layout.dtype not in names:
            allowed = ", ".join(STORE_DTYPES)
            raise DraftsmithError(f"capture.dtype is {layout.dtype}; a feature store holds one of {allowed}")
        return StoreHeader(
            target=target,
            tokenizer=tokenizer,
            tap_ids=layout.tap_ids,
            final_state=FINAL_STATE_CONVENTION if layout.final_state else None,
            hidden_size=layout.hidden_size,
            dtype=names[layout.dtype],
        )

    @property
    def layout(self) -> CaptureLayout:
        """The features of every token in this store."""
        return CaptureLayout(
            self.tap_ids, self.hidden_size, self.final_state is not None, dtype=STORE_DTYPES[self.dtype]
        )


class FileEntry(_Entry):
    """One file of the store: its name, size and checksum."""

    name: FileName
    bytes: Positive
    sha256: Sha256


class ShardEntry(_Entry):
    """One shard: a file of tokens and a file of features for the same documents, in the same order."""

    tokens_file: FileEntry
    features_file: FileEntry
    samples: Positive
    tokens: Positive
    supervised_tokens: Count


class StoreManifest(StoreHeader):
    """A whole store. Documents are numbered through the shards in the order listed here."""

    samples: Positive
    tokens: Positive
    supervised_tokens: Count
    index: FileEntry
    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        for name in ("samples", "tokens", "supervised_tokens"):
            total = sum(getattr(shard, name) for shard in self.shards)
            if total != getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, but the shards hold {total}")
        return self

    @property
    def header(self) -> StoreHeader:
        """The part that does not depend on the records."""
        return StoreHeader(**{name: getattr(self, name) for name in StoreHeader.model_fields})

    @property
    def files(self) -> list[FileEntry]:
        """All files but the manifest itself."""
        return [self.index, *(entry for shard in self.shards for entry in (shard.tokens_file, shard.features_file))]

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(entry.bytes for entry in self.files)


_Header = TypeVar("_Header", bound=StoreHeader)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_json(header: StoreHeader) -> bytes:
    """A header or manifest as readable JSON, with a checksum over its other fields."""
    values = header.model_dump(mode="json")
    return (json.dumps({**values, "checksum": _digest(values)}, indent=1) + "\n").encode()


def _parse(path: Path, kind: type[_Header]) -> _Header:
    try:
        values = json.loads(path.read_bytes().decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} is not JSON ({error}): the file is damaged") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise StoreError(f"{path}: format is {found!r}; a feature store says {FORMAT!r}")
    if values.get("version") != VERSION:
        raise StoreError(
            f"{path}: version is {values.get('version')!r}; this draftsmith reads version {VERSION}: "
            "read the store with the draftsmith that wrote it, or capture again"
        )
    checksum = values.pop("checksum", None)
    # A checksum by name: an unknown key is reported as such, not as damage.
    unknown = sorted(set(values) - set(kind.model_fields))
    if unknown:
        raise StoreError(f"{path}: unknown keys {', '.join(unknown)}; known are {', '.join(kind.model_fields)}")
    try:
        header = kind.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'manifest'}: {fault['msg']}" for fault in error.errors()
        )
        raise StoreError(f"{path}: {faults}") from error
    if checksum != _digest(values):
        raise StoreError(f"{path}: checksum is {checksum!r}, but the content gives {_digest(values)!r}: it was changed")
    return header


def read_header(path: Path) -> StoreHeader:
    """Read the header of an unfinished store. Raises `StoreError` where it is damaged or unknown."""
    return _parse(path, StoreHeader)


def read_manifest(directory: Path | str) -> StoreManifest:
    """Read and check `manifest.json` of a store. Raises `StoreError` where it is missing, damaged or unknown."""
    path = Path(directory) / MANIFEST_FILE
    if not path.is_file():
        raise StoreError(
            f"{directory} has no {MANIFEST_FILE}: it is not a feature store, or its capture has not finished "
            "(run `draftsmith capture` again to finish it)"
        )
    return _parse(path, StoreManifest)


def header_differences(store: StoreHeader, wanted: StoreHeader) -> str:
    """Every field in which two headers differ, as `field: the store has X, this run needs Y`."""
    return "; ".join(
        f"{name}: the store has {has!r}, this run needs {needs!r}"
        for name, has, needs in differences(store.model_dump(), wanted.model_dump())
    )
