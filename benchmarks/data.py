"""The steps of `data.steps`: speed of each, and recall and precision of `near_duplicates` on planted copies.

    python benchmarks/data.py [--copies N] [--documents N] [--classifier MODEL LABEL] [--only-speed] [--only-index]

Text is the standard library's source, one process. A copy has a share of its words replaced by other words of the
corpus, at random places. Similarity is the exact Jaccard index of shingles. Recall: of the copies whose similarity to
their original is at least the threshold, those that are dropped. Precision: of all dropped documents, those that are
planted copies or have a kept document with a similarity of at least the threshold; and without regard to what was
planted, those that have one of at least the threshold, or of two standard errors below it, from which on documents are
dropped. Memory and time of comparing are measured with random signatures, of which a third are copies. Seconds are
processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from llmrecipes.data.preparation import repeated_documents
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.copies import NearDuplicates, band_keys, bands_of, margin, shingles, sketch
from llmrecipes.data.steps.steps import Dropped, Seen, pipeline, step_spec
from llmrecipes.recipe.reading.keys import options_of
from llmrecipes.recipe.schema import Data
from llmrecipes.recipe.sections.data_steps import NearDuplicatesStep
from llmrecipes.recipe.sections.source import make_source
from llmrecipes.units import MIB

EDITS = (0.01, 0.02, 0.05, 0.1, 0.2)
LEAST_WORDS = 100
KEYS: dict[str, dict[str, object]] = {
    "length": {"min_characters": 1},
    "language": {"languages": ["en"]},
    "decontaminate": {"paths": [__file__]},
}


def speed(texts: list[str], step: dict[str, object]) -> dict[str, float]:
    """MiB/s of a step and the share of documents that it drops."""
    spec = step_spec(Data.model_validate({"steps": [step]}))
    run, seen = pipeline(spec), Seen(spec)
    run(texts[0])
    started, dropped = time.process_time(), 0
    for text in texts:
        outcome = run(text)
        dropped += isinstance(outcome, Dropped) or isinstance(seen.add(outcome), Dropped)
    seconds = time.process_time() - started
    return {
        "mib_per_second": sum(len(text.encode()) for text in texts) / MIB / seconds,
        "dropped": dropped / len(texts),
    }


def planted(texts: list[str], copies: int, threshold: float) -> dict[str, object]:
    """Recall at each share of edits, and precision."""
    rng = random.Random(1)
    settings = NearDuplicatesStep(type="near_duplicates", threshold=threshold).settings
    step, n = NearDuplicates(**settings), settings["shingle_words"]
    originals = [text.split() for text in texts if len(text.split()) >= LEAST_WORDS]
    vocabulary = [word for words in originals for word in words]
    grams, kept_with = [], defaultdict(list)

    def add(words: list[str]) -> bool:
        text = " ".join(words)
        grams.append(frozenset(shingles(text, n)))
        if kept := step.add(step.mark(text)):
            for gram in grams[-1]:
                kept_with[gram].append(len(grams) - 1)
        return kept

    dropped = [number for number, words in enumerate(originals) if not add(words)]
    # a copy of a dropped one may have no kept document like it
    kept = sorted(set(range(len(originals))) - set(dropped))
    by_edit: dict[str, dict[str, float | None]] = {}
    all_similar = all_missed = 0
    for share in EDITS:
        similarities, missed, hits = [], 0, 0
        for number in rng.sample(kept, copies):
            stays = add([rng.choice(vocabulary) if rng.random() < share else word for word in originals[number]])
            similarity = jaccard(grams[number], grams[-1])
            similarities.append(similarity)
            hits += not stays
            missed += stays and similarity >= threshold
            if not stays:
                dropped.append(len(grams) - 1)
        similar = sum(similarity >= threshold for similarity in similarities)
        all_similar, all_missed = all_similar + similar, all_missed + missed
        by_edit[f"{share:.0%}"] = {
            "mean_similarity": sum(similarities) / copies,
            "dropped": hits / copies,
            "copies_at_threshold": similar,
            "recall_at_threshold": 1 - missed / similar if similar else None,
        }
    best = [max((jaccard(grams[d], grams[k]) for k in like(grams[d], kept_with)), default=0.0) for d in dropped]
    pairs = list(zip(dropped, best, strict=True))
    least = threshold - margin(threshold, settings["permutations"])
    return {
        "copies_at_threshold": all_similar,
        "originals": len(originals),
        "edits": by_edit,
        "recall_at_threshold": 1 - all_missed / all_similar,
        "dropped": len(dropped),
        "precision": sum(d >= len(originals) or value >= threshold for d, value in pairs) / len(dropped),
        "precision_at_threshold": sum(value >= threshold for value in best) / len(dropped),
        "precision_at_margin": sum(value >= least for value in best) / len(dropped),
    }


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def like(wanted: frozenset[str], kept_with: dict[str, list[int]]) -> set[int]:
    return {number for gram in wanted for number in kept_with.get(gram, ())}


def signatures(documents: int) -> Iterator[np.ndarray]:
    """Random signatures; of three documents one is a copy of one of the last thousand, with 5 % other values."""
    rng = np.random.default_rng(1)
    recent = rng.integers(0, 2**32, (1000, 128), np.uint32)
    for number in range(documents):
        if number % 3 == 2:
            values = recent[rng.integers(1000)].copy()
            other = rng.random(128) < 0.05
            values[other] = rng.integers(0, 2**32, int(other.sum()), np.uint32)
        else:
            values = rng.integers(0, 2**32, 128, np.uint32)
        recent[number % 1000] = values
        yield values


def marks(documents: int, bands: tuple[int, int]) -> Iterator[bytes]:
    for values in signatures(documents):
        yield np.concatenate([band_keys(values, *bands), sketch(values)]).tobytes()


def in_memory(documents: int) -> dict[str, float]:
    """Of the step in one process: microseconds and bytes a document."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step, seconds, dropped = NearDuplicates(0.8, 128, 5), 0.0, 0
    for mark in marks(documents, bands_of(0.8, 128)):
        started = time.process_time()
        dropped += not step.add(mark)
        seconds += time.process_time() - started
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "microseconds": 1e6 * seconds / documents,
        "dropped": dropped,
        "bytes": step.nbytes / documents,
        "peak_bytes": grown / documents,
    }


