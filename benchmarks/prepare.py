"""Speed of `prepare`: raw text into `.bin/.idx`, beside `datasets.map` and Megatron-LM's way, with the same tokenizer.

    python benchmarks/prepare.py [--pattern words|gpt2|llama3] [--vocabulary N] [--mixed] [--cores N] [--repeats N]
    python benchmarks/prepare.py --compare [--pattern gpt2|llama3] [--vocabulary N]

All turn the same JSON lines into token files; the tokenizer is trained before the clock starts. Text is the standard
library's source, with `--mixed` also the documentation, manual pages and licences of this machine and the installed
packages. `words` is the pattern of a `bpe` tokenizer; the others are those of GPT-2 and Llama 3, which run through
gigatoken if that is installed.

`prepare` also hashes documents, drops duplicates, splits, compresses held-out text and hashes its files; the others do
none of that. `datasets.map` starts from texts in memory. Megatron-LM's `tools/preprocess_data.py` reads, tokenizes and
writes one document at a time; its loop is here without its pool of processes. All are held to the same cores (Linux).
Wall-clock time is what a user waits, processor time what it takes where the machine is busy with something else. All
but `prepare` itself get every n-th document, some 8 MiB, as they are slow. Of tokens only, documents are in memory, and
one process is timed.

`--compare` compares the ids of gigatoken and tokenizers on the mixed text, document by document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import tokenizers

from llmrecipes.data.folder import checked
from llmrecipes.data.preparation import corpus
from llmrecipes.data.preparation.corpus import EncoderSpec
from llmrecipes.data.preparation.executor import Processes
from llmrecipes.data.preparation.pipeline import collect, run
from llmrecipes.data.preparation.shards import Shards, cut
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.split import SplitRule
from llmrecipes.data.steps.steps import StepSpec
from llmrecipes.data.tokens import encode, tokenizer
from llmrecipes.data.tokens.gigatoken import Gigatoken
from llmrecipes.recipe.sections.source import make_source
from llmrecipes.units import MIB

STEPS = StepSpec(SplitRule((98.0, 1.0, 1.0)))
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".json", ".yaml", ".h", ".c", ".cpp", ".cu", ".html", ".js", ".css"}
TRAINED_ON = 64 * MIB
ENOUGH = 130 * MIB
LONGEST = 4 * MIB
SOME = 8 * MIB


def documents(mixed: bool) -> Iterator[str]:
    """The text, without equal documents."""
    seen, size = set(), 0
    kinds = ("stdlib", "machine") if mixed else ("stdlib",)
    texts = (text for kind in kinds for text in sources.documents(make_source(type=kind)))
    for text in (*texts, *(packages() if mixed else ())):
        if text and text not in seen and not text.isspace() and size < ENOUGH:
            seen.add(text)
            size += len(text)
            yield text


def packages() -> Iterator[str]:
    """Text files of the installed packages."""
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*")):
        if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size < LONGEST:
            try:
                yield file.read_bytes().decode()
            except UnicodeDecodeError:
                continue


def trained(pattern: str, vocabulary: int, texts: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE with a pattern; its token 0 ends documents."""
    if pattern != "gpt2":
        return tokenizer.train(texts, vocabulary, pattern=pattern)[0]
    pre, backend = tokenizers.pre_tokenizers, tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[tokenizer.EOD],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def ours(folder: Path, text: Path, file: Path, dtype: str, vocabulary: int, cores: int, *, by_word: bool) -> None:
    """Everything `prepare` does behind the training of the tokenizer."""
    spec = EncoderSpec(file, "", 0, dtype, by_word, STEPS)
    sources = (make_source(type="jsonl", path=str(text)),)
    shards = Shards(folder / ".shards", sources, spec, tuple(cut(sources)))
    shards.folder.mkdir()
    with closing(Processes(cores, print)) as executor:
        run(shards, executor, lambda line: None)
    collect(folder, shards, lambda line: None)
    shutil.rmtree(shards.folder)
    checked.describe(folder, checked.Ids(dtype, vocabulary))


def of_datasets(folder: Path, texts: list[str], backend: tokenizers.Tokenizer, dtype: str, cores: int) -> None:
    """`datasets.map` with the library's fastest call, one process a core, written as Arrow."""
    import datasets

    source = datasets.Dataset.from_dict({"text": texts})

    def encoded(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = backend.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, 0] for encoding in encodings]}

    source.map(
        encoded,
        batched=True,
        batch_size=100,
        num_proc=cores if cores > 1 else None,
        remove_columns=["text"],
        features=datasets.Features({"ids": datasets.List(datasets.Value(dtype))}),
        cache_file_name=str(folder / "tokens.arrow"),
    )


