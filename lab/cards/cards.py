"""Recipe cards: what was planned, searched, dry run, verified, rehearsed and run of a recipe, as JSON files."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from llmrecipes.commandline import PROGRAM, command_line
from llmrecipes.errors import UserError
from llmrecipes.files import checkout, recipes_dir
from llmrecipes.hardware.load import load_profile
from llmrecipes.io import write_atomic
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.plan.speed.forecast import forecast_run
from llmrecipes.plan.speed.search import Candidate, fastest
from llmrecipes.recipe.load import Loaded, hash_of, load, names
from llmrecipes.runfiles import PLAN
from llmrecipes.tracking.run_environment import capture
from llmrecipes.units import GIB
from llmrecipes.untrusted import read_json
from llmrecipes.workflow.plan import plan_on

Log = Callable[[str], None]
PartName = Literal["dryrun", "verify", "smoke"]
PARTS: tuple[PartName, ...] = ("dryrun", "verify", "smoke")
_KEPT = {
    "dryrun": ("rank", "stage", "memory_gib", "planned_gib", "seconds"),
    "verify": ("ok", "layout", "iters", "max_rel_loss", "max_rel_grad_norm", "max_rel_param", "zero_stage"),
    "smoke": ("ok", "steps", "resumed_at", "first_loss", "last_loss", "first_difference"),
}


class CardPart(BaseModel):
    """One thing that was done with a recipe.

    Attributes:
        command: that does it again.
        recipe_hash: hash of all keys of the recipe that it was done with.
        figures: what came out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    commit: str
    date: str
    recipe_hash: str
    figures: dict[str, JsonValue]


class PublishedLayout(BaseModel):
    """A layout that somebody published, with the speed that was measured, if any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    gpus: int
    layout: str
    tokens_per_second_per_gpu: float | None = None


class Card(BaseModel):
    """A recipe's card. A part that was not done is null."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    cluster: str
    gpus: int = Field(ge=1)
    layout_source: str
    published: PublishedLayout | None = None
    planned: CardPart
    searched: CardPart | None = None
    dryrun: CardPart | None = None
    verify: CardPart | None = None
    smoke: CardPart | None = None
    run: CardPart | None = None

    @model_validator(mode="after")
    def _layouts_have_figures(self) -> Self:
        for part in (self.planned, self.searched):
            if part is not None and part.figures.get("layout") is not None:
                for key in ("tokens_per_second_per_gpu", "memory_gib"):
                    if not isinstance(part.figures.get(key), (int, float)):
                        message = f"figures of a layout have {key}"
                        raise ValueError(message)
        return self


_DGXC = "NVIDIA/dgxc-benchmarking"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
PUBLISHED = {
    "deepseek-v3": PublishedLayout(
        source=f"{_BRIDGE} model_verification_cards", gpus=1024, layout="TP2 PP8 VPP4 EP64 MBS1",
        tokens_per_second_per_gpu=1061.2,
    ),
    "gpt-175b": PublishedLayout(
        source=f"{_DGXC} v25.02.02 nemo_megatron", gpus=128, layout="TP4 PP8 VPP12 MBS1",
        tokens_per_second_per_gpu=493.0,
    ),
    "llama3-405b": PublishedLayout(
        source=f"{_DGXC} v25.05.05 llama3.1", gpus=512, layout="TP8 PP8 VPP8 CP2 MBS1",
        tokens_per_second_per_gpu=206.8,
    ),
    "llama3-70b": PublishedLayout(
        source=f"{_DGXC} v25.02.02 llama3.1", gpus=64, layout="TP4 PP4 VPP5 CP2 MBS1",
        tokens_per_second_per_gpu=1121.2,
    ),
    "llama3-8b": PublishedLayout(
        source=f"{_DGXC} v25.02.02 llama3.1", gpus=8, layout="CP2 MBS1", tokens_per_second_per_gpu=10253.5
    ),
    "mixtral-8x7b": PublishedLayout(source="NVIDIA/Megatron-LM examples/mixtral", gpus=32, layout="PP4 EP8"),
    "qwen3-30b-a3b": PublishedLayout(source=f"{_BRIDGE} 26.04, in fp8", gpus=16, layout="EP16 MBS1",
                            tokens_per_second_per_gpu=8901.0),
}  # fmt: skip
"""Layouts of vendors for the shapes of recipes; throughput from benchmarks/data/planner/published_runs.csv."""


def path_of(name: str) -> Path:
    """Where a recipe's card is."""
    return recipes_dir() / "cards" / f"{name}.json"


def require_name(name: str) -> None:
    """Refuse what is not the name of a recipe in recipes/: a card is kept under it.

    Raises:
        UserError: it is a path, or there is no such recipe.
    """
    if name not in names():
        close = get_close_matches(name, names(), n=3, cutoff=0.4)
        raise UserError(f"no shipped recipe {name!r}", where="RECIPE", rule=f"only recipes in {recipes_dir()} have "
        "cards",
                        fix=f"did you mean {' or '.join(close)}?" if close else "llmrecipes list")  # fmt: skip


