"""What a frozen model says of the samples of a run: written by `llmrecipes precompute`, read in place of its passes.

A folder has `precomputed.json` and the files with the values. It gets its name when it is complete; until then the
parts that ranks have computed are in another one beside it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch.utils.data import Dataset

from llmrecipes import untrusted
from llmrecipes.data.folder import checked
from llmrecipes.data.folder.data_manifest import File, Inside, Record
from llmrecipes.data.folder.documents import TokenFile
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.nested import leaves
from llmrecipes.recipe.derived.batch_schedule import samples_of
from llmrecipes.recipe.rules.distill_rules import CHECKSUM, section
from llmrecipes.recipe.schema import Recipe

NAME = "precomputed.json"
FORMAT = 1
AGAIN = "llmrecipes precompute RECIPE with another folder, or after deleting this one"
SHOWN = 5
"""Differences that a message has."""
LONGEST = 200
"""Characters of a value in it."""
MOST_PARTS = 100_000
"""Files whose sizes a start looks at."""


class LogitsForm(Record):
    """Samples of a teacher's logits on a disk, one after another in files of `part` samples.

    A sample is `length` × `top_k` ids, then as many logits, both little-endian, and the CRC-32 of both.
    """

    samples: int
    length: int
    top_k: int
    ids: Literal["uint16", "uint32"]
    logits: Literal["float32", "bfloat16", "float16"]
    part: Annotated[int, Field(ge=1)]

    @classmethod
    def of(cls, recipe: Recipe, part: int) -> LogitsForm:
        """What a recipe with `distill.logits` reads: logits in the precision of the teacher's passes."""
        types = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        return cls(
            samples=samples_of(recipe),
            length=recipe.model.seq_length,
            top_k=section(recipe).top_k or 0,
            ids="uint16" if recipe.model.vocab_size <= 1 << 16 else "uint32",
            logits=cast(Any, types[recipe.train.precision]),
            part=part,
        )

    @property
    def bytes_of_ids(self) -> int:
        return self.length * self.top_k * np.dtype(self.ids).itemsize

    @property
    def sample_bytes(self) -> int:
        return self.bytes_of_ids + self.length * self.top_k * getattr(torch, self.logits).itemsize + CHECKSUM

    @property
    def parts(self) -> int:
        return -(-self.samples // self.part)

    def file(self, part: int) -> str:
        """Path of a part's file; a folder has a thousand."""
        return f"{part // 1000:06}/{part % 1000:03}.bin"

    def size(self, part: int) -> int:
        """Bytes of a part's file."""
        return min(self.part, self.samples - part * self.part) * self.sample_bytes

    def packed(self, ids: torch.Tensor, logits: torch.Tensor) -> bytes:
        """A sample, from [length, top_k] of both."""
        element = torch.int32 if self.logits == "float32" else torch.int16
        data = ids.numpy().astype(self.ids).tobytes()
        data += logits.to(getattr(torch, self.logits)).contiguous().view(element).numpy().tobytes()
        return data + zlib.crc32(data).to_bytes(CHECKSUM, "little")

    def unpacked(self, data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, int32, and logits, fp32, [length, top_k] each.

        Raises:
            ValueError: the checksum differs, or an id is none of the vocabulary.
        """
        content = data[:-CHECKSUM]
        if zlib.crc32(content) != int.from_bytes(data[-CHECKSUM:], "little"):
            raise ValueError("does not match its checksum")
        shape = self.length, self.top_k
        ids = torch.from_numpy(np.frombuffer(content, self.ids, self.length * self.top_k).astype(np.int32))
        logits = torch.frombuffer(bytearray(content[self.bytes_of_ids :]), dtype=getattr(torch, self.logits))
        return ids.view(shape), logits.float().view(shape)  # data loaders send arrays, and NumPy has no bf16


class PrecomputedRecord(Record):
    """The content of `precomputed.json`."""

    format: int
    facts: dict[str, Any]
    """What the values depend on, by name: data, model, weights, precision."""
    files: dict[Inside, File] = Field(default_factory=dict)
    logits: LogitsForm | None = Field(default=None, exclude_if=lambda form: form is None)
    """Of the files in `logits/`, whose samples have checksums of their own; None: there are none."""


def read_record(folder: Path, where: str) -> tuple[PrecomputedRecord, str]:
    """The record of a folder, and its SHA-256.

    Args:
        where: key and value that name the folder.

    Raises:
        UserError: there is none, or it is corrupt.
    """
    try:
        content = untrusted.read(folder / NAME, root=folder)
        record = PrecomputedRecord.model_validate_json(content)
    except OSError as error:
        raise UserError(
            "the folder has no precomputed values",
            where=where,
            rule="training reads what `llmrecipes precompute` wrote",
            fix="llmrecipes precompute RECIPE with the same overrides",
        ) from error
    except (ValidationError, UserError) as error:
        raise UserError("is corrupt", where=str(folder / NAME), fix=AGAIN) from error
    if record.format != FORMAT:
        raise UserError(f"has format {record.format}; this version reads {FORMAT}", where=str(folder / NAME), fix=AGAIN)
    return record, hashlib.sha256(content).hexdigest()


def require_same(then: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuse values that were computed of something else.

    Args:
        then: facts of the values.
        now: those of the recipe.
        where: key and value that name the folder.

    Raises:
        UserError: with what differs.
    """
    before, after = dict(leaves(then)), dict(leaves(now))
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if not names:
        return
    texts = [
        f"{_short(name)}: {_short(before.get(name))} there, {_short(after.get(name))} in this recipe"
        for name in names[:SHOWN]
    ]
    more = f"\n    and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    raise UserError(
        "was computed for something else:\n    " + "\n    ".join(texts) + more,
        where=where,
        rule="the values must come from the same data, model, weights and precision",
        fix="set these keys back, or run llmrecipes precompute RECIPE with another folder",
    )


def _short(value: Any) -> str:
    """A fact or its name as printable text, shortened: a file may make it as long as it likes."""
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... [{len(text):,} characters]"


def require_intact(folder: Path, record: PrecomputedRecord, log: Any) -> None:
    """Compare the files with their hashes, unless this user has done so before.

    Raises:
        UserError: the first that is missing or differs.
    """
    form = record.logits
    logits = dict[str, int]()
    if form is not None:  # of millions of parts some
        some = range(0, form.parts, 1 + form.parts // MOST_PARTS)
        logits = {f"{LOGITS}/{form.file(part)}": form.size(part) for part in some}
    for name, size in ({name: file.bytes for name, file in record.files.items()} | logits).items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            what = "is missing" if actual is None else f"has {actual:,} bytes, expected {size:,}"
            raise UserError(what, where=str(path), rule=f"every file must match {NAME}", fix=AGAIN)
    hashed = checked.hashes(folder, {name: folder / name for name in record.files}, log)
    if wrong := [name for name, file in record.files.items() if hashed[name] != file.sha256]:
        raise UserError("does not match its hash", where=str(folder / wrong[0]), fix=AGAIN)


LOGITS = "logits"
"""Folder of the parts."""
OPEN_FILES = 4
"""Files of parts that a process keeps open; samples are read in order."""


class WithTeacherLogits(Dataset[dict[str, Any]]):
    """Training samples with what a teacher says of them: `teacher_ids` and `teacher_logits`, [length, top_k].

    Args:
        samples: samples of the training split.
        folder: that `distill.logits` names.
        form: form of what is there.
    """

    def __init__(self, samples: Dataset[dict[str, Any]], folder: Path, form: LogitsForm) -> None:
        self._samples = samples
        self._folder = folder
        self._form = form
        self._files: OrderedDict[int, TokenFile] = OrderedDict()

    def __len__(self) -> int:
        return self._form.samples

    def __getitem__(self, number: int) -> dict[str, Any]:
        part, place = divmod(number, self._form.part)
        size = self._form.sample_bytes
        data = self._file(part).read(np.uint8, size, place * size).tobytes()
        try:
            ids, logits = self._form.unpacked(data)
        except ValueError as error:
            raise UserError(
                f"sample {number:,} {error}",
                where=str(self._path(part)),
                rule="a teacher's logits must be as they were written",
                fix=AGAIN,
                code=ExitCode.STOP,
            ) from error
        return {**self._samples[number], "teacher_ids": ids, "teacher_logits": logits}

    def _path(self, part: int) -> Path:
        return self._folder / LOGITS / self._form.file(part)

    def _file(self, part: int) -> TokenFile:
        if part not in self._files:
            self._files[part] = TokenFile(self._path(part))
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return self._files[part]


def with_teacher_logits(samples: Dataset[dict[str, Any]], recipe: Recipe, folder: str) -> WithTeacherLogits:
    """Training samples with what `distill.logits` has of them.

    Raises:
        UserError: the folder is not complete, or has something else than the recipe reads.
    """
    where = f"distill.logits: {folder}"
    record, _ = read_record(Path(folder), where)
    form = LogitsForm.of(recipe, 1 if record.logits is None else record.logits.part)
    if record.logits != form:
        raise UserError(f"has {record.logits}, expected {form}", where=where, fix=AGAIN)
    return WithTeacherLogits(samples, Path(folder), form)


def log_probs(folder: Path, stems: Sequence[str], counts: Sequence[int]) -> list[np.ndarray]:
    """Log-probabilities of pairs under a reference, mapped into memory: a rank reads those of its samples.

    Args:
        folder: that `dpo.reference_log_probs` names.
        stems: names of a split of each source.
        counts: pairs of each.

    Returns:
        [pairs, 2] of each source, fp64 in nats: of the better and of the worse answer, summed over its tokens.

    Raises:
        UserError: a file is missing, or has something else.
    """
    columns = list[np.ndarray]()
    for stem, count in zip(stems, counts, strict=True):
        path = folder / f"{stem}.npy"
        try:
            values = np.lib.format.open_memmap(untrusted.real(path, root=folder), mode="r")  # supports no pickles
        except FileNotFoundError as error:
            raise UserError(
                "is missing",
                where=str(path),
                rule="training reads what `llmrecipes precompute` wrote",
                fix="llmrecipes precompute RECIPE with the same overrides",
            ) from error
        except Exception as error:  # of any kind: the header is the source of a Python literal
            raise UserError("is not an array", where=str(path), fix=AGAIN) from error
        if values.dtype != np.float64 or values.shape != (count, 2):
            raise UserError(
                f"{values.dtype} {list(values.shape)}, expected float64 [{count}, 2]", where=str(path), fix=AGAIN
            )
        columns.append(values)
    return columns
