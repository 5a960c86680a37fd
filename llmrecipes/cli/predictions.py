"""Output of `plan`: of one forecast, and with `--search`, `--calibration`, `--what-if` and `--scaling-curve`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmrecipes.cli.tables import TextTable
from llmrecipes.console import duration
from llmrecipes.plan.speed.calibration import CalibrationReport, FactorFit
from llmrecipes.plan.speed.curve import CurvePoint
from llmrecipes.plan.speed.forecast import Forecast
from llmrecipes.plan.speed.saving import Saving
from llmrecipes.plan.speed.search import Candidate
from llmrecipes.units import GIB, gib
from llmrecipes.workflow.speed_forecast import LayoutDryRun
from llmrecipes.workflow.whatif import WhatIf


def search_lines(candidates: Sequence[tuple[Candidate, LayoutDryRun | None]]) -> Iterator[TextTable]:
    """A row for each layout, fastest first; differences are from the first that fits."""
    speeds = [candidate.forecast.tokens_per_second_per_gpu for candidate, _ in candidates]
    best = next(speed for speed, (_, check) in zip(speeds, candidates, strict=True) if check is None or check.fits)
    head = ["layout", "tokens/s/GPU", "from best", "memory", "limit"]
    rows = [
        [candidate.key, f"{speed:,.0f}", f"{speed / best - 1:+.1%}",
         f"{candidate.forecast.plan.memory.total / GIB:.1f} GiB", candidate.forecast.limit]
        for speed, (candidate, _) in zip(speeds, candidates, strict=True)
    ]  # fmt: skip
    if any(check is not None for _, check in candidates):
        head.append("dry run")
        rows = [
            [*row, "" if check is None else _checked(check)] for row, (_, check) in zip(rows, candidates, strict=True)
        ]
    yield TextTable([head, *rows], right=(1, 2, 3))


def _checked(check: LayoutDryRun) -> str:
    word = "fits" if check.fits else "does NOT fit"
    return f"{word}: {check.bytes / GIB:.1f} GiB on rank {check.rank}, {check.seconds:.0f} s"


def calibration_lines(report: CalibrationReport) -> Iterator[str | TextTable]:
    """Errors of runs, bias by device and layout, and factors."""
    head = ("run", "device", "layout", "predicted", "measured", "error", "memory", "measured", "error")
    rows = [
        (
            run.name, run.device, run.layout, f"{run.predicted:.4g} s", f"{run.measured:.4g} s", f"{run.error:+.1%}",
            f"{run.predicted_memory / GIB:.2f} GiB", f"{run.measured_memory / GIB:.2f} GiB", f"{run.memory_error:+.1%}",
        )
        for run in report.runs
    ]  # fmt: skip
    yield TextTable([head, *rows], right=range(3, 9))
    yield ""
    bias = [(b.device, b.layout, f"{b.runs}", f"{b.step:+.1%}", f"{b.memory:+.1%}") for b in report.bias]
    yield TextTable([("device", "layout", "runs", "step", "memory"), *bias], right=(2, 3, 4))
    yield ""
    for fit in report.fits:
        yield from _factors(fit)
    for name, reason in report.left_out:
        yield f"left out: {name}: {reason}"


def _factors(fit: FactorFit) -> Iterator[str]:
    by = fit.calibration
    yield (
        f"{fit.device}: kernels take {by.compute:.3f} of their predicted time, communication {by.communication:.3f} "
        f"({by.runs} runs); median error {fit.median_error:.1%}, with these factors {fit.corrected_error:.1%}"
    )
    if fit.unknown:
        yield f"{fit.device}: not fitted: {fit.unknown}"


def what_if_lines(answer: WhatIf) -> Iterator[str | TextTable]:
    """A row for each machine, and the cheapest."""
    yield f"{answer.recipe}: {answer.tokens / 1e9:,.1f} billion tokens, loss {answer.loss:.3f} by {answer.source}"
    head = ("", "cluster", "GPUs", "layout", "tokens/s/GPU", "MFU", "days", "GPU-hours", "USD", "MWh")
    best, rows = answer.best, []
    for option in answer.options:
        if option.candidate is None:
            continue
        values = option.as_dict()
        late = "late" if option.in_time is False else ""
        rows.append(
            (
                "*" if option is best else late, option.cluster, f"{option.gpus:,}", option.candidate.key,
                f"{values['tokens_per_second_per_gpu']:,.0f}", f"{values['mfu_full']:.1%}", _number(option.days, ".1f"),
                _number(option.gpu_hours, ".0f"), _number(option.cost_usd, ".0f"), _number(option.energy_mwh, ".1f"),
            )
        )  # fmt: skip
    yield TextTable([head, *rows], right=(2, *range(4, 10)))
    for option in answer.options:
        if option.candidate is None:
            yield f"{option.cluster}, {option.gpus:,} GPUs: {option.reason}"
    if best is None:
        yield "none of them can train it" if answer.by is None else f"none of them finishes by {answer.by.date()}"
        return
    by = "the fewest GPU-hours" if best.cost_usd is None else f"{best.cost_usd:,.0f} USD"
    date = "" if answer.by is None else f" by {answer.by.date()}"
    yield f"cheapest{date}: {best.gpus:,} GPUs of {best.cluster}, {best.days:,.1f} days, {by}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:,{form}}"


def curve_lines(points: Iterable[CurvePoint]) -> Iterator[str | TextTable]:
    """A row for each number of GPUs, strong and weak."""
    head = ("scaling", "GPUs", "batch", "layout", "tokens/s/GPU", "MFU", "step")
    rows = []
    for point in points:
        values = point.as_dict()
        figures = (point.reason, "", "", "")
        if point.candidate is not None:
            speed = values["tokens_per_second_per_gpu"]
            share = values["mfu_full"]
            figures = (point.candidate.key, f"{speed:,.0f}", f"{share:.1%}", f"{values['step_seconds']:.3g} s")
        rows.append((point.kind, f"{point.gpus:,}", f"{point.global_batch_size:,}", *figures))
    yield TextTable([head, *rows], right=(1, 2, 4, 5, 6))


def forecast_text(forecast: Forecast) -> str:
    """Lines of name and value."""
    values = forecast.as_dict()
    peak = values["mfu_full"]
    speed = values["tokens_per_second_per_gpu"]
    least, most = forecast.speed_range
    world = values["world_size"]
    layout = ", ".join(f"{name} {size}" for name, size in values["parallelism"].items() if size not in (1, None))
    lines = [
        ("GPUs", f"{world} × {forecast.device.name}"),
        ("layout", layout or "data 1"),
        *([] if forecast.chosen is None else [("chosen", forecast.chosen["text"])]),
        ("memory of a rank", f"{values['memory_gib']['max']:.1f} GiB, {'fits' if values['fits'] else 'does NOT fit'}"),
    ]
    if not values["fits"]:  # it would have no speed
        return "\n".join(f"{name:19}{value}" for name, value in lines)
    lines += [
        ("time of a step", f"{values['step_seconds']:.3g} s"),
        ("tokens a second", f"{speed:,.0f} a GPU ({least:,.0f} to {most:,.0f})"),
        *(
            []
            if values["fitted"]
            else [("not fitted", f"no run on {forecast.device.name}: its data sheet, other GPUs' shares")]
        ),
        *([] if forecast.calibration is None else [("calibrated", f"by {forecast.calibration.runs} runs")]),
        ("MFU", f"{peak:.1%}, {values['mfu_causal']:.1%} with causal attention"),
        ("all steps", f"{duration(forecast.seconds)}, {forecast.gpu_hours:,.1f} GPU-hours"),
        ("limit", values["limit"]),
    ]
    lines += [
        (f"stage {each['name']}", f"{each['step_seconds']:.3g} s, {each['tokens_per_second_per_gpu']:,.0f} a GPU, "
         f"{duration(each['days'] * 86400)}; {each['layout']}")
        for each in values.get("stages", ())
    ]  # fmt: skip
    lines += _costs(forecast)
    if forecast.saving is not None:
        lines += _saves(forecast, forecast.saving)
    lines += [("problem", problem) for problem in forecast.problems]
    return "\n".join(f"{name:19}{value}" for name, value in lines)


def _costs(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Money and energy of all steps."""
    if forecast.cost_usd is None:
        yield "cost", "unknown: --usd-per-gpu-hour, or costs.usd_per_gpu_hour of a profile"
    else:
        price = forecast.cost_usd / forecast.gpu_hours
        yield "cost", f"{forecast.cost_usd:,.0f} USD at {price:,.4g} a GPU-hour"
    if forecast.energy_mwh is not None:
        carbon = f", {forecast.co2_t:,.2f} t CO2" if forecast.co2_t is not None else ""
        yield "energy", f"{forecast.energy_mwh:,.2f} MWh{carbon}"


def _saves(forecast: Forecast, saving: Saving) -> list[tuple[str, str]]:
    written = f"training waits {saving.stall:.2g}s, complete after {duration(saving.write)}"
    lines = [("checkpoint", f"{gib(saving.bytes)}, {written}")]
    best = saving.best_interval
    share = saving.effective(saving.interval)
    most = saving.effective(best)
    if saving.mtbf is None or best is None or share is None or most is None:
        return [*lines, ("failures", "unknown: the profile has no failures.gpu_hours_per_failure")]
    steps = max(1, round(best / forecast.step.seconds))
    days = saving.days(forecast.seconds)
    lasts = (
        "never finishes: failures leave no time to train" if days is None else f"{duration(days * 86400)} for all steps"
    )
    return [
        *lines,
        ("failures", f"one in {duration(saving.mtbf)}"),
        ("effective time", f"{share:.1%}, {lasts}"),
        ("best save_interval", f"{steps:,} steps ({duration(best)}): {most:.1%} effective"),
    ]