def by_ranges(documents: int, shards: int, folder: Path) -> dict[str, float]:
    """Of its stages on files, in this process: writing the bands of shards, and comparing ranges."""
    step, ranges = NearDuplicates(0.8, 128, 5), max(16, shards)
    files, size, writing = [folder / f"{number}.bands" for number in range(shards)], documents // shards, 0.0
    of_all = marks(size * shards, bands_of(0.8, 128))
    for file in files:
        with file.open("wb") as stream:
            for first in range(0, size, repeated_documents.PIECE):
                places = list(range(first, min(first + repeated_documents.PIECE, size)))
                chosen = [next(of_all) for _ in places]
                started = time.process_time()
                stream.write(repeated_documents.piece(places, chosen, step.bands, ranges))
                writing += time.process_time() - started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, wall, dropped = time.process_time(), time.monotonic(), set[tuple[int, int]]()
    for of_range in range(ranges):
        found = repeated_documents.dropped_in(files, of_range, ranges, step)
        dropped |= set(map(tuple, found.T.tolist()))
    seconds, wall = time.process_time() - started, time.monotonic() - wall
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "shards": shards,
        "ranges": ranges,
        "disk_bytes": sum(file.stat().st_size for file in files) / documents,
        "microseconds_writing": 1e6 * writing / documents,
        "microseconds_comparing": 1e6 * seconds / documents,
        "wall_comparing": wall,
        "dropped": len(dropped),
        "peak_bytes_a_band_of_a_range": grown / (documents * step.bands / ranges),
    }


def apart(function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """What a function returns in another process, whose peak is that of the function."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=300, help="of each share of edits")
    parser.add_argument("--documents", type=int, default=1_000_000, help="that are compared to measure memory")
    parser.add_argument("--shards", type=int, default=16, help="of them")
    parser.add_argument("--classifier", nargs=2, metavar=("MODEL", "LABEL"), help="fastText model, and a label to keep")
    parser.add_argument("--only-index", action="store_true", help="only measure memory and time of comparing")
    parser.add_argument("--only-speed", action="store_true", help="leave out the near-duplicates' recall and memory")
    arguments = parser.parse_args()
    keys = {kind: [KEYS.get(kind, {})] for kind in options_of("data.steps.N.type")[0]["enum"] if kind != "classifier"}
    keys["duplicates"].append({"span_sentences": 3})
    if arguments.classifier:
        keys["classifier"] = [{"model": arguments.classifier[0], "labels": arguments.classifier[1:]}]
    comparing: dict[str, dict[str, float]] = {}
    if not arguments.only_speed:
        with tempfile.TemporaryDirectory() as folder:
            comparing["in memory"] = apart(in_memory, arguments.documents)
            comparing["by ranges"] = apart(by_ranges, arguments.documents, arguments.shards, Path(folder))
    if arguments.only_index:
        print(json.dumps({"comparing": comparing}, indent=1))
        return
    texts = [text for text in sources.documents(make_source(type="stdlib")) if text and not text.isspace()]
    result = {
        "platform": platform.platform(),
        "documents": len(texts),
        "mib": sum(len(text.encode()) for text in texts) / MIB,
        "steps": {
            " ".join((kind, *(each if kind == "duplicates" else ()))): speed(texts, {"type": kind} | each)
            for kind, every in keys.items()
            for each in every
        },
        "planted": {str(threshold): planted(texts, arguments.copies, threshold) for threshold in (0.8, 0.6)}
        if comparing
        else None,
        "comparing": comparing,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
