"""`prepare`: from a recipe's sources to a folder that training only reads.

The folder is written under a temporary name and renamed when it is complete, so a killed `prepare` leaves nothing that
looks finished; the shards that it has encoded are kept for the next call. Another call for the same recipe finds the
folder and does nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import llmrecipes
from llmrecipes.data.folder import card, checked
from llmrecipes.data.folder import data_manifest as manifests
from llmrecipes.data.folder.data_manifest import ChatRecord, DataManifest, File, TokenizerRecord
from llmrecipes.data.folder.prepared import (
    TOKENIZER,
    Prepared,
    check_index,
    content,
    fingerprint,
    has_scores,
    index_folder,
    index_usable,
    max_length,
    open_prepared,
)
from llmrecipes.data.preparation.executor import EXECUTORS, REPORT_SECONDS, Executor, Processes
from llmrecipes.data.read.curriculum import require_same_scores
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.steps import StepSpec, require_usable, step_spec
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.hardware.cluster import cpu_cores
from llmrecipes.io import sync, write_synced
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.schema import Recipe, Source
from llmrecipes.recipe.sections.plugins import resolve
from llmrecipes.units import MIB

if TYPE_CHECKING:
    import tokenizers

    from llmrecipes.data.preparation.corpus import EncoderSpec
    from llmrecipes.data.preparation.shards import Shards
    from llmrecipes.data.tokens.chat import ChatSpec

__all__ = ["Prepared", "fingerprint", "open_prepared", "prepare"]


def prepare(
    recipe: Recipe,
    data_dir: Path,
    *,
    workers: int | None = None,
    on: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Ensure that the recipe's tokens and sample indices exist. Runs without a process group.

    Args:
        recipe: whose data.
        data_dir: folder of all prepared data; created if missing.
        workers: processes, unless there is little text; None: one for each CPU this process may use.
        on: name of the executor in `executor.EXECUTORS`, with `workers` items at a time; None: processes of this
            machine.
        progress: receives progress messages.

    Returns:
        The opened folder.

    Raises:
        UserError: sources or tokenizer unusable, folder damaged or not writable.
    """
    if on is not None and on not in EXECUTORS:
        raise UserError(f"unknown executor {on!r}", where="--on", rule=f"one of {', '.join(EXECUTORS)}")
    log = progress or (lambda line: None)
    target = data_dir / fingerprint(recipe)
    if target.is_dir():
        prepared = open_prepared(recipe, data_dir)
        prepared.check(prepared.manifest.files, log)
        _warn_if_changed(recipe, prepared, log)
        _say_if_without_bos(prepared, log)
        stages = stage_recipes(recipe)
        if all(index_usable(stage, prepared) for stage in stages):  # also where the folder is read-only
            for stage in stages:
                require_same_scores(stage.data.curriculum, check_index(stage, prepared, log))
            log(f"data is prepared in {target}")
            return prepared
    else:
        require_usable(recipe.data)  # before anything is listed, read or written
    import_megatron()
    with _writable(data_dir), _lock(data_dir, target.name, log):
        if not target.is_dir():
            _build(recipe, target, partial(_executor, on, workers, log), log)
        prepared = open_prepared(recipe, data_dir)
        # Loads megatron-core, which costs seconds where all is prepared.
        from llmrecipes.data.read.dataset import build_order

        for stage_recipe in stage_recipes(recipe):
            build_order(stage_recipe, prepared, log)
            require_same_scores(stage_recipe.data.curriculum, index_folder(stage_recipe, prepared))
    return prepared


def _executor(on: str | None, workers: int | None, log: Callable[[str], None]) -> Executor:
    if on is None:
        return Processes(workers or max(1, int(cpu_cores())), log)
    executor: Executor = resolve(EXECUTORS[on])(workers)
    log(f"on {on}, with {executor.workers:,} items at a time")
    return executor


def _shards_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.shards")


