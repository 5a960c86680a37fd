"""`prepare`: from a recipe's sources to a folder that training only reads.

The folder is written under a temporary name and renamed when it is complete, so a killed `prepare` leaves nothing that
looks finished. Another call for the same recipe finds it and does nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import llmrecipes
from llmrecipes.data import checked, sources
from llmrecipes.data import manifest as manifests
from llmrecipes.data.manifest import ChatRecord, DataManifest, File, TokenizerRecord
from llmrecipes.data.prepared import (
    TOKENIZER,
    Prepared,
    check_index,
    content,
    fingerprint,
    index_usable,
    max_length,
    open_prepared,
)
from llmrecipes.data.steps import StepSpec, require_usable, step_spec
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.hardware.cluster import cpu_cores
from llmrecipes.io import sync, write_synced
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import MIB

if TYPE_CHECKING:
    from llmrecipes.data.chat import ChatSpec

__all__ = ["Prepared", "fingerprint", "open_prepared", "prepare"]


def prepare(
    recipe: Recipe,
    data_dir: Path,
    *,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Ensure that the recipe's tokens and sample indices exist. Runs in one process, without a process group.

    Args:
        recipe: whose data.
        data_dir: folder of all prepared data; created if missing.
        workers: tokenizing processes, unless there is little text; None: one for each CPU this process may use.
        progress: receives progress messages.

    Returns:
        The opened folder.

    Raises:
        UserError: sources or tokenizer unusable, folder damaged or not writable.
    """
    log = progress or (lambda line: None)
    target = data_dir / fingerprint(recipe)
    if target.is_dir():
        prepared = open_prepared(recipe, data_dir)
        prepared.check(prepared.manifest.files, log)
        _warn_if_changed(recipe, prepared, log)
        if index_usable(recipe, prepared):  # also where the folder is read-only
            check_index(recipe, prepared, log)
            log(f"data is prepared in {target}")
            return prepared
    import_megatron()
    with _writable(data_dir), _lock(data_dir, target.name, log):
        if not target.is_dir():
            _build(recipe, target, workers or max(1, int(cpu_cores())), log)
        prepared = open_prepared(recipe, data_dir)
        # Loads megatron-core, which costs seconds where all is prepared.
        from llmrecipes.data.dataset import build_order

        build_order(recipe, prepared, log)
    return prepared


def _build(recipe: Recipe, target: Path, workers: int, log: Callable[[str], None]) -> None:
    started = time.monotonic()
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # from a killed run; the lock is ours
    try:
        part.mkdir()
        manifest, contents = _fill(recipe, part, target.name, workers, log)
        write_synced(part / manifests.NAME, f"{manifest.model_dump_json(indent=1)}\n".encode())
        sync(part)
        part.rename(target)
        sync(target.parent)
        checked.remember(target, contents)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    total = sum(file.bytes for file in manifest.files.values())
    log(f"data is prepared in {target}: {total / MIB:.1f} MiB, {time.monotonic() - started:.1f} s")


