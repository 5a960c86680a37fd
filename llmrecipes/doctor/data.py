"""Whether a recipe's data is prepared, and whether its source files are of similar size."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import MIB

UNEQUAL = 10
"""A file this many times larger than the median keeps one process busy after the others have finished."""


def check(recipe: Recipe, data_dir: Path) -> Iterator[Finding]:
    """Check the prepared data, or its sources if it is not prepared.

    Args:
        recipe: the recipe.
        data_dir: directory of prepared data.
    """
    from llmrecipes.data.prepared import TOKENIZER, fingerprint, open_prepared

    if (data_dir / fingerprint(recipe)).is_dir():
        try:
            prepared = open_prepared(recipe, data_dir)
            prepared.tokenizer()
        except UserError as error:
            yield fail(
                "data",
                str(error).splitlines()[0].removeprefix("error: "),
                "delete that folder, then llmrecipes prepare",
            )
            return
        counts = prepared.manifest.counts("train")
        yield ok("data", f"{prepared.path}: {counts.tokens:,} training tokens, {TOKENIZER}")
        return
    yield warn(
        "data",
        f"recipe {recipe.name} is not prepared in {data_dir}",
        command_line("prepare", recipe.name, data_dir=data_dir),
    )
    yield from _sources(recipe)


def _sources(recipe: Recipe) -> Iterator[Finding]:
    from llmrecipes.data.sources import files, label

    for source in recipe.data.sources:
        check_name = f"source {label(source)}"
        if source.type == "hub":
            yield warn(check_name, "is on the Hugging Face Hub", "llmrecipes prepare on a node with internet access")
            continue
        try:
            sizes = [file.stat().st_size for file in files(source)]
        except (UserError, OSError) as error:
            yield fail(check_name, str(error).splitlines()[0].removeprefix("error: "), "data.sources in the recipe")
            continue
        middle = statistics.median(sizes)
        if source.type in ("jsonl", "parquet") and len(sizes) > 1 and max(sizes) > UNEQUAL * max(middle, 1):
            what = f"the largest of {len(sizes)} files has {max(sizes) / max(middle, 1):.0f} times the median size"
            yield warn(check_name, what, "split it into files of equal size")
        else:
            yield ok(check_name, f"{len(sizes)} files, {sum(sizes) / MIB:,.1f} MiB")
    tokenizer = recipe.data.tokenizer
    if (
        tokenizer.type == "huggingface"
        and tokenizer.path
        and "/" in tokenizer.path
        and not Path(tokenizer.path).exists()
    ):
        yield warn("tokenizer", f"{tokenizer.path} is not a directory here", "a directory, or a node with Hub access")