def _shards(recipe: Recipe, target: Path, executor: Executor, log: Callable[[str], None]) -> Shards:
    """The shards of a recipe, with the tokenizer; those of other sources or another version are deleted.

    Args:
        recipe: whose data is prepared.
        target: the folder that is to be made.
        executor: cleans the texts that a tokenizer is trained on.
        log: receives what is notable.
    """
    from llmrecipes.data.preparation.shards import PLAN, Shards, plan, read_plan

    folder = _shards_folder(target)
    stored = None
    if (folder / PLAN).exists():
        try:
            stored = read_plan(folder, recipe.data.sources)
        except UserError as error:
            if error.again:
                raise
            log(f"note: started over, because {folder} was {error.what}")
    if stored is None:
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            part.mkdir()
            tokenizer, dtype, _ = _encoding(recipe, part, executor, log)
            stored = plan(recipe.data.sources, dtype, tokenizer)
            write_synced(part / PLAN, f"{stored.model_dump_json(indent=1)}\n".encode())
            sync(part)
            part.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    spec = _encoder_spec(recipe, folder, stored.tokenizer, stored.dtype)
    if tokenizer_json := _tokenizer_json(recipe, spec):
        from llmrecipes.data.tokens.encode import encoded_by

        log(encoded_by(tokenizer_json))
    return Shards(folder, recipe.data.sources, spec, tuple(stored.shards), recipe.data.chat)


def _build(recipe: Recipe, target: Path, executor: Callable[[], Executor], log: Callable[[str], None]) -> None:
    from llmrecipes.data.preparation.pipeline import run

    started = time.monotonic()
    part = target.with_name(f".{target.name}.part")
    workers = executor()  # first: a cluster that does not answer is said before minutes of work
    try:
        with closing(workers):
            shards = _shards(recipe, target, workers, log)
            for left in shards.folder.rglob(".*.part"):  # by a killed call
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            run(shards, workers, log)
        shutil.rmtree(part, ignore_errors=True)  # from a killed run; the lock is ours
        part.mkdir()
        manifest, contents = _fill(recipe, part, target.name, shards, log)
        write_synced(part / manifests.NAME, f"{manifest.model_dump_json(indent=1)}\n".encode())
        sync(part)
        part.rename(target)
        sync(target.parent)
        _delete_shards(target)  # first: it has second names of the files that are checked
        checked.remember(target, contents)
    except UserError as error:
        if not error.again:  # the corrected recipe or source has other shards, so these would stay for good
            _delete_shards(target)
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    total = sum(file.bytes for name, file in manifest.files.items() if not (target / name).is_symlink())
    log(f"data is prepared in {target}: {total / MIB:.1f} MiB, {time.monotonic() - started:.1f} s")