def _fill(
    recipe: Recipe, part: Path, name: str, workers: int, log: Callable[[str], None]
) -> tuple[DataManifest, dict[str, checked.Content]]:
    from megatron.core.datasets.indexed_dataset import DType

    from llmrecipes.data import templates
    from llmrecipes.data.corpus import EncoderSpec
    from llmrecipes.data.write import write

    every, steps = recipe.data.sources, step_spec(recipe.data)
    require_usable(recipe.data)
    for source in every:
        sources.files(source)  # report a missing source before minutes of work
    if recipe.data.chat is not None:
        templates.of_recipe(recipe)  # and a missing template
    tokenizer = _tokenizer(recipe, steps, part, log)
    spec_of_chat = _chat(recipe, part)
    dtype = DType.optimal_dtype(tokenizer.vocab_size).__name__
    by_word = recipe.data.tokenizer.type == "bpe"
    spec = EncoderSpec(part / TOKENIZER, tokenizer.sha256, tokenizer.eod, dtype, by_word, steps, spec_of_chat)
    records, held_out, talks = write(part, every, spec, workers, log, recipe.data.chat)
    packages = ("megatron-core", "numpy", "tokenizers", "datasets", "transformers")
    contents = checked.describe(part, checked.Ids(dtype, tokenizer.vocab_size))
    manifest = DataManifest(
        format=manifests.FORMAT,
        fingerprint=name,
        data=content(recipe),
        versions={
            "llmrecipes": llmrecipes.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
        dtype=dtype,
        tokenizer=tokenizer,
        sources=records,
        held_out=held_out,
        files={name: File(bytes=content.bytes, sha256=content.sha256) for name, content in contents.items()},
        chat=None
        if spec_of_chat is None
        else ChatRecord(
            origin=spec_of_chat.template.origin,
            special_tokens=dict(spec_of_chat.template.special_tokens),
            sources=talks,
        ),
    )
    return manifest, contents


def _chat(recipe: Recipe, part: Path) -> ChatSpec | None:
    """How conversations are encoded; their template is written beside the tokens."""
    chat = recipe.data.chat
    if chat is None:
        return None
    from llmrecipes.data import templates
    from llmrecipes.data.chat import ChatSpec

    template = templates.of_recipe(recipe)
    (part / templates.NAME).write_text(template.source, encoding="utf-8")
    return ChatSpec(template, max_length(recipe), chat.overlong == "truncate")


def _tokenizer(recipe: Recipe, steps: StepSpec, part: Path, log: Callable[[str], None]) -> TokenizerRecord:
    from llmrecipes.data import corpus, tokenizer
    from llmrecipes.data.templates import special_tokens

    section, sample_bytes = recipe.data.tokenizer, None
    if section.type == "bpe":
        started = time.monotonic()
        chat = recipe.data.chat
        sample = corpus.training_sample(recipe.data.sources, steps, chat=chat)
        sample_bytes = sum(len(text.encode()) for text in sample)
        log(f"training a byte-level BPE of {recipe.model.vocab_size:,} tokens on {sample_bytes / MIB:.1f} MiB")
        backend, eod = tokenizer.train(sample, recipe.model.vocab_size, special_tokens(chat))
        seconds = time.monotonic() - started
        size = tokenizer.vocabulary(backend)
        log(f"trained a byte-level BPE of {size:,} tokens on {sample_bytes / MIB:.1f} MiB in {seconds:.1f} s")
    else:
        backend, eod = tokenizer.load_huggingface(section, recipe.model.vocab_size)
    file = part / TOKENIZER
    file.write_text(backend.to_str(), encoding="utf-8")
    return TokenizerRecord(
        type=section.type,
        vocab_size=tokenizer.vocabulary(backend),
        eod=eod,
        sha256=manifests.sha256(file),
        trained_on_bytes=sample_bytes,
    )


def _warn_if_changed(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> None:
    """Warn if the sources exist and have changed; the prepared data is still used."""
    for source, record in zip(recipe.data.sources, prepared.manifest.sources, strict=True):
        try:
            now = sources.listing(source)
        except (UserError, OSError):
            continue  # prepared elsewhere: the sources need not exist on this machine
        then = record.files
        if now and then and now.sha256 != then.sha256:
            log(
                f"note: {record.label} has changed since it was prepared ({then.files:,} files, now {now.files:,}); "
                f"the prepared data is used, delete {prepared.path} to prepare it again"
            )
    named = recipe.data.chat and recipe.data.chat.chat_template
    if named and Path(named).is_file():
        from llmrecipes.data import templates

        if manifests.sha256(Path(named)) != prepared.manifest.files[templates.NAME].sha256:
            log(
                f"note: {named} has changed since the data was prepared; the earlier template is used, "
                f"delete {prepared.path} to prepare it again"
            )


@contextmanager
def _lock(data_dir: Path, name: str, log: Callable[[str], None]) -> Iterator[None]:
    """One `prepare` of a folder at a time; a killed one releases it."""
    from filelock import FileLock, Timeout

    lock = FileLock(data_dir / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"waiting for another prepare of {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writable(data_dir: Path) -> Iterator[None]:
    """Report a read-only folder or a full disk as one message."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write prepared data: {error.strerror or error}",
            where=str(error.filename or data_dir),
            fix="choose another --data-dir, or free some disk space",
        ) from error
