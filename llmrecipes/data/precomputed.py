"""What a frozen model says of the samples of a run: written by `llmrecipes precompute`, read in place of its passes.

A folder has `precomputed.json` and the files with the values. It gets its name when it is complete; until then the
parts that ranks have computed are in another one beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from llmrecipes import untrusted
from llmrecipes.data import checked
from llmrecipes.data.manifest import File, Record
from llmrecipes.errors import UserError
from llmrecipes.nested import leaves

NAME = "precomputed.json"
FORMAT = 1
AGAIN = "llmrecipes precompute RECIPE, with another folder or after this one is deleted"
SHOWN = 5
"""Differences that a message has."""


class PrecomputedRecord(Record):
    """The content of `precomputed.json`."""

    format: int
    facts: dict[str, Any]
    """What the values depend on, by name: data, model, weights, precision."""
    files: dict[str, File]


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
            "nothing was computed there", where=where, rule="training reads what was computed before",
            fix="llmrecipes precompute RECIPE, with the same overrides",
        ) from error  # fmt: skip
    except (ValidationError, UserError) as error:
        raise UserError("is corrupt", where=str(folder / NAME), fix=AGAIN) from error
    if record.format != FORMAT:
        raise UserError(
            f"format {record.format}, this program reads {FORMAT}", where=str(folder / NAME), fix=AGAIN
        )  # fmt: skip
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
    texts = [f"{name}: {before.get(name)!r} there, {after.get(name)!r} in this recipe" for name in names[:SHOWN]]
    more = f"\n    and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    raise UserError(
        "was computed of something else:\n    " + "\n    ".join(texts) + more,
        where=where,
        rule="the values belong to these data, this model, its weights and its precision",
        fix="set these keys back, or llmrecipes precompute RECIPE with another folder",
    )


def require_intact(folder: Path, record: PrecomputedRecord, log: Any) -> None:
    """Compare the files with their hashes, unless this user has done so before.

    Raises:
        UserError: the first that is missing or differs.
    """
    for name, file in record.files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != file.bytes:
            what = "is missing" if actual is None else f"has {actual:,} bytes, the record says {file.bytes:,}"
            raise UserError(what, where=str(path), rule=f"every file is as {NAME} says", fix=AGAIN)
    hashed = checked.hashes(folder, {name: folder / name for name in record.files}, log)
    if wrong := [name for name, file in record.files.items() if hashed[name] != file.sha256]:
        raise UserError("differs from its hash", where=str(folder / wrong[0]), fix=AGAIN)


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
    found = list[np.ndarray]()
    for stem, count in zip(stems, counts, strict=True):
        path = folder / f"{stem}.npy"
        try:
            values = np.lib.format.open_memmap(untrusted.real(path, root=folder), mode="r")  # supports no pickles
        except FileNotFoundError as error:
            raise UserError(
                "is missing", where=str(path), rule="training reads what was computed before",
                fix="llmrecipes precompute RECIPE, with the same overrides",
            ) from error  # fmt: skip
        except Exception as error:  # of any kind: the header is the source of a Python literal
            raise UserError("is not an array", where=str(path), fix=AGAIN) from error
        if values.dtype != np.float64 or values.shape != (count, 2):
            raise UserError(
                f"{values.dtype} {list(values.shape)}, expected float64 [{count}, 2]", where=str(path), fix=AGAIN
            )  # fmt: skip
        found.append(values)
    return found
