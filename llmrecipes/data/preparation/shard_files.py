"""The files of shards: batches, and whatever else items publish, each part with its size and its SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmrecipes.data.preparation.corpus import Tally, Worked
from llmrecipes.data.steps.split import DIGEST_BYTES
from llmrecipes.data.steps.steps import UNREADABLE, Document, Dropped
from llmrecipes.data.tokens.chat import Conversations
from llmrecipes.data.tokens.encode import Encoded
from llmrecipes.errors import UserError
from llmrecipes.io import sync

_FRAME = struct.Struct("<QQ32s")


def part_of(file: Path) -> Path:
    """A name for a file that is not complete, which nobody else uses: an item may be done twice at the same time."""
    return file.with_name(f".{file.name}-{uuid.uuid4().hex}.part")


def publish(file: Path, content: Iterable[bytes]) -> None:
    """Write a file under another name, and rename it when it is on disk. Nothing is published if an error ends the
    content."""
    part = part_of(file)
    try:
        with part.open("wb") as stream:
            stream.writelines(content)
        sync(part)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    sync(file.parent)


def framed(header: bytes, body: bytes) -> bytes:
    """Their sizes and their SHA-256, and both."""
    return _FRAME.pack(len(header), len(body), hashlib.sha256(header + body).digest()) + header + body


def unframed(content: bytes, failure: UserError) -> tuple[bytes, bytes]:
    """Header and body of what `framed` made of them; raises the failure if they differ."""
    size = _FRAME.unpack(content[: _FRAME.size])[0] if len(content) >= _FRAME.size else 0
    header = content[_FRAME.size :][:size]
    body = content[_FRAME.size :][size:]
    if framed(header, body) != content:
        raise failure
    return header, body


def dumped(worked: Worked) -> tuple[bytes, bytes]:
    """A batch as JSON and bytes: ids, answers, and digest, text and marks of each document."""
    encoded = worked.encoded
    outcomes: list[list[object]] = []
    answers = encoded.answers if isinstance(encoded, Conversations) else b""
    body = [encoded.ids, answers]
    for outcome in worked.outcomes:
        if isinstance(outcome, Dropped):
            outcomes.append([outcome.reason, outcome.rule, outcome.excerpt])
            continue
        sizes = [len(outcome.text), *map(len, outcome.marks)]
        score = [] if outcome.score is None else [outcome.score]
        outcomes.append([outcome.split, outcome.size, outcome.changed, outcome.excerpt, sizes, *score])
        body += [outcome.digest, outcome.text, *outcome.marks]
    header: dict[str, object] = {"ids": len(encoded.ids), "lengths": encoded.lengths, "outcomes": outcomes}
    header["kinds"] = [outcome.kinds for outcome in worked.outcomes]
    if isinstance(encoded, Conversations):
        header["chat"] = {"answers": len(answers), "tallies": encoded.tallies, "refusal": encoded.refusal}
    return json.dumps(header).encode(), b"".join(body)


def _loaded(source: int, header: bytes, body: bytes, *, ids: bool = True) -> Worked:
    values = json.loads(header)
    start = 0

    def cut(size: int) -> bytes:
        nonlocal start
        start += size
        return body[start - size : start]

    tokens = cut(values["ids"]) if ids else b""
    chat = values.get("chat")
    answers = cut(chat["answers"]) if chat else b""
    outcomes: list[Document | Dropped] = []
    for row, kinds in zip(values["outcomes"], map(tuple, values["kinds"]), strict=True):
        if len(row) == len(("reason", "rule", "excerpt")):
            reason, rule, excerpt = row
            outcomes.append(Dropped(reason, rule, excerpt, kinds))
            continue
        split, size, changed, excerpt, (length, *marks), *scores = row
        digest, text = cut(DIGEST_BYTES), cut(length)
        kept = tuple(changed), tuple(map(cut, marks)), excerpt, scores[0] if scores else None, kinds
        outcomes.append(Document(text, digest, split, size, *kept))
    lengths = values["lengths"]
    if chat:
        return Worked(source, outcomes, Conversations(tokens, lengths, answers, chat["tallies"], chat["refusal"]))
    return Worked(source, outcomes, Encoded(tokens, lengths))


def damaged(file: Path, what: str, fix: str) -> UserError:
    """For a file that is not what was written."""
    rule = "every part must match its SHA-256"
    return UserError(what, where=str(file), rule=rule, fix=f"{fix}, and run again", again=True)


def read(file: Path, source: int, *, ids: bool = True) -> Iterator[Worked]:
    """The batches of a shard; without ids, their hashes are not checked.

    Raises:
        UserError: the file is not what was written.
    """
    with file.open("rb") as stream:
        while True:
            frame = stream.read(_FRAME.size)
            sizes = _FRAME.unpack(frame)[:2] if len(frame) == _FRAME.size else (0, 0)
            left = file.stat().st_size - stream.tell()
            failure = damaged(
                file, "a shard is damaged", "delete the file, and all .bands and .near files if there are any"
            )
            if not ids and frame and 0 < sum(sizes) <= left:
                header = stream.read(sizes[0])
                try:
                    skipped = json.loads(header)["ids"]
                    stream.seek(skipped, os.SEEK_CUR)
                    yield _loaded(source, header, stream.read(sizes[1] - skipped), ids=False)
                except (ValueError, KeyError, TypeError) as error:
                    raise failure from error
                continue
            content = stream.read(sum(sizes)) if sum(sizes) <= left else b""
            header = content[: sizes[0]]
            body = content[sizes[0] :]
            if framed(header, body) != frame + content:
                raise failure
            if not content:
                return
            yield _loaded(source, header, body)


@dataclass
class ShardReading:
    """What was read for a shard, or a batch of it: bytes of text, tokens, and its damaged files."""

    source: int
    size: int = 0
    tokens: int = 0
    tally: Tally = field(default_factory=Tally)

    def add(self, worked: Worked) -> ShardReading:
        """Count a batch."""
        self.tokens += sum(worked.encoded.lengths)
        for outcome in worked.outcomes:
            if isinstance(outcome, Document):
                self.size += outcome.size
            elif outcome.reason == UNREADABLE:
                self.tally.dropped[UNREADABLE] += 1
                self.tally.failure = self.tally.failure or outcome.excerpt
        return self
