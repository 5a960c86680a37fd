"""Sections of a report about machine and model: memory, plan, ranks, layers, energy, cost, data, recipe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from llmrecipes import webpage
from llmrecipes.console import duration
from llmrecipes.data.folder.data_manifest import DataManifest
from llmrecipes.report import charts
from llmrecipes.report.material import Material, at
from llmrecipes.report.records import Values
from llmrecipes.report.training_sections import nothing, series, when
from llmrecipes.tracking.energy import Energy
from llmrecipes.units import GIB, gib
from llmrecipes.untrusted import number

MOST_EVENTS = 300
MOST_EXPERT_ROWS = 128
LONGEST_DETAIL = 400
LONGEST_VALUE = 2000


def memory(material: Material) -> str:
    """Memory over the steps, and the plan's parts."""
    drawn = series(material, "Memory, peak of rank 0", [("memory_bytes", "peak")], unit="bytes")
    held = [name for name in _spreads(material, "ranks") if "memory" in name]
    drawn += "".join(
        series(
            material,
            f"{_title(name)} over all ranks, peak",
            [(f"ranks/{name}/{key}", title) for key, title in SPREAD],
            unit="bytes",
        )
        for name in held
    )
    parts = at(material.plan, "memory")
    if not isinstance(parts, Mapping):
        return (drawn or nothing("No memory was recorded.")) + nothing("This run has no plan.")
    known = [(name.replace("_", " "), float(size)) for name, each in parts.items()
             if name != "total" and (size := number(each)) is not None and size > 0]  # fmt: skip
    bar = charts.bars("Planned memory per rank", [(name, size, gib(int(size))) for name, size in known], "bytes")
    return f'<div class="charts">{drawn or nothing("No memory was recorded.")}{bar}</div>'


def planned(material: Material) -> str:
    """What was predicted beside what was measured."""
    records = material.records
    rows = []

    def row(name: str, plan: float | None, measured: float | None, shape: str) -> None:
        if plan is None and measured is None:
            return
        cells = ["unknown" if value is None else shape.format(value) for value in (plan, measured)]
        off = f"{plan / measured - 1:+.0%}" if plan and measured else ""
        rows.append((name, *cells, off))

    step = material.measured("measured/step_seconds")
    if step is None and records.has("step_seconds"):
        step = float(np.nanmedian(records["step_seconds"]))
    row("seconds per step, median", material.planned("predicted", "step_seconds"), step, "{:.4g}")
    for name, key in (("computation per step", "compute_seconds"), ("communication per step", "communication_seconds")):
        row(name, material.planned("predicted", key), material.measured(f"measured/{key}"), "{:.4g}")
    held = material.planned("predicted", "memory_bytes") or material.planned("memory", "total")
    most = material.measured("measured/memory_bytes")
    if most is None and records.has("memory_bytes"):
        most = float(np.nanmax(records["memory_bytes"]))
    scale = 1 / GIB
    row("memory of the rank that uses most, GiB", held and held * scale, most and most * scale, "{:.2f}")
    if not rows:
        return nothing("There is neither a plan nor a measurement yet.")
    text = webpage.table(("quantity", "predicted", "measured", "difference"), rows, numbers=(1, 2, 3))
    if material.planned("predicted", "step_seconds") is None:
        text += nothing("No time was predicted: the speed of this machine is unknown (docs/guide/planner.md).")
    return text + _layout(material)


def _layout(material: Material) -> str:
    degrees = at(material.plan, "degrees")
    if not isinstance(degrees, Mapping):
        return ""
    rows = [(name.replace("_", " "), value) for name, value in degrees.items() if number(value) is not None]
    return f"<details><summary>layout</summary>{webpage.table(('degree', 'value'), rows, numbers=(1,))}</details>"


_EXPERT_MEASURES = {
    "imbalance": "Largest over mean expert load (1 is even)",
    "entropy": "Entropy of the router, nats",
}


