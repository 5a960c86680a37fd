"""The manifest of a prepared folder, the listings of its sample indices, and checks of files against both.

megatron-core would read the arrays of an index with `allow_pickle`, which can run code. Therefore every file of an
index must be listed, and an array is opened only if its header declares plain integers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from llmrecipes import untrusted
from llmrecipes.data.steps.split import Split
from llmrecipes.errors import UserError
from llmrecipes.untrusted import open_file, read

NAME = "manifest.json"
FORMAT = 1
_AGAIN = "delete the folder and prepare again"

# The .idx header of megatron-core's IndexedDataset: magic, version, dtype code, sequences, documents + 1.
IDX_HEADER = struct.Struct("<9sQBQQ")
IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_DTYPES = {4: "int32", 8: "uint16"}


class Record(BaseModel):
    """A section of the JSON file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError("a file of the folder has a relative path without ..")
    return name


Inside = Annotated[str, AfterValidator(_inside)]
"""Path of a file in the folder: the record may be somebody else's."""


class File(Record):
    """A file of the folder."""

    bytes: int
    sha256: str


class Counts(Record):
    """A split of a source: documents, tokens (with one end token per document), bytes of UTF-8 text."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class SourceFiles(Record):
    """The source's files when it was read: count, size, hash of names and sizes."""

    files: int
    bytes: int
    sha256: str


class SourceRecord(Record):
    """One source: what was read, what was dropped and why, what was kept."""

    label: str
    read: int
    empty: int
    undecodable: int
    duplicates: int
    steps: dict[str, int] = Field(default_factory=dict, exclude_if=lambda dropped: not dropped)
    """Dropped, by the key or type of the step."""
    rules: dict[str, int] = Field(default_factory=dict, exclude_if=lambda dropped: not dropped)
    """Those of them that a step with several rules dropped, by `step.rule`."""
    changed: dict[str, int] = Field(default_factory=dict, exclude_if=lambda changed: not changed)
    """Kept, but changed, by the step or the order of `infilling.ORDERS`; a document may count for several."""
    unreadable: int = Field(default=0, exclude_if=lambda count: not count)
    """Files that could not be read to their end."""
    linked: bool = Field(default=False, exclude_if=lambda linked: not linked)
    """Its tokens were there before: every `.bin` has those of all splits, and the index of a split names its own."""
    splits: dict[Split, Counts]
    files: SourceFiles | None


class TokenizerRecord(Record):
    """The tokenizer beside the tokens."""

    type: str
    vocab_size: int
    eod: int
    sha256: str
    trained_on_bytes: int | None
    prefix: list[int] | None = Field(default=None, exclude_if=lambda ids: ids is None)
    """Ids that documents and prompts of text begin with (BOS); None: prepared before they were recorded, without."""
    fim: dict[str, int] = Field(default_factory=dict, exclude_if=lambda ids: not ids)
    """Ids of the special tokens of fill-in-the-middle, by part (`infilling.PARTS`)."""


class HeldOut(Record):
    """The text of a held-out split: bytes, and bytes after `gzip -9`."""

    bytes: int
    gzip_bytes: int


class ChatCounts(Record):
    """Conversations of a source: what was dropped and why, what was cut, and how much the loss counts."""

    rejected: int = 0
    """Dropped: the template raised an error."""
    refusal: str = ""
    """What it said to the first of them."""
    special_tokens: int = 0
    """Dropped: a message has the text of a special token."""
    unanswered: int = 0
    """Dropped: the assistant says nothing, or nothing within `max_length`."""
    too_long: int = 0
    """Dropped: longer than `max_length`."""
    cut: int = 0
    """Conversations that were cut to `max_length`."""
    cut_tokens: int = 0
    tokens: int = 0
    """Tokens that are kept."""
    answer_tokens: int = 0
    """Those of them that the loss counts."""

    @property
    def dropped(self) -> int:
        """Conversations that are dropped."""
        return self.rejected + self.special_tokens + self.unanswered + self.too_long

    def with_more(self, others: ChatCounts) -> ChatCounts:
        """The sums of these and later ones."""
        counts = self.model_dump(exclude={"refusal"})
        more = others.model_dump(exclude={"refusal"})
        sums = {name: count + more[name] for name, count in counts.items()}
        return ChatCounts(**sums, refusal=self.refusal or others.refusal)


