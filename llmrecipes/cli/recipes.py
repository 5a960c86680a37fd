"""`list`, `new`, `show`, `clusters`, `schema` and `docs`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmrecipes.cli import completion, tables
from llmrecipes.cli.shared_options import (
    NO_OVERRIDES,
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RecipeArgument,
)
from llmrecipes.cli.tables import TextTable
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.workflow.new import Made, Wanted


def list_recipes(as_json: JsonOption = False) -> None:
    """List recipes with their size."""
    from llmrecipes.files import recipes_dir

    rows = summaries(recipes_dir())
    tables.show(json.dumps(rows, indent=2) if as_json else recipe_table(rows))


def new(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of the recipe; without it, ask for all values on the terminal."),
    ] = None,
    overrides: OverridesArgument = NO_OVERRIDES,
    params: Annotated[
        str | None,
        typer.Option(
            "--params",
            metavar="N",
            help="Make a model of N parameters within 5%, such as 350m or 1b, after the closest recipe.",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="RECIPE", help="Use the shape of this recipe.", autocompletion=completion.recipes
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Translate a configuration of Megatron-LM, axolotl, LLaMA-Factory, torchtitan, NeMo, Megatron-Bridge "
            "or Hugging Face, and list what is left out.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="TYPE:PATH", help="Train on this source, such as jsonl:FILE or hub:NAME; repeatable."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME",
            help="Use bpe (trained on the data), or the tokenizer of a Hugging Face model.",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(
            "--seq-length",
            metavar="N",
            min=2,
            help="Train on sequences of N tokens; default: as in the recipe whose shape is used.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N", help="Train on N tokens, such as 20b; default: 20 per parameter."),
    ] = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the recipe to this folder.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the recipe if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a recipe from options or another program's file.

    Without NAME, it asks on the terminal. Layout, batch and recomputation are chosen so that it fits the machine.
    """
    from llmrecipes.commandline import command_line
    from llmrecipes.workflow.new import Wanted, amount, make, write

    if name is not None and "=" in name:  # the name may be left out with --from
        overrides = [name, *overrides]
        name = None
    given = _Given(name, params, like, tuple(data or ()), tokenizer, seq_length, tokens, cluster_name, nodes)
    if name is None and source is None:
        if as_json or not sys.stdin.isatty():
            raise UserError(
                "not set",
                where="NAME",
                rule="NAME is required unless run on a terminal",
                fix="llmrecipes new NAME --params 1b",
            )
        given = _ask(given)
    wanted = Wanted(
        name=given.name or "",
        params=None if given.params is None else amount(given.params, "--params"),
        like=like,
        data=given.data,
        tokenizer=given.tokenizer,
        seq_length=given.seq_length,
        tokens=None if given.tokens in (None, "auto") else amount(str(given.tokens), "--tokens"),
        cluster=given.cluster,
        nodes=given.nodes,
        overrides=tuple(overrides),
    )
    if source is not None:
        _translate(source, wanted, out, force=force, as_json=as_json)
        return
    created = make(wanted)
    path = write(created.recipe.name, created.text, out, force=force)
    plan = created.plan
    if as_json:
        shown = {"path": str(path), "like": created.like, "fits": plan.fits, "world_size": plan.world_size}
        shown |= {"parameters": plan.num_parameters.total, "tokens": plan.total_tokens}
        print(json.dumps({**shown, "no_files": created.elsewhere}, indent=2))
        return
    _print_made(created, path)
    print(f"plan:  {command_line('plan', path, options={'cluster': given.cluster, 'nodes': given.nodes})}")


class _Given(NamedTuple):
    """Options of `new`, as they are written."""

    name: str | None
    params: str | None
    like: str | None
    data: tuple[str, ...]
    tokenizer: str | None
    seq_length: int | None
    tokens: str | None
    cluster: str | None
    nodes: int | None