def _delete_shards(target: Path) -> None:
    """Under another name, so that no other call finds them half deleted, and what still runs adds nothing."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with suppress(FileNotFoundError):
        _shards_folder(target).rename(part)
    shutil.rmtree(part, ignore_errors=True)


def _encoding(
    recipe: Recipe, part: Path, executor: Executor, log: Callable[[str], None]
) -> tuple[TokenizerRecord, str, EncoderSpec]:
    """Tokenizer, type of ids, and how documents are encoded; tokenizer and template are written into the folder."""
    from megatron.core.datasets.indexed_dataset import DType

    from llmrecipes.data.preparation import token_sets
    from llmrecipes.data.tokens import templates
    from llmrecipes.data.tokens.tokenizer import read

    steps = step_spec(recipe.data)
    for source in (*recipe.data.valid_sources, *recipe.data.sources):
        sources.files(source)  # report a missing source before minutes of work
        if others := sources.left_out(source):
            log(f"note: {sources.label(source)}: not read: {others}")
        if columns := sources.unread(source, recipe.data.chat):
            log(f"note: {sources.label(source)}: columns not read: {', '.join(columns)[:400]}")
    if recipe.data.chat is not None:
        template = templates.of_recipe(recipe)  # and a missing template
        (part / templates.NAME).write_text(template.source, encoding="utf-8")
        if "strftime_now" in template.source:
            log(
                f"note: the chat template ({template.origin}) may write the date of today into conversations: "
                "data prepared on another day differ; a copy with a fixed date is data.chat.chat_template=FILE"
            )
    tokenizer = _tokenizer(recipe, steps, part, executor, log)
    talks = recipe.data.chat is not None and recipe.data.chat.preference is None
    if talks and not templates.ends_answers(template, (part / TOKENIZER).read_text("utf-8")):
        log(
            f"warning: no special token ends an answer in the chat template ({template.origin}): the model never "
            "stops; write {{ eos_token }} after the assistant's text"
        )
    for section in (recipe.data.sources, recipe.data.valid_sources):
        for number, source in enumerate(section):
            if source.tokenized:
                opened = read(part / TOKENIZER, tokenizer.eod, tokenizer.sha256)
                token_sets.check_tokenizer(number, source, opened, log)
    dtype = DType.optimal_dtype(tokenizer.vocab_size).__name__
    return tokenizer, dtype, _encoder_spec(recipe, part, tokenizer, dtype)


def _encoder_spec(recipe: Recipe, folder: Path, tokenizer: TokenizerRecord, dtype: str) -> EncoderSpec:
    """How documents are encoded with the tokenizer of a folder."""
    from llmrecipes.data.preparation import corpus
    from llmrecipes.data.tokens import infilling

    section = recipe.data.tokenizer
    by_word = section.type == "bpe" and section.pattern == "words"
    steps = step_spec(recipe.data)
    chat = _chat(recipe)
    fim = infilling.fim_spec(recipe.data, tokenizer.fim)
    file = folder / TOKENIZER
    identity = tokenizer.sha256
    prefix = tuple(tokenizer.prefix or ())
    scores = has_scores(recipe)
    return corpus.EncoderSpec(file, identity, tokenizer.eod, dtype, by_word, steps, chat, fim, scores, prefix)


def _tokenizer_json(recipe: Recipe, spec: EncoderSpec) -> str:
    """The tokenizer of texts, not conversations, unless it splits them into `words`; else empty."""
    texts = any(not source.tokenized for source in (*recipe.data.sources, *recipe.data.valid_sources))
    return spec.tokenizer.read_text(encoding="utf-8") if texts and not spec.by_word and spec.chat is None else ""


def _packages(recipe: Recipe, spec: EncoderSpec) -> list[str]:
    """What the data is made with."""
    from llmrecipes.data.tokens.encode import gigatoken
    from llmrecipes.data.tokens.gigatoken import PACKAGE

    tokenizer_json = _tokenizer_json(recipe, spec)
    fast = [PACKAGE] if tokenizer_json and not isinstance(gigatoken(tokenizer_json), str) else []
    return ["megatron-core", "numpy", "tokenizers", "datasets", "transformers", *fast]


def _fill(
    recipe: Recipe, part: Path, name: str, shards: Shards, log: Callable[[str], None]
) -> tuple[DataManifest, dict[str, checked.Content]]:
    from llmrecipes.data.preparation.pipeline import collect
    from llmrecipes.data.preparation.shards import read_plan
    from llmrecipes.data.preparation.valid_sets import write_sets
    from llmrecipes.data.tokens import templates

    stored = read_plan(shards.folder, recipe.data.sources)
    spec = shards.spec
    tokenizer = stored.tokenizer
    dtype = stored.dtype
    spec_of_chat = spec.chat
    for file in (TOKENIZER, *([] if recipe.data.chat is None else [templates.NAME])):
        shutil.copyfile(shards.folder / file, part / file)
    records, held_out, talks = collect(part, shards, log)
    sets = write_sets(part, recipe.data.valid_sources, spec, recipe.model.seq_length)
    for label, counts in sets.items():
        log(f"{label}: {counts.documents:,} held-out documents, {counts.tokens:,} tokens")
    manifest = DataManifest(
        format=manifests.FORMAT,
        fingerprint=name,
        data=content(recipe),
        versions={
            "llmrecipes": llmrecipes.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _packages(recipe, spec)},
        },
        dtype=dtype,
        tokenizer=tokenizer,
        sources=records,
        held_out=held_out,
        valid_sources=sets,
        files={},
        chat=None
        if spec_of_chat is None
        else ChatRecord(
            origin=spec_of_chat.template.origin,
            special_tokens=dict(spec_of_chat.template.special_tokens),
            sources=talks,
        ),
    )
    (part / card.NAME).write_text(card.card(manifest), encoding="utf-8")
    contents = checked.describe(part, checked.Ids(dtype, tokenizer.vocab_size))
    files = {name: File(bytes=content.bytes, sha256=content.sha256) for name, content in contents.items()}
    return manifest.model_copy(update={"files": files}), contents


def _chat(recipe: Recipe) -> ChatSpec | None:
    """How conversations are encoded."""
    chat = recipe.data.chat
    if chat is None:
        return None
    from llmrecipes.data.tokens import templates
    from llmrecipes.data.tokens.chat import ChatSpec

    return ChatSpec(
        templates.of_recipe(recipe), max_length(recipe), chat.overlong == "truncate", chat.preference is not None
    )


def _sampling(log: Callable[[str], None]) -> Callable[[int, Source], None]:
    """Says every few seconds how much of the text is read."""
    said = time.monotonic()

    def report(size: int, source: Source) -> None:
        nonlocal said
        if time.monotonic() - said > REPORT_SECONDS:
            said = time.monotonic()
            log(f"{size / MIB:.1f} MiB of text to train on; at {sources.label(source)}")

    return report


def _tokenizer(
    recipe: Recipe, steps: StepSpec, part: Path, executor: Executor, log: Callable[[str], None]
) -> TokenizerRecord:
    from llmrecipes.data.preparation import corpus
    from llmrecipes.data.tokens import infilling, tokenizer
    from llmrecipes.data.tokens.templates import special_tokens

    section = recipe.data.tokenizer
    sample_bytes = None
    if section.type == "bpe":
        started = time.monotonic()
        chat = recipe.data.chat
        log(f"reading up to {corpus.SAMPLE_BYTES / MIB:.0f} MiB of text to train a byte-level BPE")
        sample = corpus.training_sample(recipe.data.sources, steps, executor, _sampling(log), chat)
        sample_bytes = sum(len(text.encode()) for text in sample)
        log(f"training a byte-level BPE of {recipe.model.vocab_size:,} tokens on {sample_bytes / MIB:.1f} MiB")
        fim_tokens = tuple(infilling.token_texts(recipe.data).values())
        backend, eod = tokenizer.train(
            sample, recipe.model.vocab_size, special_tokens(chat), fim_tokens, pattern=section.pattern
        )
        seconds = time.monotonic() - started
        size = tokenizer.vocabulary(backend)
        log(f"trained a byte-level BPE of {size:,} tokens on {sample_bytes / MIB:.1f} MiB in {seconds:.1f} s")
    else:
        backend, eod = tokenizer.load_huggingface(section, recipe.model.vocab_size)
    prefix = _prefix(recipe, backend, eod, log)
    fim = infilling.require_tokens(backend, recipe.data)
    file = part / TOKENIZER
    file.write_text(backend.to_str(), encoding="utf-8")
    return TokenizerRecord(
        type=section.type,
        vocab_size=tokenizer.vocabulary(backend),
        eod=eod,
        sha256=manifests.sha256(file),
        trained_on_bytes=sample_bytes,
        prefix=list(prefix),
        fim=fim,
    )


def _prefix(recipe: Recipe, backend: tokenizers.Tokenizer, eod: int, log: Callable[[str], None]) -> tuple[int, ...]:
    """Ids that documents of text begin with. Sets of tokens stay as they are, and decide where they are all data."""
    from llmrecipes.data.tokens.tokenizer import prefix_of

    section = recipe.data.tokenizer
    given = section.type == "huggingface" and section.add_bos_token is not None
    if not given and all(source.tokenized for source in recipe.data.sources):
        return ()
    prefix = prefix_of(section, backend, eod)
    if prefix:
        names = "".join(str(backend.id_to_token(number)) for number in prefix)
        what = "prompts of text" if recipe.data.chat is not None else "documents"
        log(f"{what} begin with {names}, as the tokenizer's texts in transformers (data.tokenizer.add_bos_token)")
    return prefix


def _say_if_without_bos(prepared: Prepared, log: Callable[[str], None]) -> None:
    """Data of earlier versions has no BOS, whatever its tokenizer does."""
    from llmrecipes.data.tokens.tokenizer import added_ids

    record = prepared.manifest.tokenizer
    if record.prefix is None and not set(added_ids(prepared.tokenizer().backend)[0]) <= {record.eod}:
        log(
            "note: prepared by an earlier version, without the BOS that this tokenizer puts before texts, and used so; "
            f"delete {prepared.path} to prepare it again with BOS"
        )


def _warn_if_changed(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> None:
    """Warn if the sources exist and have changed; the prepared data is still used."""
    for source, record in zip(recipe.data.sources, prepared.manifest.sources, strict=True):
        if sources.in_store(source):
            continue  # no run waits for a store
        try:
            now = sources.listing(source)
        except (UserError, OSError):
            continue  # prepared elsewhere: the sources need not exist on this machine
        then = record.files
        if now and then and now.sha256 != then.sha256:
            log(
                f"note: {record.label} has changed since it was prepared ({then.files:,} files, now {now.files:,}); "
                f"the prepared data is used: delete {prepared.path} to prepare it again"
            )
    named = recipe.data.chat and recipe.data.chat.chat_template
    if named and Path(named).is_file():
        from llmrecipes.data.tokens import templates

        if manifests.sha256(Path(named)) != prepared.manifest.files[templates.NAME].sha256:
            log(
                f"note: {named} has changed since the data was prepared; the earlier template is used: delete "
                f"{prepared.path} to prepare it again"
            )


@contextmanager
def _lock(data_dir: Path, name: str, log: Callable[[str], None]) -> Iterator[None]:
    """One `prepare` of a folder at a time; a killed one releases it."""
    from filelock import FileLock, Timeout

    lock = FileLock(data_dir / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"waiting for another process that prepares {name}")
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