class ChatRecord(Record):
    """How conversations became tokens; the template is the file `chat_template.jinja`."""

    origin: str
    """Where the template is from."""
    special_tokens: dict[str, str]
    """Tokens that it refers to by name."""
    sources: list[ChatCounts]


class DataManifest(Record):
    """The content of `manifest.json`."""

    format: int
    fingerprint: str
    data: dict[str, object]
    versions: dict[str, str]
    dtype: str
    tokenizer: TokenizerRecord
    sources: list[SourceRecord]
    held_out: dict[Split, HeldOut]
    files: dict[Inside, File]
    chat: ChatRecord | None = None
    valid_sources: dict[str, Counts] = Field(default_factory=dict, exclude_if=lambda sets: not sets)
    """Held-out sets of `data.valid_sources`, by label."""

    @property
    def decontaminated(self) -> dict[str, int] | None:
        """Documents that the step `decontaminate` dropped, by the evaluation file whose text they have.

        Files without any are missing; None: there was no such step.
        """
        if not any("decontaminate" in source.steps for source in self.sources):
            return None
        dropped: dict[str, int] = {}
        for source in self.sources:
            for rule, count in source.rules.items():
                step, _, file = rule.partition(".")
                if step == "decontaminate":
                    dropped[file] = dropped.get(file, 0) + count
        return dropped

    def counts(self, split: Split) -> Counts:
        """Sums over the sources."""
        all_counts = [source.splits[split] for source in self.sources]
        return Counts(
            documents=sum(c.documents for c in all_counts),
            tokens=sum(c.tokens for c in all_counts),
            bytes=sum(c.bytes for c in all_counts),
        )


def stem(source: int, split: Split) -> str:
    """File name, without suffix, of a split of a source.

    `.bin` tokens, `.idx` index, `.sha256` document digests, `.answers` a byte for each token of a conversation,
    `.scores` a float32 for each document (`curriculum`).
    """
    return f"{source:02d}-{split}"


def valid_stem(label: str) -> str:
    """File name, without suffix, of a set of `data.valid_sources`."""
    return f"valid-{label}"


def sha256(file: Path) -> str:
    """Hex SHA-256 of a file."""
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load(folder: Path) -> DataManifest:
    """Read a folder's manifest.

    Raises:
        UserError: missing, damaged, or of a different format version.
    """
    file = folder / NAME
    try:
        manifest = DataManifest.model_validate_json(read(file, root=folder))
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(file), fix=_AGAIN) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"damaged manifest: {key}: {first['msg']}", where=str(file), fix=_AGAIN) from error
    if manifest.format != FORMAT:
        raise UserError(f"has format {manifest.format}; this version reads {FORMAT}", where=str(file), fix=_AGAIN)
    return manifest


def check_sizes(folder: Path, manifest: DataManifest) -> None:
    """The quick check: every file has its size, and every index belongs to its tokens.

    Raises:
        UserError: the first file that is missing, truncated or different.
    """
    for name, expected in manifest.files.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected.bytes:
            size = "is missing" if actual is None else f"has {actual:,} bytes"
            raise UserError(
                f"{size}, the manifest says {expected.bytes:,}",
                where=str(file),
                rule="prepared files must not change after `prepare` wrote them",
                fix=_AGAIN,
            )
    for number, source in enumerate(manifest.sources):
        for split, counts in source.splits.items():
            if counts.documents:
                _check_index(folder / f"{stem(number, split)}.idx", counts, manifest.dtype, linked=source.linked)
    for label, counts in manifest.valid_sources.items():
        _check_index(folder / f"{valid_stem(label)}.idx", counts, manifest.dtype)


def document_of(file: Path, place: int) -> tuple[int, int]:
    """The document of an `.idx` that contains a byte of its `.bin`, and the byte's offset in it."""
    import numpy as np

    with file.open("rb") as stream:
        *_, documents, _ = IDX_HEADER.unpack(stream.read(IDX_HEADER.size))
    pointers = np.memmap(file, "<i8", "r", IDX_HEADER.size + 4 * documents, (documents,))
    number = int(np.searchsorted(pointers, place, side="right")) - 1
    return number, place - int(pointers[number])