def _ask(given: _Given) -> _Given:
    """Ask on the terminal for what is not given."""
    name = typer.prompt("Name of the recipe")
    params = given.params
    if params is None and given.like is None:
        params = typer.prompt("Parameters of the model (350m, 1b, 7b)")
    data = given.data or typer.prompt("Data: stdlib, jsonl:FILE, text:FOLDER or hub:NAME, separated by spaces").split()
    tokenizer = given.tokenizer or typer.prompt(
        "Tokenizer: bpe, or the name of a Hugging Face tokenizer", default="bpe"
    )
    seq_length = given.seq_length or typer.prompt("Tokens per sequence", default=2048, type=int)
    tokens = given.tokens or typer.prompt("Tokens to train on (20b; auto: 20 per parameter)", default="auto")
    named = given.cluster or typer.prompt(
        "Cluster profile (llmrecipes clusters lists them; local: this machine)", default="local"
    )
    cluster = None if named == "local" else named
    nodes = given.nodes
    if cluster is not None and nodes is None:
        nodes = typer.prompt("Nodes", default=1, type=int)
    return _Given(name, params, given.like, tuple(data), tokenizer, seq_length, tokens, cluster, nodes)


def _print_made(created: Made, path: Path) -> None:
    from llmrecipes.console import number
    from llmrecipes.plan.check import gib

    plan = created.plan
    print(f"wrote  {path}: {number(plan.num_parameters.total)} parameters in the shape of {created.form}")
    steps = created.recipe.train.train_iters
    ranks = plan.world_size
    print(
        f"       {number(plan.total_tokens)} tokens in {steps:,} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    for path_of_source in created.elsewhere:
        print(f"note   no files on this machine: {path_of_source}")
    memory = f"{gib(plan.largest.memory.total)} of {gib(plan.largest.memory_capacity_bytes)} a rank"
    print(f"plan   {'fits' if plan.fits else 'does NOT fit'}: {memory}")


def _translate(source: Path, wanted: Wanted, out: Path, *, force: bool, as_json: bool) -> None:
    from llmrecipes.commandline import command_line
    from llmrecipes.foreign.read import account, translate
    from llmrecipes.workflow.new import write

    made = translate(source, wanted)
    path = write(made.recipe.name, made.text, out, force=force, source=source)
    if as_json:
        print(json.dumps({"path": str(path), **made.draft.as_dict()}, indent=2))
        return
    rows = made.draft.rows
    tables.show(TextTable([(made.draft.kind, "value", "recipe", "why"), *account(rows)]))
    left = [row for row in rows if not row.key]
    differ = sum(row.differs for row in left)
    print(f"wrote  {path}: {len(rows) - len(left)} values; {len(left)} left out, of which {differ} change the training")
    for line in made.draft.advice:
        print(line)
    print(f"plan:  {command_line('plan', path, options={'cluster': wanted.cluster, 'nodes': wanted.nodes})}")


def show(recipe: RecipeArgument, overrides: OverridesArgument = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Show a resolved recipe: every key with its value."""
    from llmrecipes.recipe.load import load, to_yaml
    from llmrecipes.recipe.reading.layouts import UNDECIDED, undecided
    from llmrecipes.recipe.rules.extra_rules import not_verified

    loaded = load(recipe, overrides)
    if as_json:
        print(json.dumps({"recipe": loaded.recipe.model_dump(mode="json"), "hash": loaded.hash}, indent=2))
    else:
        notes = [f"# {note}" for note in not_verified(loaded.recipe)]
        if undecided(loaded.recipe):
            notes.append(f"# layout: auto: {UNDECIDED}")
        tables.show(f"# {loaded.path}, hash {loaded.hash[:12]}", *notes, to_yaml(loaded.recipe))


def clusters(as_json: JsonOption = False) -> None:
    """List cluster profiles."""
    from llmrecipes.hardware.load import clusters_dir, names

    rows = cluster_summaries(names(clusters_dir()))
    tables.show(json.dumps(rows, indent=2) if as_json else cluster_table(rows))


def schema() -> None:
    """Print the JSON Schema of recipe files, for editors."""
    from llmrecipes.recipe.reading.keys import json_schema

    print(json_schema(), end="")


def docs(
    check: Annotated[bool, typer.Option("--check", help="Only check the files; fail if they are out of date.")] = False,
) -> None:
    """Generate docs/reference/keys.md and two files in recipes/."""
    from llmrecipes.files import require_checkout

    root = require_checkout("llmrecipes docs")
    files = _generated(root)
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    if check and stale:
        raise UserError(
            f"out of date: {', '.join(str(path.relative_to(root)) for path in stale)}", fix="llmrecipes docs"
        )
    for path in stale:
        path.write_text(files[path], "utf-8")
        print(f"wrote {path.relative_to(root)}")
    if not stale:
        print("up to date")


LIST = "list.json"
"""File of a folder of recipes with what `list` prints of each, and the SHA-256 of the file that it was made from."""


def summaries(recipes: Path, *, known: bool = True) -> list[dict[str, Any]]:
    """Name, parameters, training tokens and description of the recipes in a folder; an invalid one has its `error`.

    Args:
        recipes: the folder.
        known: recipes that have not changed since `LIST` was written are not read: all take most of the time of `list`.
    """
    written = _written(recipes / LIST) if known else {}
    rows = []
    for path in sorted(recipes.glob("*.yaml"), key=lambda path: path.stem):
        row = written.get(path.stem)
        if not isinstance(row, dict) or row.pop("sha256", None) != _sha256(path):
            row = _summary(path.stem, recipes)
        rows.append({"name": path.stem, **row})
    return rows


def _written(path: Path) -> dict[str, Any]:
    from llmrecipes.untrusted import Refused, read_json

    try:
        content = read_json(path)
    except (OSError, Refused):  # the folder has none, or one of another program
        return {}
    return content if isinstance(content, dict) else {}


def _sha256(path: Path) -> str | None:
    from hashlib import sha256

    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:  # reading it as a recipe says why
        return None


def _generated(root: Path) -> dict[Path, str]:
    """The generated files of a checkout with their expected text."""
    from llmrecipes.recipe.reading.keys import generated

    recipes = root / "recipes"
    rows = {row.pop("name"): row for row in summaries(recipes, known=False)}
    listed = {name: {"sha256": _sha256(recipes / f"{name}.yaml"), **row} for name, row in rows.items()}
    return {**generated(root), recipes / LIST: json.dumps(listed, indent=1, ensure_ascii=False) + "\n"}


def recipe_table(rows: list[dict[str, Any]]) -> TextTable:
    """The summaries as a table."""
    from llmrecipes.console import number

    cells = [("recipe", "parameters", "tokens", "description")]
    for row in rows:
        if "error" in row:
            cells.append((row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"))
        else:
            cells.append((row["name"], number(row["parameters"]), number(row["tokens"]), row["description"]))
    return TextTable(cells, right=(1, 2))


def _summary(name: str, recipes: Path) -> dict[str, Any]:
    from llmrecipes.plan.parameters import count
    from llmrecipes.recipe.derived.batch_schedule import tokens_of
    from llmrecipes.recipe.derived.shape import shape
    from llmrecipes.recipe.load import load

    try:
        recipe = load(name, directory=recipes).recipe
    except UserError as error:  # one invalid file must not hide the others
        return {"error": str(error)}
    tokens = tokens_of(recipe)
    parameters = count(recipe.model, shape(recipe.model)).total
    return {"parameters": parameters, "tokens": tokens, "description": recipe.description}


def cluster_summaries(names: list[str]) -> list[dict[str, Any]]:
    """Profiles as plain data; an invalid one has its `error` instead."""
    return [_cluster_summary(name) for name in names]


def cluster_table(rows: list[dict[str, Any]]) -> TextTable:
    """The summaries as a table."""
    return TextTable([("cluster", "node", "between nodes", "description"), *map(_cluster_cells, rows)])


def _cluster_summary(name: str) -> dict[str, Any]:
    from llmrecipes.hardware.load import load_profile

    try:
        return load_profile(name).model_dump(mode="json")
    except UserError as error:  # one invalid file must not hide the others
        return {"name": name, "error": str(error)}


def _cluster_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if "error" in row:
        return row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"
    node = f"{row['gpus_per_node']} × {row['gpu']['name']}" if row["gpu"] else f"{row['cpu_cores']} cores"
    link = row["inter_node"]
    return row["name"], node, f"{link['kind']} {link['gb_per_s']:g} GB/s", row["description"]