def experts(material: Material) -> str:
    """Load of the experts of each layer."""
    if not material.records.experts.kept:
        return nothing("The model has no experts, or their load has not been measured yet.")
    steps = [step for step, _ in material.records.experts.kept]
    by_measure: dict[str, dict[int, dict[int, float]]] = {key: {} for key in _EXPERT_MEASURES}
    dropped = np.zeros(len(steps))
    last: dict[int, list[Any]] = {}
    for place, (_, layers) in enumerate(material.records.experts.kept):
        for layer in layers:
            name = number(at(layer, "layer"))
            if name is None:
                continue
            for key, values in by_measure.items():
                if (value := number(at(layer, key))) is not None:
                    values.setdefault(int(name), {})[place] = float(value)
            dropped[place] += number(at(layer, "dropped")) or 0.0
            tokens = at(layer, "tokens_per_expert")
            if isinstance(tokens, list) and tokens:
                last[int(name)] = tokens
    columns = [f"{step:,}" for step in steps]
    drawn = [
        charts.heat(f"{title} by layer", [f"layer {name}" for name in values], columns, _grid(values, len(steps)))
        for title, values in zip(_EXPERT_MEASURES.values(), by_measure.values(), strict=True)
        if values
    ]
    # An earlier load would be shown under the last step.
    sound = {name: tokens for name, tokens in last.items() if all(number(token) is not None for token in tokens)}
    loads = {name: [float(token) for token in tokens] for name, tokens in sound.items()}
    if loads:
        drawn.append(_load(loads, columns[-1]))
    if dropped.any():
        drawn.append(
            charts.curves("Dropped token-expert assignments", [charts.Line("dropped", np.array(steps, float), dropped)])
        )
    return f'<div class="charts">{"".join(drawn)}</div>'


def _grid(values: Mapping[int, Mapping[int, float]], columns: int) -> Values:
    cells = np.full((len(values), columns), np.nan)
    for row, of_layer in enumerate(values.values()):
        for column, value in of_layer.items():
            cells[row, column] = value
    return cells


def _load(last: Mapping[int, list[float]], step: str) -> str:
    """Share of the tokens by layer and expert, in the last measurement."""
    many = max(map(len, last.values()))
    cells = np.full((len(last), many), np.nan)
    for row, tokens in enumerate(last.values()):
        whole = sum(tokens)
        if whole > 0:
            cells[row, : len(tokens)] = np.array(tokens) / whole * len(tokens)
    names = [f"layer {name}" for name in last]
    dead = [
        f"layer {name}: {sum(count == 0 for count in tokens)} of {len(tokens)}"
        for name, tokens in last.items()
        if 0 in tokens
    ]
    lost = (
        f"Experts without tokens in step {step}: {', '.join(dead)}."
        if dead
        else f"Every expert had tokens in step {step}."
    )
    title = f"Load per expert in step {step} (1 is even)"
    columns = [str(n) for n in range(many)]
    return charts.heat(title, names, columns, cells, along="expert", note=lost)


SPREAD = (("min", "least"), ("median", "median"), ("max", "most"))
TIMES = ("compute_seconds", "communication_seconds", "data_seconds", "save_seconds", "evaluate_seconds", "slowness")
"""Of the ranks; the others are drawn under Memory."""
UNITS = {"_seconds": "s", "_bytes": "bytes", "_bytes_per_second": "bytes/s", "_watts": "W", "_mhz": "MHz", "_c": "°C"}


def stragglers(material: Material) -> str:
    """Ranks whose times differ from the others'."""
    names = _spreads(material, "ranks")
    shown = [name for name in TIMES if name in names] + [
        name for name in names if "memory" not in name and name not in TIMES
    ]
    if not shown:
        return nothing("Times per rank were not recorded.")
    rows = []
    for name in shown:
        who = material.records[f"ranks/{name}/max_rank"]
        known = who[np.isfinite(who)]
        if known.size:
            ranks, counts = np.unique(known.astype(int), return_counts=True)
            most = int(np.argmax(counts))
            rows.append((_title(name), f"rank {ranks[most]}", counts[most] / known.size))
    return _extremes(rows, "rank") + _drawn_spreads(material, "ranks", shown)


def nodes(material: Material) -> str:
    """Use, power, clocks and traffic of the nodes."""
    names = _spreads(material, "nodes")
    if not names:
        return nothing(
            "Nothing was recorded about the nodes: GPU use, power, clocks, temperature, processor, disk, network."
        )
    rows = []
    for name in names:
        counts = material.records.texts.get(f"nodes/{name}/max_node")
        if counts:
            node, often = counts.most_common(1)[0]
            rows.append((_title(name), node, often / counts.total()))
    return _extremes(rows, "node") + _drawn_spreads(material, "nodes", names)