def read(name: str) -> Card:
    """The card of a recipe.

    Raises:
        UserError: no such recipe, or it has no card, or that cannot be read.
    """
    require_name(name)
    path = path_of(name)
    if not path.is_file():
        raise UserError("no card", where=str(path), fix=f"python -m lab card {name} --write")
    try:
        card = Card.model_validate(read_json(path, root=path.parent))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError("cannot be read", where=str(path), rule="it must be as `python -m lab card --write` wrote it",
                        fix="remove it, and write it again") from error  # fmt: skip
    if card.recipe != name:
        raise UserError(f"is the card of {card.recipe!r}", where=str(path), rule="a card is named after its recipe",
                        fix="remove it, and write it again")  # fmt: skip
    return card


def write(card: Card) -> Path:
    """Replace a recipe's card.

    Raises:
        UserError: it cannot be written.
    """
    path = path_of(card.recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, card.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}",
            where=str(path),
            fix="set LLMRECIPES_RECIPES to a writable folder of recipes",
        ) from error
    return path


_BEGIN, _END = "<!-- python -m lab card --all -->\n", "<!-- end -->"


def all_cards() -> list[Card]:
    """The cards that there are, by recipe."""
    return [read(name) for name in names() if path_of(name).is_file()]


def renew_guide(table: Sequence[str]) -> None:
    """Put the table of the cards into the guide, in a checkout whose recipes they are of."""
    root = checkout()
    if root is None or recipes_dir().resolve() != (root / "recipes").resolve():
        return
    page = root / "docs/guide/recipes.md"
    head, _, rest = page.read_text("utf-8").partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    write_atomic(page, "\n".join((f"{head}{_BEGIN}", *table, "", f"{_END}{tail}")))


@dataclass(frozen=True)
class Asked:
    """What a card is made of besides the plan.

    Attributes:
        cluster, gpus: those of the plan; None: as the card has them, else `_target`.
        parts: done now, by running their commands.
        run: a run to be recorded.
    """

    cluster: str | None = None
    gpus: int | None = None
    parts: tuple[PartName, ...] = ()
    run: str | None = None


def make(name: str, asked: Asked, runs_dir: Path, log: Log) -> Card:
    """The card of a recipe of now: plan and search are made again, other parts kept unless they are asked for.

    Raises:
        UserError: the recipe or the profile is wrong, or a command failed.
    """
    require_name(name)
    loaded = load(name, [])
    before = read(name) if path_of(name).is_file() else None
    cluster, gpus = _target(loaded, before, asked)
    plan, _ = plan_on(loaded.recipe, nproc=gpus, cluster=cluster, nodes=None)
    gpus = plan.world_size
    options = {"cluster": cluster, "gpus": str(gpus)}
    planned = _part(command_line("plan", name, options=options), loaded, _planned(plan, cluster))
    if before is not None and (before.planned.figures, before.planned.recipe_hash) == (planned.figures, _hash(loaded)):
        planned = before.planned
    parts: dict[str, CardPart | None] = {}
    if before is not None:
        parts = {part: getattr(before, part) for part in (*PARTS, "run", "searched")}
    recorded = asked.parts or asked.run is not None
    # To record a part takes no new search of the same plan.
    if not recorded or parts.get("searched") is None or before is None or planned is not before.planned:
        log(f"{name}: search on {gpus} ranks of {cluster}")
        command = command_line("plan", name, options={**options, "search": True})
        parts["searched"] = _searched(loaded, plan, cluster, command)
    for part in asked.parts:
        words = _command(part, name, plan, cluster)
        log(" ".join((PROGRAM, *words)))
        parts[part] = _part(" ".join((PROGRAM, *words)), loaded, _figures(part, words))
    if asked.run is not None:
        parts["run"] = _run(asked.run, runs_dir, loaded)
    source = _layout_source(loaded.path)
    return Card(recipe=name, cluster=cluster, gpus=gpus, layout_source=source, published=PUBLISHED.get(name),
                planned=planned, **parts)  # fmt: skip


def stale(name: str) -> str | None:
    """What changed since a card was written; None if nothing did."""
    card, loaded = read(name), load(name, [])
    if card.planned.recipe_hash != _hash(loaded):
        return "the recipe has changed"
    plan, _ = plan_on(loaded.recipe, nproc=card.gpus, cluster=card.cluster, nodes=None)
    now = _planned(plan, card.cluster)
    differing = [key for key in now if now[key] != card.planned.figures.get(key)]
    return f"{', '.join(differing)} of its plan" if differing else None


def _target(loaded: Loaded, before: Card | None, asked: Asked) -> tuple[str, int | None]:
    """Where a recipe is planned: as asked, as before, else a laptop in fp32 and H100 in other types."""
    if asked.cluster is not None:
        return asked.cluster, asked.gpus
    if before is not None:
        return before.cluster, before.gpus if asked.gpus is None else asked.gpus
    published = PUBLISHED.get(loaded.recipe.name)
    if loaded.recipe.train.precision == "fp32":
        return "laptop", asked.gpus
    return "h100-ib", published.gpus if asked.gpus is None and published is not None else asked.gpus


