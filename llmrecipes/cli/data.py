"""`data`: parsing and printing only."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli.shared_options import DATA, NO_OVERRIDES, DataOption, JsonOption, OverridesArgument, RecipeArgument
from llmrecipes.cli.tables import TextTable
from llmrecipes.cli.tables import show as print_parts
from llmrecipes.data.steps.split import SPLITS, Split
from llmrecipes.errors import UserError
from llmrecipes.redact import redact

if TYPE_CHECKING:
    from llmrecipes.data.folder.overview import ShownDocument
    from llmrecipes.data.folder.prepared import Prepared

app = typer.Typer(
    help="Show prepared documents and their statistics.",
    rich_markup_mode=None,
    invoke_without_command=True,
)

EXAMPLE = 60
"""Characters of an example in a table."""
BAR = 40
COUNTED = "bold green"
"""Style of tokens that count for the loss."""
_FIM = {"fim_psm": "prefix, suffix, middle", "fim_spm": "suffix, prefix, middle"}


@app.callback()
def help_without_command(ctx: typer.Context) -> None:
    """Print the help where no command is named."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    split: Annotated[str, typer.Option("--split", metavar="SPLIT", help="Show train, valid or test.")] = "train",
    documents: Annotated[int, typer.Option("--documents", metavar="N", min=1, help="Show N documents.")] = 3,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, help="Show the first N tokens of each document.")
    ] = 60,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed for choosing documents.")] = 0,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """Show random documents: text, tokens, which tokens count in the loss, and where documents end."""
    wanted = _split(split)
    _quietly()
    from llmrecipes.console import console
    from llmrecipes.data.folder.overview import random_documents
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.recipe.load import load

    prepared = open_prepared(load(recipe, overrides).recipe, data_dir)
    shown = list(random_documents(prepared, wanted, documents, seed))
    if as_json:
        print(json.dumps([asdict(document) for document in shown], indent=1))
        return
    out = console()
    coloured = prepared.manifest.chat is not None and out.is_terminal and out.color_system is not None
    for document in shown:
        _print_document(document, prepared, wanted, tokens, coloured=coloured)


def _print_document(document: ShownDocument, prepared: Prepared, split: str, tokens: int, *, coloured: bool) -> None:
    from rich.text import Text

    from llmrecipes.console import console
    from llmrecipes.data.folder.overview import runs

    every = document.tokens
    counted = f"the loss counts {sum(token.loss for token in every):,}" + (", in colour" if coloured else "")
    rearranged = f"; fill-in-the-middle: {_FIM[document.fim]}" if document.fim else ""
    head = f"{document.source}, document {document.number:,} of {split}: {len(every):,} tokens"
    print(f"{head}, of which {counted}{rearranged}")
    if coloured:
        pieces = [
            (_visible(redact(text), keep="\n"), COUNTED if loss else "")
            for loss, text in runs(prepared, every[:tokens])
        ]
        console().print(Text.assemble(*pieces), soft_wrap=True)
    else:
        for loss, group in groupby(every[:tokens], key=lambda token: token.loss):
            parts = "|".join("END" if token.end else _visible(token.text) for token in group)
            print(f"  {'loss   ' if loss else 'no loss'} {parts}")
    if len(every) > tokens:
        print(f"  … {len(every) - tokens:,} more tokens")


@app.command()
def stats(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with plots, languages and domains to FILE."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """Print documents, tokens, bytes per token, lengths, and what every step dropped, with an example."""

    _quietly()
    from llmrecipes.data.folder import overview
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides).recipe
    prepared = open_prepared(loaded, data_dir)
    statistics = overview.stats(prepared)
    if html is not None:
        from llmrecipes.report import data_page, run_page

        languages = overview.languages(prepared)
        domains = overview.domains(loaded.data.sources)
        statistics = replace(statistics, languages=languages, domains=domains)
        run_page.write(html, data_page.page(loaded.name, prepared, statistics))
    if as_json:
        sources = [asdict(source) | {"bytes_per_token": source.bytes_per_token} for source in statistics.sources]
        print(json.dumps({"path": str(prepared.path), **asdict(statistics), "sources": sources}, indent=1))
        return
    rows = [("source", "read", "documents", "tokens", "bytes", "bytes/token")]
    dropped = [("source", "step", "dropped", "changed", "rules", "example")]
    for source in statistics.sources:
        rate = "" if source.bytes_per_token is None else f"{source.bytes_per_token:.2f}"
        figures = (f"{value:,}" for value in (source.read, source.documents, source.tokens, source.bytes))
        rows.append((source.label, *figures, rate))  # type: ignore[arg-type]
        for step in source.dropped:
            rules = ", ".join(f"{name} {count:,}" for name, count in step.rules.items())
            example = _visible((step.example or "")[:EXAMPLE])
            dropped.append((source.label, step.step, f"{step.dropped:,}", f"{step.changed:,}", rules, example))
    most = max((length.documents for length in statistics.lengths), default=1)
    lengths = [("tokens from", "documents", "tokens", "")]
    for length in statistics.lengths:
        bar = "#" * -(-BAR * length.documents // most)
        lengths.append((f"{length.least:,}", f"{length.documents:,}", f"{length.tokens:,}", bar))
    print_parts(TextTable(rows, right=(1, 2, 3, 4, 5)), "", TextTable(dropped, right=(2, 3)), "")
    print_parts(TextTable(lengths, right=(0, 1, 2)), "", str(prepared.path), *([] if html is None else [str(html)]))


def _quietly() -> None:
    """Import megatron-core, without its warnings of packages that are not installed."""
    from llmrecipes.console import setup_logging
    from llmrecipes.hardware.builds import import_megatron

    setup_logging()
    import_megatron()


def _split(name: str) -> Split:
    for split in SPLITS:
        if split == name:
            return split
    raise UserError(f"{name!r} is not a split", where="--split", rule=f"one of {', '.join(SPLITS)}")


def _visible(text: str, keep: str = "") -> str:
    """Line breaks and control characters as escapes, except some."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
