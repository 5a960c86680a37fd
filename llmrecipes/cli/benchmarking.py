"""`bench`: parsing and printing only."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.quantizing import inference
from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    DataOption,
    HostsOption,
    JsonOption,
    OverridesArgument,
    PatienceOption,
    RanksOption,
    RecipeArgument,
    site_option,
)
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from llmrecipes.bench.fabric.transfers import Kind, Report, Transfer
    from llmrecipes.bench.results import CollectiveComparison, Collectives, RankSpeeds
    from llmrecipes.hardware.profile import Profile
    from llmrecipes.recipe.schema import Recipe

app = typer.Typer(
    help="Benchmark fabric, collectives, steps, data or inference. In a Slurm step, on all of its nodes.",
    rich_markup_mode=None,
    invoke_without_command=True,
)

SHOWN = 24
"""Transfers and findings that are printed; 16,384 GPUs have tens of thousands."""
KINDS: dict[Kind, str] = {"neighbours": "between neighbours", "halves": "between halves"}

RepeatsOption = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Repeat each measurement N times.")]


@app.callback()
def help_without_command(ctx: typer.Context) -> None:
    """Print the help where no benchmark is named."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def collectives(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Measure the groups of this recipe's layout; default: one group of all ranks.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="SIZES",
            help="Measure these buffer sizes; default: 64KiB,1MiB,16MiB, and 256MiB if --cluster has GPUs.",
        ),
    ] = None,
    repeats: RepeatsOption = 5,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Compare with this cluster profile.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE.yaml", help="Write a copy of the --cluster profile with these results."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the bus bandwidth of collectives."""
    from llmrecipes.bench.results import Collectives
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow import bench

    if write is not None and cluster is None:
        raise UserError("no profile to copy", where="--write", fix="--cluster NAME; llmrecipes clusters lists them")
    if write is not None:
        bench.require_own(write)
    profile = None if cluster is None else load_profile(cluster)
    loaded = load(recipe or "gpt-tiny", overrides).recipe
    if profile is not None:
        bench.use_site(profile)
    wanted = bench.sizes(sizes or bench.default_sizes(profile))
    answer = _measure("collectives", loaded, DATA, repeats, nproc, wanted)
    if answer is None:
        return
    measured = Collectives.model_validate_json(answer)
    if write is not None and cluster is not None:
        bench.write_profile(cluster, measured.rows, write)
    _print_collectives(measured, profile, write, as_json=as_json)


def _print_collectives(measured: Collectives, profile: Profile | None, write: Path | None, *, as_json: bool) -> None:
    from llmrecipes.bench.results import compare

    compared = [] if profile is None else compare(measured, profile)
    if as_json:
        rows = {} if profile is None else {"compared": [comparison.as_dict() for comparison in compared]}
        print(json.dumps({**measured.model_dump(mode="json"), **rows}))
        return
    show(*bandwidths(measured))
    if profile is not None:
        print(comparison(profile.name, compared))
    if write is not None:
        print(f"written to {write}: --cluster {write}")


@app.command()
def fabric(
    cluster: Annotated[
        str | None,
        site_option("Measure the adapters of this cluster profile and compare with it. Default: all adapters."),
    ] = None,
    nodes: HostsOption = None,
    seconds: Annotated[
        int, typer.Option("--seconds", metavar="S", min=3, max=600, help="Measure each bandwidth for S seconds.")
    ] = 5,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="S",
            min=1,
            max=600,
            help="Fail a transfer that is S seconds overdue.",
        ),
    ] = 20,
    patience: PatienceOption = 60.0,
    as_json: JsonOption = False,
) -> int:
    """Measure RDMA bandwidth and latency between the adapters of a job's nodes, with perftest.

    Start it once per node at the same time, for example with srun --ntasks-per-node=1.
    """
    from llmrecipes.bench.fabric.meeting import FabricRendezvous, meet, require_sensible
    from llmrecipes.bench.fabric.node import Limits
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.launch.ranks import FIRST_PORT, port_of
    from llmrecipes.launch.rendezvous import job_hosts, own_number, token_of

    profile = None if cluster is None else load_profile(cluster)
    hosts = job_hosts(nodes)
    require_sensible(hosts, profile)
    job = os.environ.get("SLURM_JOB_ID")
    port = port_of(job) if job else FIRST_PORT
    limits = Limits(seconds, seconds + limit)
    token = token_of(os.environ)
    outcome = meet(FabricRendezvous(hosts, own_number(hosts), port, patience, limits, token), profile)
    if outcome.report is not None:
        if as_json:
            print(json.dumps(outcome.report.as_dict(), indent=2))
        else:
            show(*fabric_report(outcome.report))
    return 1 if outcome.bad else int(ExitCode.DONE)