def _check_index(file: Path, counts: Counts, dtype: str, *, linked: bool = False) -> None:
    """Header, number of documents and end of the last one of an `.idx` against the manifest's counts; of a linked one
    against the `.bin`."""
    itemsize = {"uint16": 2, "int32": 4}[dtype]
    documents = counts.documents
    with open_file(file) as stream:
        header = stream.read(IDX_HEADER.size)
        try:
            magic, version, code, sequences, ends = IDX_HEADER.unpack(header)
            # lengths: int32 each; pointers: int64 each
            stream.seek(IDX_HEADER.size + 4 * (documents - 1))
            (length,) = struct.unpack("<i", stream.read(4))
            stream.seek(IDX_HEADER.size + 4 * documents + 8 * (documents - 1))
            (pointer,) = struct.unpack("<q", stream.read(8))
        except struct.error:
            magic = b""
    if magic != IDX_MAGIC or version != 1:
        raise UserError("is not a megatron-core index", where=str(file), fix=_AGAIN)
    indexed = (IDX_DTYPES.get(code), sequences, ends, pointer // itemsize + length)
    if linked and indexed[3] * itemsize <= file.with_suffix(".bin").stat().st_size:
        indexed = (*indexed[:3], counts.tokens)
    if indexed != (dtype, documents, documents + 1, counts.tokens):
        raise UserError(
            f"indexes {sequences:,} documents and {indexed[3]:,} tokens of {indexed[0]}; "
            f"the manifest says {documents:,}, {counts.tokens:,} and {dtype}",
            where=str(file),
            rule="an index must match the .bin next to it",
            fix=_AGAIN,
        )


LISTING = "index.json"
_LISTING_RULE = "a folder of sample indices must be as `prepare` wrote it"

_LISTED = TypeAdapter(dict[Inside, File])


def listing_text(files: dict[str, File]) -> str:
    """A listing in its file format."""
    return _LISTED.dump_json(files, indent=1).decode() + "\n"


def read_listing(folder: Path) -> dict[str, File]:
    """The listed files by name, with sizes and hashes.

    Raises:
        OSError: there is no listing.
        UserError: it is corrupt.
    """
    content = untrusted.read(folder / LISTING, root=folder)
    try:
        return _LISTED.validate_json(content)
    except ValidationError as error:
        raise UserError(
            "is not a file listing", where=str(folder / LISTING), rule=_LISTING_RULE, fix=_prepare_again(folder)
        ) from error


def listings(prepared: Path) -> Iterator[tuple[Path, dict[str, File]]]:
    """All folders of sample indices in a prepared folder, checked by `require_listed`."""
    for mark in sorted(prepared.glob(f"index/*/{LISTING}")):
        files = read_listing(mark.parent)
        require_listed(mark.parent, files)
        yield mark.parent, files


def require_listed(folder: Path, files: Mapping[str, File]) -> None:
    """Every listed file has its size, arrays have a header of plain integers, and there is no other file.

    Raises:
        UserError: the first that is missing, truncated, not such an array or not listed.
    """
    # NFS renames a deleted file that is still open elsewhere to such a name.
    present = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".nfs")} - {LISTING}
    if foreign := sorted(present - set(files)):
        raise UserError(
            f"is not listed in {LISTING}",
            where=str(folder / foreign[0]),
            rule=_LISTING_RULE,
            fix=_prepare_again(folder),
        )
    for name, listed in files.items():
        file = folder / name
        size = listed.bytes
        actual = file.stat().st_size if name in present and file.is_file() else None
        if actual != size:
            what = f"is missing, expected {size} bytes" if actual is None else f"has {actual} bytes, expected {size}"
            raise UserError(what, where=str(file), rule=_LISTING_RULE, fix=_prepare_again(folder))
        if file.suffix != ".txt":
            open_array(file)


def open_array(file: Path) -> np.memmap:
    """A memory-mapped array of an index; only its header is read.

    Raises:
        UserError: not a complete `.npy` file of plain integers.
    """
    try:
        # It supports neither archives nor pickles.
        opened = np.lib.format.open_memmap(untrusted.real(file), mode="r")
        if opened.dtype.kind not in "iu" or opened.offset + opened.nbytes != file.stat().st_size:
            raise ValueError(f"{opened.nbytes} bytes of {opened.dtype} in {file.stat().st_size}")
    except Exception as error:  # of any kind: the header is the source of a Python literal
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        fix = _prepare_again(file.parent)
        raise UserError(
            f"is not an index: {reason}", where=str(file), rule="an index must be a .npy file of integers", fix=fix
        ) from error
    return opened


def _prepare_again(folder: Path) -> str:
    return f"delete {folder} and prepare again"
