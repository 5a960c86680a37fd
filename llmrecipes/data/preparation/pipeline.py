"""The pipeline of a preparation: encode the shards, compare, count, place; an executor does the items of each stage.

All items are files, under names that say that they are complete. So a call that was killed is continued by the next
one. `collect` then does what is left: counts and names, held-out texts, and the sources that are tokens already.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from llmrecipes.console import duration
from llmrecipes.data.folder.data_manifest import ChatCounts, Counts, HeldOut, SourceRecord, stem
from llmrecipes.data.folder.prepared import HeldOutSplit, held_out_name
from llmrecipes.data.preparation import join, repeated_documents
from llmrecipes.data.preparation.corpus import Tally
from llmrecipes.data.preparation.executor import REPORT_SECONDS, Executor, ThisProcess
from llmrecipes.data.preparation.join import JOINED, ShardOffsets, kept_tokens, read_counts, read_layout, used_item
from llmrecipes.data.preparation.repeated_documents import Item, JoinStage, one, one_a_shard
from llmrecipes.data.preparation.shard_files import ShardReading
from llmrecipes.data.preparation.shards import Shards, uncut
from llmrecipes.data.preparation.write import (
    SAMPLES,
    DroppedSamples,
    TextToWrite,
    answers_of,
    record,
    require_readable,
    summary,
)
from llmrecipes.data.sources import file_parts, sources
from llmrecipes.data.steps.split import Split
from llmrecipes.data.steps.steps import Dropped, Seen
from llmrecipes.recipe.schema import Source
from llmrecipes.units import MIB

SHARDS_OF_A_WORKER = 4
"""With fewer, workers would wait for the last shards; they share the batches of one shard after the other instead."""
_SMALL_BYTES = 32 * MIB
"""Of shards, that one process joins within seconds."""


def stages(shards: Shards) -> tuple[JoinStage, ...]:
    """What follows the encoding, in order."""
    texts = () if _has_tokens(shards) else (JoinStage(shards, "packed", join.members, join.pack),)
    return (
        *repeated_documents.stages(shards),
        JoinStage(shards, "counts", one_a_shard, join.count_shard),
        JoinStage(shards, "layout", one, join.lay_out),
        *texts,
        JoinStage(shards, "placed", one_a_shard, join.place_shard),
    )


def rounds(shards: Shards) -> Iterator[JoinStage | Shards]:
    """All that is to be done, in order: to be asked for the next only when nothing of the one before is missing.

    Raises:
        UserError: a file has changed since it was written.
    """
    while True:
        yield shards
        if (using := shards.used()) is None:
            continue
        every = stages(using)
        counted = [stage.name for stage in every].index("counts") + 1
        yield from every[:counted]
        if more := _more(using):
            shards.require(*more)
        elif using.final:
            yield from every[counted:]
            return
        else:
            yield JoinStage(using, "end", one, join.find_end)


def _more(shards: Shards) -> tuple[int, int] | None:
    """The source whose end is looked for, and the tokens that its shards have to have before comparing, because too few
    are kept; None if they are enough, or all."""
    ending = shards.ending
    if ending is None:
        return None
    done = shards.published()
    encoded = [done[number] for number, shard in enumerate(shards.joined) if shard.source == ending]
    behind = any(shard.source == ending for shard in shards.shards[shards.first :])
    if not behind and all(shard.whole for shard in encoded):
        return None
    most = shards.every[ending].max_tokens or 0
    if (kept := sum(kept_tokens(shards))) >= most:
        return None
    tokens = sum(shard.tokens for shard in encoded)
    return ending, min(max(tokens + most - kept, tokens * most // max(kept, 1)), 2 * (tokens + most))


def run(shards: Shards, executor: Executor, log: Callable[[str], None]) -> None:
    """Do all that is missing.

    Raises:
        UserError: a source or a shard cannot be read, or no worker is left.
        OSError: something cannot be written.
    """
    progress = EncodingProgress(shards, log)
    for stage in rounds(shards):
        if isinstance(stage, Shards):
            _encode(stage, executor, progress)
            continue
        missing = stage.needed()
        workers = executor if executor.remote or _is_large(stage.shards) else ThisProcess()
        for number, _ in enumerate(workers.map(stage.work, missing)):
            progress.stage(stage.name, number + 1, len(missing))


def _encode(shards: Shards, executor: Executor, progress: EncodingProgress) -> None:
    missing = shards.missing()
    if executor.remote or _many(shards, executor.workers):
        progress.start(by_shard=True)
        for reading in executor.map(shards.work, missing):
            progress.add(reading)
    else:
        progress.start(by_shard=False)
        for number in missing:
            shards.work(number, executor=executor, report=progress.add)


def _is_large(shards: Shards) -> bool:
    """Whether processes join shards sooner than one that need not be started."""
    left = _SMALL_BYTES
    for shard in shards.published().values():
        left -= shard.file.stat().st_size
        if left < 0:
            return True
    return False


def _many(shards: Shards, workers: int) -> bool:
    """Whether workers that encode a shard each are all busy."""
    count = Counter(shard.source for shard in shards.shards)
    used = sum(count.values())
    for number, source in enumerate(shards.every):
        if source.max_tokens is not None:  # perhaps only its beginning is read
            of_source = int(source.max_tokens * sources.BYTES_PER_TOKEN) // file_parts.PART_BYTES
            used -= max(0, count[number] - of_source)
    return used >= SHARDS_OF_A_WORKER * workers


class EncodingProgress:
    """Says every few seconds how far the encoding is, and stages that take longer."""

    def __init__(self, shards: Shards, log: Callable[[str], None]) -> None:
        self._shards = shards
        self._log = log
        self._sizes = [0 for _ in shards.every]
        self._tokens = [0 for _ in shards.every]
        self._tallies = [Tally() for _ in shards.every]
        self._began = self._reported = time.monotonic()

    def start(self, *, by_shard: bool) -> None:
        """The encoding begins, or begins again."""
        done, every = len(self._shards.published()), len(self._shards.shards)
        if done and self._shards.needed():
            self._log(f"{done:,} of {every:,} shards are encoded")
        if by_shard:
            for line in uncut(self._shards.every):
                self._log(f"note: {line}")

    def add(self, reading: ShardReading) -> None:
        """Something was read.

        Raises:
            UserError: too many files of a source are damaged.
        """
        number = reading.source
        self._sizes[number] += reading.size
        self._tokens[number] += reading.tokens
        self._tallies[number].update(reading.tally)
        source = self._shards.every[number]
        share = self._shards.spec.steps.max_unreadable
        if source.max_tokens is None:  # perhaps behind the end; `collect` knows
            require_readable(number, source, self._tallies[number], share)
        if self._due():
            self._log(encoding(self._shards.every, number, self._sizes, self._tokens, self._reported - self._began))

    def stage(self, name: str, done: int, count: int) -> None:
        """An item of a stage is done."""
        if self._due():
            self._log(f"{name}: {done:,} of {count:,}")

    def _due(self) -> bool:
        if time.monotonic() - self._reported <= REPORT_SECONDS:
            return False
        self._reported = time.monotonic()
        return True


def encoding(every: tuple[Source, ...], number: int, sizes: list[int], tokens: list[int], seconds: float) -> str:
    """How far the encoding is, as a line.

    Args:
        every: sources, by number.
        number: source that is read.
        sizes: bytes of text so far, by source.
        tokens: the same in tokens.
        seconds: since it began.
    """
    done = sum(sizes)
    rate = done / seconds
    line = f"{done / MIB:,.0f} MiB tokenized, {rate / MIB:.2g} MiB/s; at {sources.label(every[number])}"
    if not done:  # all was dropped so far
        return line
    left = 0.0
    for source, size, count in zip(every[number:], sizes[number:], tokens[number:], strict=True):
        expected = sources.text_bytes(source, size / count if count else None)
        if expected is None:
            return line
        left += max(0.0, expected - size)
    return f"{line}; about {duration(left / rate)} left"


def _has_tokens(shards: Shards) -> bool:
    return any(source.tokenized for source in shards.every)


def collect(
    part: Path, shards: Shards, log: Callable[[str], None]
) -> tuple[list[SourceRecord], dict[Split, HeldOut], list[ChatCounts]]:
    """Write what is left of a folder whose tokens have been placed; the files of tokens get second names in it.

    Returns:
        A record of each source, the held-out texts (none of conversations), and counts of each source's conversations.

    Raises:
        UserError: a source keeps nothing for training, or has too many damaged files.
    """
    shards = shards.used() or shards
    layout = read_layout(shards.joining)
    tallies, talks, by_split, samples = _counted(shards, len(layout.before))
    for number, source in enumerate(shards.every):
        require_readable(number, source, tallies[number], shards.spec.steps.max_unreadable)
    for file in sorted((shards.joining / JOINED).iterdir()):
        os.link(file, part / file.name)
    linked: list[int] = []
    if _has_tokens(shards):
        held_out = _with_token_sets(part, shards, layout, tallies, by_split, linked, log)
    else:
        held_out = _texts(part, shards, layout)
    reasons = shards.spec.steps.reasons
    records = [record(n, source, tallies[n], reasons, by_split, talks) for n, source in enumerate(shards.every)]
    for number in linked:
        records[number] = records[number].model_copy(update={"linked": True})
    full = {end.source for end in shards.ends.values() if end.shard is not None}
    if layout.room is not None and shards.ending is not None:
        full.add(shards.ending)
    for n, published in enumerate(records):
        log(summary(published) + (f"; read up to max_tokens {shards.every[n].max_tokens:,}" if n in full else ""))
        if talks:
            log(answers_of(published.label, talks[n]))
        for line in tallies[n].kinds.warnings(published.label):
            log(line)
    samples.write(part / SAMPLES, [sources.label(source) for source in shards.every])
    return records, held_out, talks


def _counted(
    shards: Shards, joined: int
) -> tuple[list[Tally], list[ChatCounts], dict[tuple[int, Split], Counts], DroppedSamples]:
    """What the first joined shards have: read and dropped, and conversations (none of text), by source; kept by source
    and split; examples of what was dropped."""
    tallies = [Tally() for _ in shards.every]
    talks = [ChatCounts() for _ in shards.every] if shards.chat is not None else []
    kept: dict[tuple[int, Split], Counter[str]] = {}
    samples = DroppedSamples(shards.spec.steps)
    for number, shard in enumerate(shards.joined[:joined]):
        counts = read_counts(shards, number)
        tallies[shard.source].update(counts.tally)
        if talks:
            talks[shard.source] = talks[shard.source].with_more(counts.talks)
        for split, each in counts.splits.items():
            kept.setdefault((shard.source, split), Counter()).update(each.model_dump())
        for reason, rule, excerpt in counts.samples:
            samples.add(shard.source, Dropped(reason, rule, excerpt))
    return tallies, talks, {key: Counts(**counts) for key, counts in kept.items()}, samples


def _texts(part: Path, shards: Shards, layout: ShardOffsets) -> dict[Split, HeldOut]:
    """Put the texts of the held-out splits together."""
    held_out: dict[Split, HeldOut] = {}
    for split, sizes in layout.texts.items():
        file = part / held_out_name(split)
        with file.open("wb") as stream:
            for number, (of_member, _) in enumerate(layout.members):
                if of_member == split:
                    stream.write(Item(shards.joining, "packed", number).file.read_bytes())
        held_out[split] = HeldOut(bytes=sum(sizes), gzip_bytes=file.stat().st_size)
    return held_out


def _with_token_sets(
    part: Path,
    shards: Shards,
    layout: ShardOffsets,
    tallies: list[Tally],
    kept: dict[tuple[int, Split], Counts],
    linked: list[int],
    log: Callable[[str], None],
) -> dict[Split, HeldOut]:
    """Write the sources that are tokens behind all others, and the held-out texts with theirs."""
    from llmrecipes.data.preparation.token_sets import write_set  # loads megatron-core

    texts: dict[HeldOutSplit, TextToWrite] = {}
    with ExitStack() as stack:

        def add_text(split: HeldOutSplit, text: bytes) -> None:
            if split not in texts:
                texts[split] = TextToWrite(part / held_out_name(split), stack)
            texts[split].add(text)

        for split, sizes in layout.texts.items():
            for number, size in enumerate(sizes):
                if size:
                    add_text(split, used_item(shards, split, number).file.read_bytes())
        seen = Seen(shards.spec.steps, shards.digests())
        for number, source in enumerate(shards.every):
            if not source.tokenized:
                continue
            tallies[number], splits, in_place = write_set(
                part, source, shards.spec, seen, partial(stem, number), add_text, log
            )
            kept.update({(number, split): counts for split, counts in splits.items()})
            linked += [number] if in_place else []
    return {split: HeldOut(bytes=text.bytes, gzip_bytes=text.file.stat().st_size) for split, text in texts.items()}
