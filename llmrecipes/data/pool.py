"""Worker processes that turn batches of documents into ids: the steps of preparation, then the tokenizer."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path

from llmrecipes.data.chat import ChatSpec, chat_encoder
from llmrecipes.data.corpus import Batch
from llmrecipes.data.encode import Encode, Encoded, encoder
from llmrecipes.data.steps import Document, StepSpec, pipeline
from llmrecipes.errors import UserError

_ALONE = 32  # batches, 1 MiB each: processes take longer to start than these to encode


@dataclass(frozen=True)
class EncoderSpec:
    """All a worker process needs to make its steps and its encoder; see `encode.encoder`.

    Args:
        tokenizer: its `tokenizer.json`.
        identity: SHA-256 of that file; a process may later see a different file under the same name.
        steps: what happens to a document before.
        chat: the documents are conversations.
    """

    tokenizer: Path
    identity: str
    eod: int
    dtype: str
    by_word: bool
    steps: StepSpec
    chat: ChatSpec | None = None


@dataclass(frozen=True)
class Worked:
    """A batch when it comes back.

    Args:
        source: its number.
        outcomes: of each text that was read, in order: the document, or the reason why it is dropped. The texts
            of training documents are left out.
        encoded: the ids of the documents.
    """

    source: int
    outcomes: list[Document | str]
    encoded: Encoded


def encode_all(batches: Iterable[Batch], spec: EncoderSpec, workers: int) -> Generator[Worked, None, None]:
    """Each batch with its ids, in the order of `batches`; at most two batches per worker are in flight.

    The first batches, and all of them with one worker, are encoded in this process. Closing
    the iterator stops the processes.

    Raises:
        UserError: a process was killed.
    """
    every = iter(batches)
    for batch in every if workers == 1 else islice(every, _ALONE):
        yield _work(spec, batch)
    following = next(every, None)
    if following is None:
        return
    # Spawned, not forked: a fork would copy locks held by threads of the libraries loaded here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_live_with_parent)
    try:
        waiting: deque[Future[Worked]] = deque()
        for batch in chain([following], every):
            waiting.append(pool.submit(_work, spec, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process of `prepare` was killed, most often by the kernel, out of memory",
            where="--workers",
            fix=f"fewer than --workers {workers}, or more memory",
        ) from error
    finally:
        # A stopped `prepare` waits for the batches in flight, about 1 MiB each, not for those that are queued.
        pool.shutdown(cancel_futures=True)


def _live_with_parent() -> None:
    """In a worker: ignore signals that the parent handles, and exit with the parent if it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(spec: EncoderSpec, batch: Batch) -> Worked:
    run = _pipeline(spec.steps)
    outcomes = [run(text) for text in batch.texts]
    texts = [each.text for each in outcomes if isinstance(each, Document)]
    encoded = _encoder(spec)(texts)
    for place, each in enumerate(outcomes):  # only what is written goes back to the process that writes
        if isinstance(each, Document) and (each.split == "train" or spec.chat is not None):
            outcomes[place] = replace(each, text=b"")
    return Worked(batch.source, outcomes, encoded)


_pipeline = cache(pipeline)


@cache
def _encoder(spec: EncoderSpec) -> Encode:
    content = spec.tokenizer.read_text(encoding="utf-8")
    if spec.chat is not None:
        return chat_encoder(content, spec.dtype, spec.chat)
    return encoder(content, spec.eod, spec.dtype, by_word=spec.by_word)