def _spreads(material: Material, of: str) -> list[str]:
    """Names of quantities that steps have of all ranks or nodes."""
    names = (name.split("/") for name in material.records.names(f"{of}/"))
    return list(dict.fromkeys(parts[1] for parts in names if len(parts) == 3 and parts[2] in ("min", "median", "max")))


def _drawn_spreads(material: Material, of: str, names: Iterable[str]) -> str:
    drawn = [
        series(material, _title(name), [(f"{of}/{name}/{key}", title) for key, title in SPREAD], unit=_unit(name))
        for name in names
    ]
    return f'<div class="charts">{"".join(drawn)}</div>'


def _extremes(rows: list[tuple[str, str, float]], of: str) -> str:
    if not rows:
        return ""
    head = ("quantity", f"{of} that was most often the largest", "share of the reports")
    return webpage.table(head, [(name, who, f"{share:.0%}") for name, who, share in rows], numbers=(2,))


def _title(name: str) -> str:
    return name.removesuffix(_ending(name)).replace("_", " ").capitalize()


def _unit(name: str) -> str:
    return UNITS.get(_ending(name), "")


def _ending(name: str) -> str:
    return max((end for end in UNITS if name.endswith(end)), key=len, default="")


def energy(material: Material) -> str:
    """Energy and carbon: what the run has recorded, else by the power of a cluster profile."""
    used = used_energy(material)
    if used is None:
        return nothing("No energy was measured. --cluster NAME estimates it, if that profile has costs.watts_per_gpu.")
    rows = [("energy", f"{used.kwh:,.3g} kWh")]
    rows += [] if used.kg_co2 is None else [("carbon", f"{used.kg_co2:,.3g} kg CO₂")]
    tokens = material.records.last("consumed_tokens")
    rows += [] if tokens is None else [("tokens per joule", f"{tokens / used.joules:,.3g}")]
    missing = material.records.last("energy/nodes_missing")
    rows += [] if missing is None else [("nodes that could not be read and are not included", f"{missing:,.0f}")]
    drawn = series(material, "Tokens per joule", [("energy/tokens_per_joule", "of all nodes")])
    return webpage.table(("quantity", "value"), rows, numbers=(1,)) + nothing(f"Energy was {used.how()}.") + drawn


def used_energy(material: Material) -> Energy | None:
    """Energy of all starts, by the profile if one is named; estimated by its power if none was recorded."""
    records = material.records
    costs = material.costs
    hours = material.history.rank_hours
    if records.energy is not None:
        return records.energy.by(costs)
    if records.has("energy/joules"):  # of a version that did not add it up
        joules = float(np.nansum(records["energy/joules"]))
        return Energy().plus(joules, records.texts.get("energy/method", ()), costs) if joules else None
    if costs is None or costs.watts_per_gpu is None or not hours:
        return None
    return Energy().plus(hours * 3600 * costs.watts_per_gpu, ["profile"], costs)


def cost(material: Material) -> str:
    """Hours and their price."""
    hours = material.history.rank_hours
    costs = material.costs
    if hours is None:
        return nothing("The number of ranks or the time is unknown.")
    rows = [("rank-hours, including starts", f"{hours:,.3g}")]
    lost = sum(start.repeated_seconds * (start.ranks or 0) for start in material.history.starts) / 3600
    if lost:
        rows.append(("of these, lost in repeated steps", f"{lost:,.3g}"))
    if costs is None or costs.usd_per_gpu_hour is None:
        return webpage.table(("quantity", "value"), rows, numbers=(1,)) + nothing(
            "No price: use --usd-per-gpu-hour PRICE, or --cluster NAME with a profile that has costs.usd_per_gpu_hour."
        )
    rows.append((f"cost at {costs.usd_per_gpu_hour:g} USD per GPU-hour", f"{hours * costs.usd_per_gpu_hour:,.2f} USD"))
    return webpage.table(("quantity", "value"), rows, numbers=(1,))