@app.command()
def ranks(
    nproc: RanksOption = None,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure every rank separately, to find slow ones."""
    from llmrecipes.bench.results import RankSpeeds, slow_ranks
    from llmrecipes.recipe.load import load

    answer = _measure("ranks", load("gpt-tiny", []).recipe, DATA, repeats, nproc)
    if answer is None:
        return
    speeds = RankSpeeds.model_validate_json(answer)
    if as_json:
        print(json.dumps({**json.loads(answer), "slow_ranks": sorted(slow_ranks(speeds))}))
        return
    print(rank_speeds(speeds))


@app.command()
def machine(
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE.yaml", help="Write a cluster profile of this machine.")
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Copy values that are not measured, such as links between nodes, from this cluster profile.",
            autocompletion=completion.clusters,
        ),
    ] = "laptop",
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure a machine without GPUs, for predictions by `plan`.

    Measures GEMMs, attention, memory, launches, and collectives of two processes, and takes the best of the repeats.
    """
    from llmrecipes.workflow import bench

    if write is not None:
        bench.require_new(write)
    profile = bench.machine_profile(cluster, repeats, write.stem if write is not None else "this-machine")
    if write is not None:
        bench.save_profile(profile, write)
    if as_json:
        print(json.dumps(profile, indent=2))
        return
    for name, value in profile["rates"].items():
        print(f"{name:18}{value:10.4g}")
    print(f"{'intra_node':18}{profile['intra_node']['gb_per_s']:10.4g} GB/s between processes")
    if write is not None:
        print(f"written to {write}: --cluster {write}")


@app.command()
def step(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure optimizer steps on random tokens.

    Needs no data and writes nothing.
    """
    from llmrecipes.bench.results import StepTimes
    from llmrecipes.plan.check import gib
    from llmrecipes.recipe.load import load

    answer = _measure("step", load(recipe, overrides).recipe, DATA, repeats, nproc)
    if answer is None:
        return
    measured = StepTimes.model_validate_json(answer)
    speed = measured.tokens_per_step / statistics.median(measured.seconds)
    flops = speed * measured.flops_per_token / measured.world_size
    use = None if measured.peak_tflops is None else flops / measured.peak_tflops / 1e12
    if as_json:
        derived = {"tokens_per_second": speed, "tflops_per_rank": flops / 1e12, "mfu": use}
        print(json.dumps({**json.loads(answer), **derived}, indent=2))
        return
    seconds = measured.seconds
    times = f"{statistics.median(seconds):.3f} s a step ({min(seconds):.3f}-{max(seconds):.3f})"
    print(f"{measured.world_size} ranks, {times}, {speed:,.0f} tokens/s")
    share = "" if use is None else f", {use:.1%} of a GPU's peak"
    print(f"{flops / 1e12:,.2f} TFLOP/s a rank{share}; at most {gib(measured.peak_memory_bytes)} a rank")


@app.command()
def data(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    repeats: RepeatsOption = 20,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """Measure data loading, without training."""
    from llmrecipes.bench.results import LoaderReading
    from llmrecipes.recipe.load import load

    answer = _measure("data", load(recipe, overrides).recipe, data_dir, repeats, nproc)
    if answer is None:
        return
    reading = LoaderReading.model_validate_json(answer)
    speed = reading.tokens_per_batch / statistics.median(reading.seconds)
    if as_json:
        print(json.dumps({**json.loads(answer), "tokens_per_second": speed}, indent=2))
        return
    middle = f"a global batch takes {statistics.median(reading.seconds):.4f} s"
    print(f"{reading.world_size} ranks, {speed:,.0f} tokens/s; {middle}, at most {max(reading.seconds):.4f} s")
    print(f"the first batch comes after {reading.first_seconds:.2f} s")


app.command("inference")(inference)


def _measure(
    what: str, recipe: Recipe, data_dir: Path, repeats: int, nproc: int | None, sizes: tuple[int, ...] = ()
) -> str | None:
    from llmrecipes.bench.results import BenchSpec
    from llmrecipes.console import setup_logging
    from llmrecipes.workflow.bench import measure

    setup_logging()
    spec: BenchSpec = BenchSpec.model_validate(
        {"what": what, "recipe": recipe, "data_dir": data_dir, "out": Path(), "sizes": sizes, "repeats": repeats}
    )
    return measure(spec, nproc)


def bandwidths(measured: Collectives) -> Iterator[str | TextTable]:
    """Bus bandwidth: a row for each operation and group, a column for each size."""
    sizes = sorted({row.bytes for row in measured.rows})
    title = f"{measured.world_size} ranks over {measured.backend}; bus bandwidth in GB/s"
    if not measured.rows:
        yield f"{title}: no group has more than one rank; try --nproc 2"
        return
    yield title
    table = [("operation", "group", "ranks", *map(_size, sizes))]
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in measured.rows:
        rows.setdefault((row.operation, row.group, row.ranks), {})[row.bytes] = row.bus_gb_per_s
    for (operation, group, ranks), speeds in sorted(rows.items(), key=lambda each: each[0][1]):
        cells = (f"{speeds[size]:.3f}" if size in speeds else "" for size in sizes)
        table.append((operation, group, str(ranks), *cells))
    yield TextTable(table, right=range(2, len(table[0])))


def rank_speeds(measured: RankSpeeds) -> str:
    """The speeds of all ranks in one line, and a line per slow rank."""
    from llmrecipes.bench.results import slow_ranks

    speeds = [measured.flops / seconds / 1e12 for seconds in measured.seconds]
    middle = statistics.median(speeds)
    lines = [
        f"warning: rank {rank} on {measured.hosts[rank]}: {speeds[rank]:.3g} TFLOP/s, {share:.0%} of the median"
        for rank, share in slow_ranks(measured).items()
    ]
    spread = f"{min(speeds):.3g}-{max(speeds):.3g}"
    return "\n".join([*lines, f"{len(speeds)} ranks: {middle:.3g} TFLOP/s in the median, {spread}"])


def comparison(name: str, compared: list[CollectiveComparison]) -> str:
    """Results below those of the profile, one line each."""
    from llmrecipes.bench.results import LEAST
    from llmrecipes.hardware.profile import LINK_BYTES

    if not compared:
        return f"{name} has no measurement of this group and size; link figures apply from {_size(LINK_BYTES)}"
    short = [f"warning: {comparison.as_text()}" for comparison in compared if not comparison.ok]
    summary = f"{len(compared) - len(short)} of {len(compared)} have at least {LEAST:.0%} of the figure in {name}"
    return "\n".join([*short, summary])


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def fabric_report(report: Report) -> Iterator[str | TextTable]:
    """Transfers, slowest first if there are many, the median of each kind of pairs, and what is wrong."""
    title = f"{report.measured_nodes} of {report.nodes} nodes; RDMA writes of 64 KiB, sends of 8 bytes; main memory"
    if report.expected_gb_per_s is not None:
        title += f"; {report.profile}: {report.expected_gb_per_s:g} GB/s a port"
    yield title
    ordered = sorted(report.transfers, key=lambda transfer: (not transfer.error, transfer.gb_per_s or 0))
    shown = report.transfers if len(report.transfers) <= SHOWN else ordered[:SHOWN]
    if shown:
        yield _transfers(report, shown)
    if len(shown) < len(report.transfers):
        yield f"the slowest {len(shown)} of {len(report.transfers)} transfers; all: --json"
    yield from (line for kind, words in KINDS.items() for line in _pairs(report, kind, words))
    for finding in report.findings[:SHOWN]:
        yield f"{finding.status.upper()} {finding.node}: {finding.check}: {finding.what}"
        if finding.fix:
            yield f"     fix: {finding.fix}"
    if len(report.findings) > SHOWN:
        yield f"and {len(report.findings) - SHOWN} more; all: --json"
    failed, warned = (sum(finding.status == status for finding in report.findings) for status in ("fail", "warn"))
    where = f" on {', '.join(report.bad_nodes[:SHOWN])}" if report.bad_nodes else ""
    yield f"{failed} failed{where}, {warned} warned, of {len(report.transfers)} transfers"


def _transfers(report: Report, shown: list[Transfer]) -> TextTable:
    from llmrecipes.bench.fabric.transfers import percent

    head = ["from", "port", "to", "port", "GB/s", "of profile", "latency µs", "99 %", ""]
    rows = [head]
    for transfer in shown:
        share = report.share(transfer)
        rows.append([
            transfer.sender, transfer.sender_port, transfer.receiver, transfer.receiver_port,
            "failed" if transfer.gb_per_s is None else f"{transfer.gb_per_s:.3g}",
            "" if share is None else percent(share),
            "" if transfer.latency_us is None else f"{transfer.latency_us:.2f}",
            "" if transfer.latency_99_us is None else f"{transfer.latency_99_us:.2f}",
            transfer.error,
        ])  # fmt: skip
    return TextTable(rows, right=(4, 5, 6, 7))


def _pairs(report: Report, kind: Kind, words: str) -> list[str]:
    from llmrecipes.bench.results import LEAST

    speeds = [
        transfer.gb_per_s for transfer in report.transfers if transfer.kind == kind and transfer.gb_per_s is not None
    ]
    if not speeds:
        return []
    middle = statistics.median(speeds)
    line = f"{words}: {middle:.3g} GB/s in the median, {min(speeds):.3g} to {max(speeds):.3g}"
    if report.expected_gb_per_s is None:
        return [line]
    short = sum(speed < LEAST * report.expected_gb_per_s for speed in speeds)
    return [f"{line}; {short} of {len(speeds)} below {LEAST:.0%} of {report.profile}"]
