"""Sections of a report about the training: what looks wrong, curves, held-out text, time line, where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmrecipes import webpage
from llmrecipes.commandline import resume_command
from llmrecipes.console import duration
from llmrecipes.diagnosis.finding import RunFinding
from llmrecipes.report import charts
from llmrecipes.report.charts import Line, Spans
from llmrecipes.report.material import Material, at
from llmrecipes.report.starts import CAUSES, RecordedStart
from llmrecipes.tracking.events import ENDED_EARLY, TASKS_EVALUATED
from llmrecipes.units import GIB, gib
from llmrecipes.untrusted import number

SEVERITY = {"error": "Error", "warning": "Warning", "info": "Note"}
STATES = {
    "running": "still running",
    "finished": "finished",
    "saved": "stopped by a signal; its state is saved and it can be resumed",
    "failed": "failed",
    "interrupted": "interrupted: its process is gone",
    "unknown": "in an unknown state: status.json is missing or cannot be read",
}
TASK_CURVES = 24
MOST_CURVES = 12
"""Curves of one figure."""
Points = dict[str, list[tuple[int, float]]]
"""By label, steps and values."""
STARTS_SHOWN = 100


def nothing(what: str) -> str:
    """What a section says that has no data."""
    return f'<p class="muted">{webpage.text(what)}</p>'


def when(seconds: float | None) -> str:
    """Date and time, UTC."""
    if seconds is None or not 0 <= seconds < 1 << 40:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def steps_of(first: int | None, last: int | None) -> str:
    """`step 7`, or `steps 7 to 9`; empty: not at a step."""
    if first is None:
        return ""
    return f"step {first:,}" if last is None or last == first else f"steps {first:,} to {last:,}"


def problems(material: Material) -> str:
    """The box at the top."""
    items = [_finding(finding) for finding in material.findings]
    state = material.summary.state
    failing = [finding.title for finding in material.findings if finding.severity == "error"]
    if state == "finished" and failing:
        what = f"Its result is in doubt: {', '.join(failing).lower()}."
        items.insert(0, _item("error", "The run is finished, but not well", "", what, ""))
    if state in ("failed", "interrupted"):
        advice = f"To continue from the newest checkpoint: {resume_command(material.run.path)}"
        what = "The last lines of its logs are at the end of this page." if material.logs else "There are no logs."
        items.insert(0, _item("error", f"The run is {STATES[state]}", "", what, advice))
    items += [_item("warning", "Not readable", "", text, "") for text in material.unread]
    if not items:
        said = "Nothing: no check found a problem." if len(material.records) else "Nothing is known yet."
        return f'<section class="box good" id="problems"><h2>What looks wrong</h2><p>{said}</p></section>'
    kind = "bad" if any('class="error"' in item for item in items) else "warn"
    return (
        f'<section class="box {kind}" id="problems"><h2>What looks wrong</h2><ul class="findings">'
        f"{''.join(items)}</ul></section>"
    )


def _finding(finding: RunFinding) -> str:
    where = steps_of(finding.first_step, finding.last_step)
    often = f"{where}, {finding.count:,} times" if finding.count > 1 else where
    advice = " ".join(part for part in (finding.advice, f"See {finding.link}." if finding.link else "") if part)
    return _item(finding.severity, finding.title, often, finding.text, advice)


def _item(severity: str, title: str, where: str, what: str, advice: str) -> str:
    kind = severity if severity in SEVERITY else "info"
    place = f' <span class="muted">({webpage.text(where)})</span>' if where else ""
    todo = f"<p><b>What to do:</b> {webpage.text(advice)}</p>" if advice else ""
    return (
        f'<li class="{kind}"><p><b>{SEVERITY[kind]}: {webpage.text(title)}</b>{place}</p>'
        f"<p>{webpage.text(what)}</p>{todo}</li>"
    )


def figures(material: Material) -> list[tuple[str, str]]:
    """The numbers at the top, by name."""
    summary, records = material.summary, material.records
    step = summary.step if summary.step is not None else (records.steps[-1] if len(records) else None)
    total = "" if summary.total is None else f" of {summary.total:,}"
    rows = [("step", "none yet" if step is None else f"{step:,}{total}")]
    for note in records.of(ENDED_EARLY):
        rows += [("ended early", str(note["details"].get("text", "")))] if note["step"] == step else []
    if len(records):
        tokens = records.last("consumed_tokens")
        rows += [("tokens", charts.short(tokens))] if tokens is not None else []
    for name, value in (("training loss", summary.loss), ("held-out loss", summary.valid_loss)):
        rows += [(name, f"{value:.4f}")] if value is not None else []
    bits = [number(evaluation.get("valid_bits_per_byte")) for evaluation in material.records.evaluations]
    if bits and bits[-1] is not None:
        rows.append(("bits per byte", f"{bits[-1]:.4f}"))
    for name, key, shape in (("tokens/s", "tokens_per_second", "{:,.0f}"), ("seconds a step", "step_seconds", "{:.3g}"),
                             ("MFU", "mfu", "{:.1%}")):  # fmt: skip
        if records.has(key):
            rows.append((f"{name}, median", shape.format(float(np.nanmedian(records[key])))))
    if records.has("memory_bytes"):
        rows.append(("memory, peak of rank 0", gib(int(np.nanmax(records["memory_bytes"])))))
    past = material.history
    if past.starts:
        rows.append(("time", duration(past.wall)))
        rows.append(("starts", f"{1 + past.interruptions}"))
    return rows


def _series(material: Material, name: str, title: str) -> Line | None:
    records = material.records
    if name not in records.names():
        return None
    values = records[name]
    steps = np.array(records.steps, dtype=np.float64)
    # Where a step has no such number, e.g. with experts in every tenth: not the same as one that is not finite.
    sparse = name not in ("loss", "grad_norm")
    return (
        Line(title, steps[np.isfinite(values)], values[np.isfinite(values)]) if sparse else Line(title, steps, values)
    )


def series(material: Material, title: str, names: Sequence[tuple[str, str]], **options: str) -> str:
    """A figure of columns of the steps by name and title; empty if there is none of them."""
    lines = [line for name, words in names if (line := _series(material, name, words)) is not None and len(line.x)]
    if options.get("unit") == "bytes":
        lines = [replace(line, y=line.y / GIB) for line in lines]
        options["unit"] = "GiB"
    return charts.curves(title, lines, **options) if lines else ""


def loss(material: Material) -> str:
    """Loss, learning rate, norm of the gradients."""
    if not len(material.records):
        return nothing(f"No curve: {material.records.missing}.")
    lines = [line for line in (_series(material, "loss", "training"), _held_out(material, "valid_loss")) if line]
    accuracy = [
        line
        for line in (_series(material, "token_accuracy", "training"), _held_out(material, "valid_token_accuracy"))
        if line
    ]
    options = {"note": f"{len(material.records.skipped):,} updates were skipped."} if material.records.skipped else {}
    drawn = [
        charts.curves("Loss", lines, unit="nats a token", **options),
        charts.curves("Tokens predicted correctly", accuracy, unit="share") if accuracy else "",
        series(material, "Distance of hidden states to the teacher's", [("hidden_distance", "mean over layers")]),
        *_by_label("Training loss by source", _by_source(material.records.source_losses.kept), unit="nats a token"),
        series(material, "Gradient norm before clipping", [("grad_norm", "gradient norm")]),
        series(material, "Learning rate", [("lr", "learning rate")]),
        series(material, "Loss scale (fp16)", [("loss_scale", "loss scale")]),
    ]
    return _charts(drawn)


STAGE = (
    ("first_step", "steps before it"), ("last_step", "last step"), ("tokens", "tokens"), ("seq_length", "sequence"),
    ("global_batch_size", "sequences per step"), ("micro_batch_size", "micro-batch"), ("memory_bytes", "bytes of a "
                                                                                                       "rank"),
)  # fmt: skip
"""Numbers of a stage in plan.json, and their columns."""


def stages(material: Material) -> str:
    """The stages of the plan with their layouts, and whether they have begun."""
    planned = at(material.plan, "stages")
    of_plan = [each for each in planned if isinstance(each, dict)] if isinstance(planned, list) else []
    if not of_plan:
        return nothing("The run has no stages.")
    begun = {str(at(note, "details", "name")) for note in material.records.of("stage")}
    rows = []
    for each in of_plan:
        values = [number(each.get(key)) for key, _ in STAGE]
        numbers = ["unknown" if value is None else f"{value:,.0f}" for value in values]
        name = str(each.get("name"))
        rows.append((name, *numbers, str(each.get("layout", "unknown")), "yes" if name in begun else "no"))
    head = ("stage", *(title for _, title in STAGE), "layout", "begun")
    return webpage.table(head, rows, numbers=range(1, 1 + len(STAGE)))


def speed(material: Material) -> str:
    """Tokens, seconds a step, utilisation."""
    if not len(material.records):
        return nothing(f"No curve: {material.records.missing}.")
    drawn = [
        series(material, "Tokens a second", [("tokens_per_second", "tokens a second")]),
        series(material, "Seconds a step", [("step_seconds", "seconds")], unit="s"),
        series(material, "Model FLOPs utilisation", [("mfu", "full attention"), ("mfu_causal", "causal half")]),
    ]
    missing = "" if drawn[-1] else nothing("No MFU: it is only measured on GPUs with a known peak.")
    return _charts(drawn) + missing


def _held_out(material: Material, name: str, title: str = "held-out") -> Line | None:
    points = [(evaluation["step"], number(evaluation.get(name))) for evaluation in material.records.evaluations]
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    x, y = (np.array(values, dtype=np.float64) for values in zip(*known, strict=True))
    return Line(title, x, y, points=len(known) <= 100)


def held_out(material: Material) -> str:
    """Held-out curves: of the validation split, of each source that has one of its own, and of tasks."""
    drawn = []
    if line := _held_out(material, "valid_bits_per_byte", "bits per byte"):
        drawn.append(charts.curves("Held-out text", [line], unit="bits per byte; lower is better"))
    if line := _held_out(material, "valid_loss", "loss"):
        drawn.append(charts.curves("Held-out loss", [line], unit="nats a token"))
    by_source = _evaluated_by_source(material)
    for name, points in by_source.items():
        drawn += _by_label(f"{name.replace('_', ' ')}, by source", points)
    drawn += [charts.curves(f"Task {name}", [line]) for name, line in _tasks(material)[:TASK_CURVES]]
    if not any(drawn):
        return nothing(
            "No evaluation yet: train.eval_interval and train.eval_iters set when held-out text is evaluated."
        )
    sources = (
        []
        if by_source
        else [nothing("No curves by source: data.multiple_validation_sets and data.valid_sources add them.")]
    )
    return _charts(drawn) + "".join(sources)


def _evaluated_by_source(material: Material) -> dict[str, Points]:
    """Numbers of evaluations that are kept by source: a mapping from source to number under any name."""
    mappings: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for evaluation in material.records.evaluations:
        for name, values in evaluation.items():
            if isinstance(values, dict):
                mappings.setdefault(name, []).append((evaluation["step"], values))
    return {name: points for name, mapping in mappings.items() if (points := _by_source(mapping))}


def _by_source(records: Iterable[tuple[int, dict[str, Any]]]) -> Points:
    points: Points = {}
    for step, values in records:
        for source, value in values.items():
            if (one := number(value)) is not None:
                points.setdefault(source, []).append((step, one))
    return points


def _by_label(title: str, points: Points, unit: str = "") -> list[str]:
    """A figure with a curve of each label, of the first `MOST_CURVES`."""
    left = len(points) - MOST_CURVES
    note = f"The first {MOST_CURVES} of {len(points):,} by name; metrics.jsonl has all." if left > 0 else ""
    return [charts.curves(title, _lines(points), unit=unit, note=note)] if points else []


def _tasks(material: Material) -> list[tuple[str, Line]]:
    points: Points = {}
    for note in material.records.of(TASKS_EVALUATED):
        for name, value in note["details"].items():
            if (one := number(value)) is not None:
                points.setdefault(name, []).append((note["step"], one))
    return [(name, _lines({name: at})[0]) for name, at in sorted(points.items())]


def _lines(points: Points) -> list[Line]:
    return [
        Line(name, np.array([step for step, _ in at], dtype=np.float64), np.array([y for _, y in at]), len(at) <= 100)
        for name, at in sorted(points.items())[:MOST_CURVES]
    ]


def _charts(drawn: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(drawn)}</div>'


def time_line(material: Material) -> str:
    """When what happened, and the list of starts."""
    past, records = material.history, material.records
    if not past.starts:
        return nothing("Nothing has happened yet.")
    begin = past.starts[0].begin
    end = max(start.end for start in past.starts)

    def moments(notes: Iterable[dict[str, Any]], seconds: str = "") -> list[tuple[float, float]]:
        times = []
        for note in notes:
            stamp = number(note.get("time"))
            length = number(note.get(seconds) if seconds else 0.0)
            if stamp is not None:
                times.append((float(stamp) - float(length or 0.0), float(stamp)))
        return times

    alarms = [note for note in records.notes if note.get("alarm") is True and note["event"] != "rewound"]
    rows = [
        Spans("starting", [(start.begin, start.first) for start in past.starts if not start.rewound], 5),
        Spans("training", [(start.first, start.end) for start in past.starts], 0),
        Spans(
            "lost and repeated",
            [(start.end - start.repeated_seconds, start.end) for start in past.starts if start.repeated],
            1,
        ),
        Spans("evaluations", moments(records.evaluations, "eval_seconds"), 2),
        Spans("saves", moments(records.of("checkpoint_saved")), 3),
        Spans("rewinds", moments(records.of("rewound")), 4),
        Spans("alarms", moments(alarms), 1),
    ]
    drawn = charts.timeline("Time line", rows, begin, end, (when(begin), when(end)))
    shown = past.starts[-STARTS_SHOWN:]
    left = f", the last {STARTS_SHOWN}" if len(past.starts) > len(shown) else ""
    head = ("start", "began", "from step", "to step", "lasted", "before its first step", "lost steps", "ranks", "host",
            "executed otherwise")  # fmt: skip
    rows_of_starts = [_start(len(past.starts) - len(shown) + n + 1, start) for n, start in enumerate(shown)]
    table = webpage.table(head, rows_of_starts, numbers=range(2, 8), caption=f"Starts{left}")
    inferred = nothing("This run has no records of its starts; interruptions are inferred from gaps between steps.")
    return drawn + table + (inferred if any(start.inferred for start in past.starts) else "")


def _start(count: int, start: RecordedStart) -> tuple[object, ...]:
    kind = " (rewound)" if start.rewound else ""
    lost = f"{start.repeated:,} in {duration(start.repeated_seconds)}" if start.repeated else "0"
    return (
        f"{count}{kind}", when(start.begin), f"{start.from_step:,}", f"{start.to_step:,}",
        duration(start.end - start.begin),
        duration(start.first - start.begin), lost, start.ranks or "unknown", start.host or "unknown", start.changed,
    )  # fmt: skip


def causes(material: Material) -> str:
    """Where the time of the run went."""
    past = material.history
    if not past.causes:
        return nothing("No times recorded yet.")
    parts = [(CAUSES[name], seconds, duration(seconds)) for name, seconds in past.causes.items()]
    split = "" if "compute" in past.causes else nothing(
        "Steps are not divided into computing, communication and waiting for data: this run did not record them."
    )  # fmt: skip
    return charts.bars(f"{duration(past.wall)} from the first start to the last record", parts, "time") + split
