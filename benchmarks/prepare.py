"""Speed of `prepare`: raw text into `.bin/.idx`, beside Hugging Face `datasets.map` with the same tokenizer.

    python benchmarks/prepare.py [--cores N] [--repeats N]

Both turn the standard library's source into token files; the tokenizer is trained before the clock starts. `prepare`
also reads, hashes, drops duplicates, splits, compresses held-out text and hashes its files; `datasets.map` does none of
that and starts from texts in memory. Both are held to the same cores (Linux). Wall-clock time is what a user waits,
processor time what it takes where the machine is busy with something else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from llmrecipes.data import checked, corpus, tokenizer
from llmrecipes.data.corpus import EncoderSpec
from llmrecipes.data.encode import load
from llmrecipes.data.split import SplitRule
from llmrecipes.data.steps import Seen, StepSpec
from llmrecipes.data.write import write
from llmrecipes.recipe.schema import Source

VOCABULARY = 8192
SOURCES = (Source(type="stdlib"),)
STEPS = StepSpec(SplitRule((98.0, 1.0, 1.0)))


def ours(folder: Path, tokenizer_file: Path, cores: int) -> None:
    """Everything `prepare` does behind the training of the tokenizer."""
    spec = EncoderSpec(tokenizer_file, "", 0, "uint16", True, STEPS)
    write(folder, SOURCES, spec, cores, lambda line: None)
    checked.describe(folder, checked.Ids("uint16", VOCABULARY))


def theirs(folder: Path, texts: list[str], backend: tokenizers.Tokenizer, cores: int) -> None:
    """`datasets.map` with the library's fastest call, one process a core, written as Arrow."""
    import datasets

    source = datasets.Dataset.from_dict({"text": texts})

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = backend.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, 0] for encoding in found]}

    source.map(
        encode,
        batched=True,
        batch_size=100,
        num_proc=cores if cores > 1 else None,
        remove_columns=["text"],
        features=datasets.Features({"ids": datasets.List(datasets.Value("uint16"))}),
        cache_file_name=str(folder / "tokens.arrow"),
    )


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


def main() -> None:
    """Print one line a system and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import megatron.core.datasets.indexed_dataset  # noqa: F401  (its import is not what is measured)

    datasets.disable_progress_bars()

    kept = list(corpus.kept(SOURCES[0], Seen(STEPS)))
    texts, mib = [document.text.decode() for document in kept], sum(len(document.text) for document in kept) / 2**20
    backend, _ = tokenizer.train(texts, VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        backend.save(str(file))
        fast = load(file.read_text())
        found = {
            "llmrecipes prepare": measure(lambda out: ours(out, file, len(cores)), arguments.repeats),
            "datasets.map": measure(lambda out: theirs(out, texts, fast, len(cores)), arguments.repeats),
        }
    print(f"{platform.platform()}, {len(cores)} core(s), {mib:.1f} MiB of text, median of {arguments.repeats}")
    for name, (wall, processor) in found.items():
        print(
            f"{name:20} {mib / wall / len(cores):6.1f} MiB/s a core by the clock ({wall:.2f} s), "
            f"{mib / processor:6.1f} MiB a second of processor time"
        )
    keys = ("wall_seconds", "processor_seconds")
    print(json.dumps({"mib": mib, **{name: dict(zip(keys, pair, strict=True)) for name, pair in found.items()}}))


if __name__ == "__main__":
    main()
