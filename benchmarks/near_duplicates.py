"""Near-duplicates beside datatrove's MinHash, on the same documents with planted copies.

    python benchmarks/near_duplicates.py plant FILE [--originals N] [--copies N] [--words N]
    python benchmarks/near_duplicates.py ours FILE
    DATATROVE/bin/python benchmarks/near_duplicates.py datatrove FILE

datatrove 0.10.1 needs xxhash below 4, and so its own environment: `pip install datatrove==0.10.1 'xxhash<4' nltk spacy
tokenizers`. FILE has a document a line: files of the standard library, of their first words, and of each share of edits
copies, in which so many words are replaced by others at random places. Both compare the sets of sequences of five
words, datatrove with 21 buckets of six hashes, which are our 21 bands of six rows at 0.8. Seconds are processor time in
one process, from the texts to which are removed. Recall: of the copies whose Jaccard index with their original is at
least 0.8, the pairs of which one is removed. Precision: of those that are removed, the planted copies and their
originals, and others with a document as similar; and without regard to what was planted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import re
import struct
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from llmrecipes.recipe.sections.source import make_source

EDITS = (0.01, 0.02, 0.05, 0.1, 0.2)
THRESHOLD, WORDS, LEAST_WORDS = 0.8, 5, 100
BANDS, ROWS = 21, 6


def plant(file: Path, originals: int, copies: int, words: int) -> None:
    """Write originals, then copies, with the number of the original, the share and the similarity of each."""
    from llmrecipes.data.sources import sources
    from llmrecipes.data.steps.copies import shingles

    rng = random.Random(1)
    texts = [text.split()[:words] for text in sources.documents(make_source(type="stdlib")) if text]
    texts = rng.sample([text for text in texts if len(text) >= LEAST_WORDS], originals)
    vocabulary = [word for text in texts for word in text]
    rows: list[dict[str, object]] = [{"text": " ".join(text)} for text in texts]
    for share in EDITS:
        for number in rng.sample(range(originals), copies):
            copy = [rng.choice(vocabulary) if rng.random() < share else word for word in texts[number]]
            text, sets = " ".join(copy), []
            for each in (text, " ".join(texts[number])):
                sets.append(set(shingles(each, WORDS)))
            similarity = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
            rows.append({"text": text, "of": number, "share": share, "similarity": similarity})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def ours(texts: list[str]) -> tuple[float, set[int]]:
    """Processor time, and the numbers of the removed."""
    from llmrecipes.data.steps.copies import NearDuplicates
    from llmrecipes.recipe.sections.data_steps import NearDuplicatesStep

    settings = NearDuplicatesStep(type="near_duplicates", threshold=THRESHOLD).settings
    NearDuplicates(**settings).mark(texts[0])
    step, began = NearDuplicates(**settings), time.process_time()
    removed = {number for number, text in enumerate(texts) if not step.add(step.mark(text))}
    return time.process_time() - began, removed


def datatrove(texts: list[str]) -> tuple[float, set[int]]:
    """The same of its three stages, one task each; its tokenizer is loaded before."""
    from datatrove.data import Document  # type: ignore[import-untyped]
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-untyped]
    from datatrove.pipeline.dedup import (  # type: ignore[import-untyped]
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # type: ignore[import-untyped]
    from datatrove.utils.typeshelper import Languages  # type: ignore[import-untyped]

    config = MinhashConfig(n_grams=WORDS, num_buckets=BANDS, hashes_per_bucket=ROWS)

    def stages(folder: str, chosen: list[str]) -> None:
        signatures, buckets, removed = (f"{folder}/{name}" for name in ("signatures", "buckets", "removed"))
        documents = [Document(text=text, id=str(number)) for number, text in enumerate(chosen)]
        for number, (stage, tasks) in enumerate(
            (
                ([documents, MinhashDedupSignature(signatures, config=config, language=Languages.english)], 1),
                ([MinhashDedupBuckets(signatures, buckets, config=config)], BANDS),
                ([MinhashDedupCluster(buckets, removed, config=config)], 1),
            )
        ):
            LocalPipelineExecutor(stage, tasks=tasks, workers=1, logging_dir=f"{folder}/logs{number}").run()

    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as folder:
        stages(before, texts[:2])
        began = time.process_time()
        stages(folder, texts)
        seconds = time.process_time() - began
        content = b"".join(path.read_bytes() for path in Path(folder, "removed").glob("*.remove"))
    return seconds, {number for (number,) in struct.iter_unpack("<I", content)}


def judged(rows: list[dict[str, object]], removed: set[int]) -> dict[str, object]:
    """Recall at each share of edits, and precision."""
    grams: list[frozenset[tuple[str, ...]]] = []
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        words = re.findall(r"\w+", str(row["text"]).lower())
        grams.append(frozenset(zip(*(words[k:] for k in range(WORDS)), strict=False)))
        for gram in grams[-1]:
            holders[gram].append(number)

    def nearest(number: int) -> float:
        common = Counter(other for gram in grams[number] for other in holders[gram])
        del common[number]
        size = len(grams[number])
        return max((n / (size + len(grams[other]) - n) for other, n in common.items()), default=0.0)

    edits: dict[str, dict[str, float | None]] = {}
    planted, all_similar, all_hits = set[int](), 0, 0
    for share in EDITS:
        pairs = [
            (n, int(str(row["of"])), float(str(row["similarity"])))
            for n, row in enumerate(rows)
            if row.get("share") == share
        ]
        planted.update(number for pair in pairs for number in pair[:2])
        hits = [bool(removed & {copy, original}) for copy, original, _ in pairs]
        similar = [hit for hit, (_, _, similarity) in zip(hits, pairs, strict=True) if similarity >= THRESHOLD]
        all_similar, all_hits = all_similar + len(similar), all_hits + sum(similar)
        edits[f"{share:.0%}"] = {
            "mean_similarity": sum(similarity for _, _, similarity in pairs) / len(pairs),
            "removed": sum(hits) / len(hits),
            "copies_at_threshold": len(similar),
            "recall_at_threshold": sum(similar) / len(similar) if similar else None,
        }
    best = {number: nearest(number) for number in removed}
    return {
        "removed": len(removed),
        "edits": edits,
        "copies_at_threshold": all_similar,
        "recall_at_threshold": all_hits / all_similar,
        "precision": sum(n in planted or value >= THRESHOLD for n, value in best.items()) / len(best),
        "precision_at_threshold": sum(value >= THRESHOLD for value in best.values()) / len(best),
        "precision_at_0.73": sum(value >= 0.73 for value in best.values()) / len(best),
    }


def main() -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plant", "ours", "datatrove"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--originals", type=int, default=600)
    parser.add_argument("--copies", type=int, default=150, help="of each share of edits")
    parser.add_argument("--words", type=int, default=700, help="of a document, at most")
    arguments = parser.parse_args()
    if arguments.command == "plant":
        plant(arguments.file, arguments.originals, arguments.copies, arguments.words)
        return
    rows = [json.loads(line) for line in arguments.file.read_text(encoding="utf-8").splitlines()]
    texts = [row["text"] for row in rows]
    seconds, removed = (ours if arguments.command == "ours" else datatrove)(texts)
    mib = sum(len(text.encode()) for text in texts) / 2**20
    of = "rensa" if arguments.command == "ours" else "datatrove"
    print(
        json.dumps(
            {
                "version": f"{of} {importlib.metadata.version(of)}",
                "documents": len(texts),
                "mib": mib,
                "mib_per_second": mib / seconds,
                **judged(rows, removed),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
