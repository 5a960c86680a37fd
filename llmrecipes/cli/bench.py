"""`llmrecipes bench`: parsing and printing only."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli.commands import DATA, DataOption, JsonOption, OverridesArgument, RanksOption, RecipeArgument
from llmrecipes.errors import UserError
from llmrecipes.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from llmrecipes.bench.compare import Comparison
    from llmrecipes.bench.spec import BenchSpec, Collectives

app = typer.Typer(help="Measure this machine, or in a Slurm step all of its nodes.", rich_markup_mode=None)

RepeatsOption = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Measured rounds.")]


@app.command()
def collectives(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Its layout's groups; without one, all ranks together.")
    ] = None,
    overrides: OverridesArgument = None,
    nproc: RanksOption = None,
    sizes: Annotated[str, typer.Option("--sizes", metavar="SIZES", help="Of the buffers.")] = "64KiB,1MiB,16MiB",
    repeats: RepeatsOption = 5,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Profile to compare with, and that --write copies.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE.yaml", help="Profile with what was measured.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bus bandwidth of every collective in every group of a layout."""
    from llmrecipes.bench.compare import compare
    from llmrecipes.bench.spec import Collectives
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow import bench

    if write is not None and cluster is None:
        raise UserError("no profile to copy", where="--write", fix="--cluster NAME; llmrecipes clusters lists them")
    profile = None if cluster is None else load_profile(cluster)
    loaded = load(recipe or "gpt-tiny", overrides or []).recipe
    answer = _measure("collectives", loaded, DATA, repeats, nproc, bench.sizes(sizes))
    if answer is None:
        return
    found = Collectives.model_validate_json(answer)
    if write is not None and cluster is not None:
        bench.write_profile(cluster, found.rows, write)
    compared = None if profile is None else compare(found, profile)
    if as_json:
        rows = {} if compared is None else {"compared": [each.as_dict() for each in compared]}
        print(json.dumps({**json.loads(answer), **rows}))
        return
    print(_bandwidths(found))
    if profile is not None and compared is not None:
        print(_comparison(profile.name, compared))
    if write is not None:
        print(f"written to {write}: --cluster {write}")


@app.command()
def step(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: RanksOption = None,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Time of optimizer steps on random tokens: no data needed, nothing written."""
    from llmrecipes.bench.spec import StepTimes
    from llmrecipes.plan.check import gib
    from llmrecipes.recipe.load import load

    answer = _measure("step", load(recipe, overrides or []).recipe, DATA, repeats, nproc)
    if answer is None:
        return
    found = StepTimes.model_validate_json(answer)
    speed = found.tokens_per_step / statistics.median(found.seconds)
    flops = speed * found.flops_per_token / found.world_size
    use = None if found.peak_tflops is None else flops / found.peak_tflops / 1e12
    if as_json:
        derived = {"tokens_per_second": speed, "tflops_per_rank": flops / 1e12, "mfu": use}
        print(json.dumps({**json.loads(answer), **derived}, indent=2))
        return
    times = f"{statistics.median(found.seconds):.3f} s a step ({min(found.seconds):.3f}-{max(found.seconds):.3f})"
    print(f"{found.world_size} ranks, {times}, {speed:,.0f} tokens/s")
    share = "" if use is None else f", {use:.1%} of a GPU's peak"
    print(f"{flops / 1e12:,.2f} TFLOP/s a rank{share}; at most {gib(found.peak_memory_bytes)} a rank")


@app.command()
def data(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: RanksOption = None,
    repeats: RepeatsOption = 20,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """How fast prepared data is read, without training."""
    from llmrecipes.bench.spec import Reading
    from llmrecipes.recipe.load import load

    answer = _measure("data", load(recipe, overrides or []).recipe, data_dir, repeats, nproc)
    if answer is None:
        return
    found = Reading.model_validate_json(answer)
    speed = found.tokens_per_batch / statistics.median(found.seconds)
    if as_json:
        print(json.dumps({**json.loads(answer), "tokens_per_second": speed}, indent=2))
        return
    middle = f"a global batch takes {statistics.median(found.seconds):.4f} s"
    print(f"{found.world_size} ranks, {speed:,.0f} tokens/s; {middle}, at most {max(found.seconds):.4f} s")
    print(f"the first batch comes after {found.first_seconds:.2f} s")


def _measure(
    what: str, recipe: object, data_dir: Path, repeats: int, nproc: int | None, sizes: tuple[int, ...] = ()
) -> str | None:
    from llmrecipes.bench.spec import BenchSpec
    from llmrecipes.console import setup_logging
    from llmrecipes.workflow.bench import measure

    setup_logging()
    spec: BenchSpec = BenchSpec.model_validate(
        {"what": what, "recipe": recipe, "data_dir": data_dir, "out": Path(), "sizes": sizes, "repeats": repeats}
    )
    return measure(spec, nproc)


def _bandwidths(found: Collectives) -> str:
    """A line for each operation and group, a column for each size."""
    sizes = sorted({row.bytes for row in found.rows})
    lines = [f"{found.world_size} ranks over {found.backend}; bus bandwidth in GB/s"]
    if not found.rows:
        return f"{lines[0]}: no group has more than one rank; --nproc 2"
    lines.append(f"{'operation':15} {'group':9} ranks" + "".join(f"{_size(size):>10}" for size in sizes))
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in found.rows:
        rows.setdefault((row.operation, row.group, row.ranks), {})[row.bytes] = row.bus_gb_per_s
    for (operation, group, ranks), speeds in sorted(rows.items(), key=lambda each: each[0][1]):
        cells = "".join(f"{speeds[size]:10.3f}" if size in speeds else f"{'':10}" for size in sizes)
        lines.append(f"{operation:15} {group:9} {ranks:5}{cells}")
    return "\n".join(lines)


def _comparison(name: str, compared: list[Comparison]) -> str:
    """What falls short of the profile, a line each."""
    from llmrecipes.bench.compare import LEAST, LINK_BYTES

    if not compared:
        return (
            f"nothing to compare with {name}: no such row in its measured, and links count from {_size(LINK_BYTES)} on"
        )
    short = [f"warning: {each.as_text()}" for each in compared if not each.ok]
    summary = f"{len(compared) - len(short)} of {len(compared)} have at least {LEAST:.0%} of what {name} says"
    return "\n".join([*short, summary])


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
