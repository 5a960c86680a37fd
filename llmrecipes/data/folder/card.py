"""The dataset card of a prepared folder: what it is made of and what was done to it, for people who get the folder.

It has neither times nor versions, so that the same text prepared twice is the same folder; these are in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llmrecipes.data.folder.data_manifest import Counts, DataManifest, TokenizerRecord
from llmrecipes.data.steps.split import SPLITS

NAME = "README.md"


def card(manifest: DataManifest) -> str:
    """The card, as Markdown.

    Args:
        manifest: manifest of the folder; its files are not read.
    """
    data: dict[str, Any] = manifest.data
    total = [manifest.counts(split) for split in SPLITS]
    sources = [(_code(source.label), source.read, *_sums(source.splits.values())) for source in manifest.sources]
    documents, tokens, size = _sums(total)
    parts = [
        f"# Prepared data {manifest.fingerprint}",
        f"{documents:,} documents, {tokens:,} tokens, {size:,} bytes of text, written by `llmrecipes prepare`: token "
        "ids in megatron-core's `.bin` and `.idx` files, for pretraining. `manifest.json` has the checksum of every "
        "file and all counts.",
        "## Sources",
        _table(("source", "documents read", "kept", "tokens", "bytes of text"), sources),
        "The licences and terms of the sources apply to these files too; `llmrecipes` does not know them.",
        "## Splits",
        _table(
            ("split", "documents", "tokens", "bytes of text"),
            [(split, c.documents, c.tokens, c.bytes) for split, c in zip(SPLITS, total, strict=True)],
        ),
        "A document's split follows from the hash of its text.",
        "## What was dropped and changed",
        _table(("step", "settings", "documents dropped", "kept, but changed"), _steps(manifest)),
        "Exact copies of an earlier document are always dropped, even without the step `duplicates`.",
    ]
    if not any(step["type"] == "personal_data" for step in data.get("steps", ())):
        parts.append("Personal data was not masked.")
    if not any(step["type"] == "decontaminate" for step in data.get("steps", ())):
        parts.append("The text was not compared with evaluation tasks.")
    if manifest.valid_sources:
        sets = [(_code(name), c.documents, c.tokens, c.bytes) for name, c in manifest.valid_sources.items()]
        parts += [
            "## Held-out sets",
            _table(("set", "documents", "tokens", "bytes of text"), sets),
            "Their documents are not in the other splits.",
        ]
    record = manifest.tokenizer
    named = data["tokenizer"]["path"]
    origin = f"{_code(named)} from Hugging Face" if named else "a byte-level BPE trained on the training split"
    parts += ["## Tokenizer", f"{origin}: {record.vocab_size:,} ids, id {record.eod} ends a document{_begins(record)}."]
    return "\n\n".join(parts) + "\n"


def _sums(counts: Iterable[Counts]) -> tuple[int, int, int]:
    """Documents, tokens and bytes together."""
    each = list(counts)
    return sum(c.documents for c in each), sum(c.tokens for c in each), sum(c.bytes for c in each)


def _begins(record: TokenizerRecord) -> str:
    if record.prefix is None:
        return "; documents have no BOS (prepared by an earlier version)"
    return f", and documents of text begin with {', '.join(map(str, record.prefix))}" if record.prefix else ""


def _steps(manifest: DataManifest) -> list[tuple[object, ...]]:
    settings: dict[str, Any] = {"empty": {}, "undecodable": {}, "duplicates": {}}
    chosen: Any = manifest.data.get("steps", ())
    settings |= {step["type"]: {k: v for k, v in step.items() if k != "type"} for step in chosen}
    counted = {name: 0 for source in manifest.sources for name in (*source.steps, *source.changed)}
    return [
        (
            name,
            _code(json.dumps(settings[name], ensure_ascii=False)) if settings.get(name) else "",
            sum(
                {"empty": s.empty, "undecodable": s.undecodable, "duplicates": s.duplicates, **s.steps}.get(name, 0)
                for s in manifest.sources
            ),
            sum(s.changed.get(name, 0) for s in manifest.sources),
        )
        for name in {**settings, **counted}
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---:" if n else "---" for n in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in line)} |" for line in lines)


def _code(text: str) -> str:
    """Text of a recipe as code in a cell of a table."""
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    plain = plain.replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"