def _planned(plan: RunPlan, cluster: str) -> dict[str, JsonValue]:
    """Figures of a plan, rounded, so that they are the same on every machine; speed only with coefficients."""
    figures: dict[str, Any] = {
        "num_parameters": plan.num_parameters.total,
        "num_active_parameters": plan.num_parameters.active,
        "memory_gib": _rounded(plan.largest.memory.total / GIB),
        "fits": plan.fits,
        "checkpoint_gib": _rounded(plan.checkpoint_bytes / GIB),
        "layout": None,
    }
    try:
        prediction = forecast_run(plan, load_profile(cluster))
    except UserError:
        return figures
    values = prediction.as_dict()
    keys = ("step_seconds", "tokens_per_second_per_gpu", "mfu_full", "mfu_causal", "days", "gpu_hours")
    return figures | {
        "layout": Candidate(prediction.plan.recipe, prediction).key,
        "gpu": prediction.device.name,
        **{key: _rounded(values[key]) for key in keys},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _searched(loaded: Loaded, plan: RunPlan, cluster: str, command: str) -> CardPart | None:
    profile = load_profile(cluster)
    try:
        forecast_run(plan, profile)
        best = fastest(loaded.recipe, plan.cluster, plan.world_size, profile, 1)[0]
    except UserError as error:
        return _part(command, loaded, {"layout": None, "reason": error.what}) if plan.cluster.gpus else None
    values = best.forecast.as_dict()
    speed = _rounded(values["tokens_per_second_per_gpu"])
    memory = _rounded(values["memory_gib"]["max"])
    figures = {"layout": best.key, "tokens_per_second_per_gpu": speed, "memory_gib": memory,
               "mfu_full": _rounded(values["mfu_full"])}  # fmt: skip
    return _part(command, loaded, figures)


def _part(command: str, loaded: Loaded, figures: dict[str, Any]) -> CardPart:
    git = capture(checkout())["git"] or {}
    return CardPart(
        command=command,
        commit=f"{str(git.get('commit') or 'unknown')[:12]}",
        date=datetime.now(UTC).date().isoformat(),
        recipe_hash=_hash(loaded),
        figures=figures,
    )


def _hash(loaded: Loaded) -> str:
    """Of the whole recipe, because figures also depend on how it is executed; but not on what decides that."""
    return hash_of(loaded.recipe.with_layout(name=None).model_dump(mode="json"))


def _command(part: PartName, name: str, plan: RunPlan, cluster: str) -> list[str]:
    """Arguments of the program that do a part.

    A dry run is of the fullest rank, with two micro-batches for each stage, after which a pipeline repeats itself.
    """
    if part != "dryrun":
        return [part, name]
    layout, recipe = plan.largest.layout, plan.largest.recipe
    stages = layout.pipeline_model_parallel_size
    batch = layout.data_parallel_size * recipe.layout.micro_batch_size * 2 * stages
    words = [part, name, f"train.global_batch_size={min(batch, recipe.train.global_batch_size)}"]
    if plan.cluster.gpus:
        return [*words, "--cluster", cluster, "--nodes", str(plan.cluster.nodes)]
    return words


def _figures(part: PartName, command: list[str]) -> dict[str, Any]:
    """What a command prints as JSON, without what is of no use later."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "llmrecipes.cli", *command, "--json", "--runs-dir", folder],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    try:
        values = json.loads(ended.stdout)
    except ValueError:
        values = {}
    if ended.returncode or not isinstance(values, dict) or "error" in values:
        said = values.get("error") if isinstance(values, dict) else None
        raise UserError(
            f"exited with code {ended.returncode}{f': {said}' if said else ''}",
            where=shlex.join(["llmrecipes", *command]),
            rule="a card records only commands that succeed", fix="run this command separately to find the cause",
        )  # fmt: skip
    return {key: _short(values[key]) for key in _KEPT[part] if key in values}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return _rounded(value) if isinstance(value, float) else value


def _run(name: str, runs_dir: Path, loaded: Loaded) -> CardPart:
    from llmrecipes.rundir import Run
    from llmrecipes.tracking.events import MEASURED
    from llmrecipes.tracking.run_list import last_note

    run = Run.find(name, runs_dir)
    summary = run.summary()
    plan = read_json(run.path / PLAN, root=run.path)
    figures: dict[str, Any] = {
        "run_id": summary.run_id, "state": summary.state, "step": summary.step, "total": summary.total,
        "loss": summary.loss, "valid_loss": summary.valid_loss, "world_size": plan.get("world_size"),
        "device": plan.get("device"),
        **(last_note(run.path, MEASURED) or {}),
    }  # fmt: skip
    return _part(command_line("train", loaded.recipe.name), loaded, figures)


def _layout_source(path: Path) -> str:
    """What the comment at the head of a recipe says about its layout."""
    comments = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            comments.append(line.removeprefix("#").strip())
    sentences = re.split(r"(?<=[\w)])\. (?=[A-Z0-9])", " ".join(comments))
    return ". ".join(
        sentence.rstrip(".") for sentence in sentences if re.search(r"\blayout\b", sentence, re.IGNORECASE)
    )