def of_megatron(folder: Path, text: Path, file: Path, dtype: str) -> None:
    """Megatron-LM's loop with a Hugging Face tokenizer of transformers."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import PreTrainedTokenizerFast

    backend = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=tokenizer.EOD)
    builder = IndexedDatasetBuilder(str(folder / "text_document.bin"), dtype=np.dtype(dtype).type)
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            ids = backend(json.loads(line)["text"])["input_ids"]
            builder.add_document([*ids, 0], [len(ids) + 1])
    builder.finalize(str(folder / "text_document.idx"))


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(work: Callable[[Path], None], repeats: int) -> tuple[float, float]:
    """Median wall-clock and processor seconds of a run in an empty folder."""
    wall, processor = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            started, used = time.perf_counter(), processor_seconds()
            work(Path(folder))
            wall.append(time.perf_counter() - started)
            processor.append(processor_seconds() - used)
    return statistics.median(wall), statistics.median(processor)


def tokens_only(file: Path, texts: list[str], dtype: str, repeats: int, *, by_word: bool) -> tuple[float, float]:
    """Median seconds of a pass over documents in memory, behind a first one."""
    encoded = encode.encoder(file.read_text(encoding="utf-8"), 0, dtype, by_word=by_word)
    batches, size = [list[bytes]()], 0
    for text in texts:
        batches[-1].append(text.encode())
        size += len(batches[-1][-1])
        if size > MIB:
            batches.append([])
            size = 0

    def once(_: Path) -> None:
        for batch in batches:
            encoded(batch)

    measure(once, 1)
    return measure(once, repeats)


def compare(file: Path, texts: list[str]) -> dict[str, object]:
    """How many documents have the same ids, and how many of them go to tokenizers anyway."""
    content = file.read_text(encoding="utf-8")
    fast, library = encode.gigatoken(content), encode.load(content)
    if isinstance(fast, str):
        raise SystemExit(encode.encoded_by(content))
    left = different = 0
    for text in texts:
        ids = np.array(library.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint32)
        left += not fast.takes(text.encode())
        different += not np.array_equal(ids, fast.rows([text.encode()])[0])
    return {"documents": len(texts), "to_tokenizers": left, "different": different, "distrusted": Gigatoken.differences}


def without_gigatoken(work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """The figures with tokenizers instead."""
    fast = encode.gigatoken
    try:
        encode.gigatoken = lambda _: "left out"  # type: ignore[assignment]
        corpus._encoder.cache_clear()
        return work()
    finally:
        encode.gigatoken = fast
        corpus._encoder.cache_clear()


def main() -> None:
    """Print one line a system and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", choices=("words", "gpt2", "llama3"), default="words")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--mixed", action="store_true", help="other text of this machine too, up to 130 MiB")
    parser.add_argument("--compare", action="store_true", help="compare ids on the mixed text instead")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    texts = list(documents(arguments.mixed or arguments.compare))
    mib = sum(len(text.encode()) for text in texts) / MIB
    backend = trained(arguments.pattern, arguments.vocabulary, texts[:: 1 + int(mib * MIB / TRAINED_ON)])
    vocabulary, by_word = tokenizer.vocabulary(backend), arguments.pattern == "words"
    dtype = "uint16" if vocabulary < 65500 else "int32"
    facts = f"{arguments.pattern}, {vocabulary:,} tokens, {len(texts):,} documents, {mib:.1f} MiB of text"
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder) / "tokenizer.json", Path(folder) / "text.jsonl"
        backend.save(str(file))
        if arguments.compare:
            print(json.dumps({"facts": facts, **compare(file, texts)}))
            return
        os.sched_setaffinity(0, cores)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import datasets
        import megatron.core.datasets.indexed_dataset  # noqa: F401  (its import is not what is measured)

        datasets.disable_progress_bars()
        some = texts[:: 1 + int(mib * MIB / SOME)]
        few = Path(folder) / "few.jsonl"
        for path, every in ((text, texts), (few, some)):
            with path.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps({"text": each}) + "\n" for each in every)
        library, repeats = encode.load(file.read_text(encoding="utf-8")), arguments.repeats
        some_mib = sum(len(each.encode()) for each in some) / MIB

        def prepare(of: Path) -> tuple[float, float]:
            return measure(lambda out: ours(out, of, file, dtype, vocabulary, len(cores), by_word=by_word), repeats)

        def tokens() -> tuple[float, float]:
            return tokens_only(file, some, dtype, repeats, by_word=by_word)

        figures = {"prepare": (mib, *prepare(text)), "tokens only": (some_mib, *tokens())}
        if not by_word:
            print(encode.encoded_by(file.read_text(encoding="utf-8")))
            figures["prepare, tokenizers"] = (some_mib, *without_gigatoken(lambda: prepare(few)))
            figures["tokens only, tokenizers"] = (some_mib, *without_gigatoken(tokens))
        others: dict[str, Callable[[Path], None]] = {
            "datasets.map": lambda out: of_datasets(out, some, library, dtype, len(cores)),
            "preprocess_data": lambda out: of_megatron(out, few, file, dtype),
        }
        figures |= {name: (some_mib, *measure(work, repeats)) for name, work in others.items()}
    print(f"{platform.platform()}, {len(cores)} core(s), {facts}, median of {arguments.repeats}")
    for name, (size_mib, wall, processor) in figures.items():
        used = 1 if name.startswith(("tokens", "preprocess")) else len(cores)
        print(
            f"{name:24} {size_mib / wall / used:6.1f} MiB/s a core by the clock ({wall:.2f} s), "
            f"{size_mib / processor:6.1f} MiB a second of processor time"
        )
    keys = ("mib", "wall_seconds", "processor_seconds")
    print(json.dumps({name: dict(zip(keys, values, strict=True)) for name, values in figures.items()}))


if __name__ == "__main__":
    main()
