"""Sections of a report about the model: its picture, numbers by layer, histograms of its gradients and weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from llmrecipes import webpage
from llmrecipes.plan import drawing
from llmrecipes.plan.blocks import Graph, graph
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.report import charts
from llmrecipes.report.material import Material
from llmrecipes.report.records import Records
from llmrecipes.report.training_sections import nothing
from llmrecipes.tracking.histograms import sizes
from llmrecipes.untrusted import number

LAYER = re.compile(r"(?P<before>(?:.*/)?)layer_(?P<layer>\d{1,6})/(?P<after>.+)")
"""A number of one layer, by its name."""


def picture(material: Material) -> str:
    """The model as its recipe builds it: blocks with their weights, and which pipeline stage holds which layers."""
    if material.recipe is None or check(material.recipe):
        return nothing("The recipe of this run cannot be read, so its model is not drawn.")
    graph_ = graph(material.recipe)
    held = _stages(graph_) if len(graph_.stages) > 1 else ""
    return (
        f"<figure><figcaption>{webpage.text(drawing.words(graph_))}</figcaption>\n{drawing.picture(graph_)}"
        '<p class="note">From the recipe, not measured. The number of a layer is for all its copies; those of its '
        f"blocks are for one.</p></figure>{held}"
    )


def _stages(model_graph: Graph) -> str:
    rows = []
    for place, stage in enumerate(model_graph.stages):
        layers = [number for first, many in stage.chunks for number in range(first, first + many)]
        rows.append((f"{place}", drawing.ranges(layers) or "none", ", ".join(stage.has), f"{stage.parameters:,}"))
    table = webpage.table(("stage", "layers", "besides", "parameters"), rows, numbers=(0, 3))
    return f"<details><summary>what each pipeline stage holds</summary>{table}</details>"


def layers(material: Material) -> str:
    """Numbers by layer, where they were recorded."""
    drawn = [*_sampled(material.records), *_by_name(material.records)]
    if not any(drawn):
        return nothing("Nothing was recorded by layer; set tracking.layers_interval to do so.")
    return f'<div class="charts">{"".join(drawn)}</div>' + histograms(material)


def _sampled(records: Records) -> Iterator[str]:
    """Maps of what is recorded as a list with a number for each layer."""
    for name, samples in sorted(records.samples.items()):
        rows = [
            (step, value)
            for step, value in samples.kept
            if isinstance(value, list) and value and all(item is None or number(item) is not None for item in value)
        ]
        if rows:
            cells = np.full((max(len(value) for _, value in rows), len(rows)), np.nan)
            for column, (_, value) in enumerate(rows):
                cells[: len(value), column] = [np.nan if item is None else float(item) for item in value]
            titles = [f"layer {n + 1}" for n in range(len(cells))]
            yield charts.heat(_words(name), titles, [f"{step:,}" for step, _ in rows], cells)


def _by_name(records: Records) -> Iterator[str]:
    """Maps of what has the number of a layer in its name."""
    by_name: dict[str, dict[int, str]] = {}
    for one in records.names():
        if match := LAYER.fullmatch(one):
            by_name.setdefault(match["before"] + match["after"], {})[int(match["layer"])] = one
    for name, columns in sorted(by_name.items()):
        values = np.stack([records[columns[layer]] for layer in sorted(columns)])
        known = np.flatnonzero(np.isfinite(values).any(axis=0))
        steps = [f"{records.steps[place]:,}" for place in known]
        yield charts.heat(_words(name), [f"layer {layer}" for layer in sorted(columns)], steps, values[:, known])


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", ", ").capitalize()


def histograms(material: Material) -> str:
    """Gradients and weights by size, in the newest measurement by kind and over the steps of all together."""
    drawn = []
    for name in ("gradient", "weight"):
        samples = [
            (step, kinds)
            for step, value in material.records.histograms.kept
            if isinstance(value, Mapping) and isinstance(kinds := value.get(name), Mapping)
        ]
        by_kind = {kind: bins for kind, each in samples[-1][1].items() if (bins := sizes(each))} if samples else {}
        if not by_kind:
            continue
        step = f"{samples[-1][0]:,}"
        drawn.append(_shares(f"{name.capitalize()}s by size at step {step}, share of each kind", by_kind, wide=True))
        over = {f"{at:,}": sum(map(sizes, kinds.values()), Counter()) for at, kinds in samples}
        drawn.append(_shares(f"{name.capitalize()}s by size, share of all", over, wide=False))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def _shares(title: str, counts: Mapping[str, Counter[int]], *, wide: bool) -> str:
    """A map of shares: names and sizes, the sizes as columns or as rows with the largest first."""
    known = {name: each for name, each in counts.items() if each}
    if not known:
        return ""
    low, high = (end(end(counts) for counts in known.values()) for end in (min, max))
    places = list(range(low, high + 1))
    cells = np.array([[counts[place] / counts.total() for place in places] for counts in known.values()])
    sizes = [f"2^{place}" for place in places]
    note = "A value of 2^-10 means at least 2^-10 and less than 2^-9, of either sign; zeros are not counted."
    if wide:
        names = [name.replace("_", " ") for name in known]
        return charts.heat(title, names, sizes, cells, along="size", note=note)
    return charts.heat(title, sizes[::-1], list(known), cells.T[::-1], note=note)