def environment(material: Material) -> str:
    """Versions and machine of the newest start, and what differs from earlier ones."""
    if not material.environment:
        return nothing("env.json is missing or cannot be read.")
    newest = dict(flat(material.environment))
    earlier = [(name, dict(flat(values))) for name, values in material.environments]
    text = ""
    if earlier:
        starts = [*earlier, ("now", newest)]
        keys = [key for key in dict.fromkeys(key for _, values in starts for key in values)
                if len({values.get(key, "") for _, values in starts}) > 1]  # fmt: skip
        head = ("key", *(f"until step {name}" for name, _ in earlier), "newest start")
        rows = [(key, *(values.get(key, "") for _, values in starts)) for key in keys]
        text = webpage.table(head, rows, caption="Differences between starts") if rows else ""
    else:
        text = nothing("All starts had the same environment, or there was only one.")
    table = webpage.table(("key", "value"), newest.items())
    return f"{text}<details><summary>environment of the newest start</summary>{table}</details>"


def flat(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as text, by dotted name."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list) and values and not all(isinstance(value, Mapping) for value in values):
        yield name, " ".join(map(str, values))
    elif isinstance(values, list) and values:
        for place, value in enumerate(values):
            yield from flat(value, f"{name}.{place}")
    else:
        text = "none" if values is None else str(values)
        yield name, text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


DOCTOR = (
    "network", "hardware_suspect", "hang", "replicas_differ", "results_differ", "gradients_wrong", "straggler",
    "straggler_left_out", "straggler_kept", "xid",
)  # fmt: skip


def doctor(material: Material) -> str:
    """What checks of nodes and network said."""
    rows = [
        (
            note["event"].replace("_", " "),
            f"{note['step']:,}",
            when(number(note.get("time"))),
            _details(note["details"]),
        )
        for event in DOCTOR
        for note in material.records.of(event)
    ]
    try:
        bad = material.run.bad_nodes.read_text("utf-8", errors="replace")[:4096].splitlines()
    except OSError:
        bad = []
    rows += [("excluded by the Slurm job", "", "", line) for line in bad]
    noted = webpage.table(("what", "step", "when", "details"), rows[:MOST_EVENTS], numbers=(1,)) if rows else nothing(
        "No check of nodes, network or replicas reported anything during training."
    )  # fmt: skip
    return _examined(material) + noted


def _examined(material: Material) -> str:
    """What the doctor said before the newest start."""
    if not material.examined:
        return nothing(
            "Jobs store the doctor's findings before a start, as does `llmrecipes doctor RECIPE --run-id ID`; "
            "this run has none."
        )
    newest = material.examined[-1]
    findings = [finding for finding in newest["findings"] if isinstance(finding, Mapping)]
    rows = [
        (*(str(finding.get(key, "")) for key in ("status", "check", "what", "fix")), _named(finding))
        for finding in findings
    ]
    head = ("result", "check", "what", "fix", "nodes")
    earlier = len(material.examined) - 1
    failed = sum(examination.get("ok") is False for examination in material.examined[:-1])
    before = f" Of {earlier:,} earlier checks, {failed:,} failed." if earlier else ""
    about = _in_short(newest, Counter(row[0] for row in rows)) + before
    wrong = [row for row in rows if row[0] in ("fail", "warn")]
    fine = [row for row in rows if row[0] not in ("fail", "warn")]
    shown = webpage.table(head, wrong) if wrong else ""
    folded = f"<details><summary>other checks</summary>{webpage.table(head, fine)}</details>" if fine else ""
    return f"<p>{webpage.text(about)}</p>{shown}{folded}"


def _in_short(examination: Mapping[str, Any], counts: Counter[str]) -> str:
    """When the doctor looked at how many nodes, the number of its findings by result, and bad nodes."""
    said = ", ".join(f"{counts[name]:,} {name}" for name in ("fail", "warn", "skip", "ok") if counts[name])
    bad = examination.get("bad_nodes")
    left = f"; bad nodes: {', '.join(map(str, bad))}" if isinstance(bad, list) and bad else ""
    of = number(examination.get("nodes"))
    nodes = f", {of:,} nodes" if of is not None and of > 1 else ""
    return f"The doctor, {when(number(examination.get('time')))}{nodes}: {said or 'nothing'}{left}."


def _named(finding: Mapping[str, Any]) -> str:
    names = finding.get("nodes")
    count = number(finding.get("number"))
    known = [str(name) for name in names if name] if isinstance(names, list) else []
    more = 0 if count is None else int(count) - len(known)
    return ", ".join(known) + (f" and {more:,} more" if known and more > 0 else "")


def data(material: Material) -> str:
    """What was trained on."""
    if material.data is None:
        missing = nothing(
            "The prepared data of this run is not in this data folder (--data-dir), so counts are not shown."
        )
        if material.recipe is None:
            return missing
        weights = [(source.type, f"{source.weight:g}") for source in material.recipe.data.sources]
        return missing + webpage.table(("source", "weight"), weights, numbers=(1,))
    rows = []
    for source in material.data.sources:
        dropped = {
            "empty": source.empty,
            "not UTF-8": source.undecodable,
            "duplicates": source.duplicates,
            **source.steps,
        }
        counts = [
            f"{source.splits[split].tokens:,}" if split in source.splits else "0"
            for split in ("train", "valid", "test")
        ]
        lost = ", ".join(f"{count:,} {name}" for name, count in dropped.items() if count) or "none"
        rows.append((source.label, f"{source.read:,}", lost, *counts))
    head = ("source", "documents read", "dropped", "training tokens", "validation tokens", "test tokens")
    tokenizer = material.data.tokenizer
    about = f"Tokenizer: {tokenizer.type}, {tokenizer.vocab_size:,} tokens. Fingerprint: {material.data.fingerprint}."
    passes = ""
    tokens = material.records["consumed_tokens"]
    whole = material.data.counts("train").tokens
    if tokens.size and whole and np.isfinite(tokens[-1]):
        passes = nothing(
            f"The run has consumed {charts.short(float(tokens[-1]))} tokens: {tokens[-1] / whole:.3g} passes."
        )
    return webpage.table(head, rows, numbers=(1, 3, 4, 5)) + passes + contamination(material.data) + nothing(about)


def contamination(data: DataManifest) -> str:
    """Whether training text was compared with evaluation files, and which of them it had text of."""
    dropped = data.decontaminated
    if dropped is None:
        return nothing("Training text was not compared with evaluation tasks (step decontaminate of data.steps).")
    if not dropped:
        return nothing("No document contained text of the evaluation files of the step decontaminate.")
    rows = [(file, f"{count:,}") for file, count in sorted(dropped.items(), key=lambda item: -item[1])]
    head = ("evaluation file", "dropped documents with its text")
    return webpage.table(head, rows, numbers=(1,), caption="Contamination of evaluation tasks")


def recipe(material: Material) -> str:
    """The recipe, and the values that differ from the defaults."""
    if not material.recipe_text:
        return nothing("recipe.yaml is missing or cannot be read.")
    text = ""
    if material.recipe is not None:
        changed = flat(material.recipe.model_dump(mode="json", exclude_defaults=True))
        text = webpage.table(("key", "value"), changed, caption="Values that differ from the defaults")
    return (
        f"{text}<details><summary>the whole recipe</summary><pre>{webpage.text(material.recipe_text)}</pre></details>"
    )


def events(material: Material) -> str:
    """Notes of the run, the newest last."""
    if not material.records.notes:
        return nothing("No events were recorded.")
    counts = ", ".join(
        f"{name.replace('_', ' ')} ({count:,})" for name, count in material.records.events.most_common(50)
    )
    shown = sorted(material.records.notes, key=lambda note: number(note.get("time")) or 0.0)[-MOST_EVENTS:]
    rows = [
        (f"{note['step']:,}", when(number(note.get("time"))), ("ALARM: " if note.get("alarm") is True else "")
         + note["event"].replace("_", " "), _details(note["details"]))
        for note in shown
    ]  # fmt: skip
    table = webpage.table(("step", "when", "event", "details"), rows, numbers=(0,))
    left = "" if len(rows) == sum(material.records.events.values()) else f", the last {len(rows):,} are shown below"
    return f"<p>{webpage.text(counts + left)}</p><details><summary>events</summary>{table}</details>"


def _details(details: Mapping[str, Any]) -> str:
    text = ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in details.items()
    )
    return text if len(text) <= LONGEST_DETAIL else f"{text[:LONGEST_DETAIL]}…"


def logs(material: Material) -> str:
    """The last lines of the logs."""
    if not material.logs:
        return nothing("There are no logs in the run's folder: a run with one rank prints to its terminal.")
    return "".join(
        f"<details><summary>{webpage.text(name)}, last {len(lines)} lines</summary>"
        f'<pre tabindex="0">{webpage.text(chr(10).join(lines))}</pre></details>'
        for name, lines in material.logs
    )


def age(material: Material) -> str:
    """How long ago the run has last reported."""
    updated = material.summary.updated
    return "" if updated is None else f", {duration(max(0.0, material.now - updated))} before this page was written"
