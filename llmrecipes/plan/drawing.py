"""The picture of a model, as SVG inside HTML: its blocks from token ids to logits, and its layers on pipeline stages.

It is drawn upright in units of a narrow screen's pixels, so that its text can be read there and grows a little on a
wide one. Colours and dashes are those of `webpage.STYLE`, light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from llmrecipes.console import number
from llmrecipes.plan.blocks import Block, Graph, Layers, Weights
from llmrecipes.webpage import text

STYLE = """\
svg.graph { display: block; max-width: 34rem; width: 100%; }
.graph text { fill: var(--text); font: 11px system-ui, sans-serif; }
.graph .title { font-weight: 600; font-size: 12px; }
.graph .note, .graph .size { fill: var(--muted); }
.graph .count { text-anchor: end; }
.graph .box { fill: var(--panel); stroke: var(--line); }
.graph .frame { fill: none; stroke: var(--muted); stroke-dasharray: 5 3; }
.graph .flow { fill: none; stroke: var(--muted); stroke-width: 1.3; }
.graph .tip { fill: var(--muted); }
.graph .tied { fill: none; stroke: var(--c0); stroke-dasharray: 2 3; stroke-width: 1.5; }
.graph .cell { stroke: var(--page); stroke-width: .8; }
.graph .small { font-size: 9px; text-anchor: middle; }
"""

WIDE = 380
"""Units of the picture's width; text has eleven."""
LINE = 15
PAD = 6
GAP = 14
COLOURS = {"embedding": 0, "norm": 5, "attention": 3, "mlp": 2, "experts": 1, "join": 4, "layer": 4, "output": 0}
"""Of the classes f0 to f5 (`report.charts`)."""
NORMS = ("input_layernorm", "pre_mlp_layernorm")
"""Norms from whose input the residual stream goes past attention or MLP."""
OF_LAYERS = {False: 2, True: 1}
ENDS = {"embedding": 0, "copy of the embedding": 0, "multi-token prediction": 4, "output layer": 0}
"""Of what a stage has besides its layers; the final norm is too small to be shown."""
MOST_RANGES = 6


def picture(graph: Graph) -> str:
    """The model as one SVG with its description in words."""
    drawn = _Column(8, WIDE - 8)
    begin = drawn.box(graph.embedding)
    for layers in graph.layers:
        drawn.arrow()
        many = len(layers.numbers)
        notes = [f"{ranges(layers.numbers)}; each {number(layers.parameters)}"] if many > 1 else []
        notes += ["in turn with those of the other kind, as below"] if graph.alternates else []
        title = f"{many:,} {_kind(layers, many)}"
        count = number(many * layers.parameters)
        _frame(drawn, title, count, layers.blocks, notes, layers.adapters)
    drawn.arrow()
    drawn.box(graph.norm)
    drawn.arrow()
    end = drawn.box(graph.output)
    if not graph.output.parts:
        # At the right edge, past the layers, from the output layer to the weights it shares.
        drawn.add(f'<path class="tied" d="M{WIDE - 8} {begin}h5V{end}h-5"/>')
    if graph.predictions:
        drawn.gap(20)
        title = "Multi-token prediction" + (f" × {graph.predictions}" if graph.predictions > 1 else "")
        notes = ["in training only, with embedding and output above"]
        _frame(drawn, title, number(graph.predicting), graph.prediction, notes)
    if len(graph.stages) > 1 or graph.alternates:
        drawn.gap(20)
        _strip(drawn, graph)
    return drawn.svg(words(graph))


def words(graph: Graph) -> str:
    """The model in a sentence."""
    kinds = ", ".join(f"{len(layer.numbers):,} {_kind(layer, len(layer.numbers))}" for layer in graph.layers)
    tied = "tied" if not graph.output.parts else "untied"
    stages = f", on {len(graph.stages):,} pipeline stages" if len(graph.stages) > 1 else ""
    extra = f", {graph.predictions:,} of multi-token prediction" if graph.predictions else ""
    return (
        f"{graph.parameters:,} parameters: embedding {graph.embedding.parameters:,}, {kinds}{extra}, "
        f"{tied} output layer{stages}"
    )


def ranges(numbers: Sequence[int]) -> str:
    """`1 to 3, 5` for layers 0, 1, 2 and 4; the first few of many."""
    spans = []
    for _, some in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        span = [each for _, each in some]
        spans.append(f"{span[0] + 1:,}" if len(span) == 1 else f"{span[0] + 1:,} to {span[-1] + 1:,}")
    return ", ".join(spans if len(spans) <= MOST_RANGES else [*spans[: MOST_RANGES - 2], "…", spans[-1]])


def _kind(layers: Layers, many: int = 2) -> str:
    noun = "layer" if many == 1 else "layers"
    return f"{noun} with experts" if layers.experts else f"dense {noun}"


class _Column:
    """SVG elements from top to bottom, between two edges."""

    def __init__(self, left: float, right: float) -> None:
        self.left = left
        self.right = right
        self.y = 4.0
        self._parts: list[str] = []

    def add(self, element: str) -> None:
        self._parts.append(element)

    def gap(self, units: float) -> None:
        self.y += units

    def svg(self, label: str) -> str:
        body = "".join(self._parts)
        return (
            f'<svg class="graph" viewBox="0 0 {WIDE} {self.y + 4:g}" role="img" aria-label="{text(label)}">{body}</svg>'
        )

    def line(self, left: str, kind: str = "size", right: str = "") -> None:
        """A line of text, and a number at the right."""
        self.y += LINE
        at = f"{self.y - 4:g}"
        self.add(f'<text class="{kind}" x="{self.left + PAD + 5:g}" y="{at}">{text(left)}</text>')
        if right:
            kind = "title count" if kind == "title" else "count"
            self.add(f'<text class="{kind}" x="{self.right - PAD:g}" y="{at}">{text(right)}</text>')

    def arrow(self) -> None:
        middle = (self.left + self.right) / 2
        end = self.y + GAP
        self.add(f'<path class="flow" d="M{middle:g} {self.y:g}V{end - 4:g}"/>')
        self.add(f'<path class="tip" d="M{middle - 3.5:g} {end - 5:g}h7l-3.5 5z"/>')
        self.y = end

    def box(self, block: Block) -> float:
        """A box of a block; returns where its middle is."""
        top, mark = self.y, len(self._parts)
        self.y += 2
        self.line(block.title, "title", number(block.parameters) if block.parts else "")
        for note in block.notes:
            self.line(note, "note")
        for part in block.parts if block.kind not in ("norm", "layer") else ():
            self.part(part)
        self.y += 4
        high = self.y - top
        wide = self.right - self.left
        colour = f'<rect class="f{COLOURS[block.kind]}" x="{self.left:g}" y="{top:g}" width="4" height="{high:g}"/>'
        box = f'<rect class="box" x="{self.left:g}" y="{top:g}" width="{wide:g}" height="{high:g}"/>'
        self._parts.insert(mark, box + colour)
        return top + high / 2

    def part(self, part: Weights) -> None:
        self.line(f"{part.name} {part.size}".rstrip(), "size", number(part.parameters))


def _frame(
    drawn: _Column,
    title: str,
    right: str,
    blocks: Iterable[Block],
    notes: Iterable[str],
    adapters: Sequence[Weights] = (),
) -> None:
    """Blocks of a layer in a frame, with the stream that goes past attention and MLP and their norms."""
    top, left, edge = drawn.y, drawn.left, drawn.right
    drawn.gap(2)
    drawn.line(title, "title", right)
    for note in notes:
        drawn.line(note, "note")
    drawn.gap(4)
    drawn.left = left + 26
    drawn.right = edge - 8
    past = left + 13
    middle = (drawn.left + drawn.right) / 2
    split = drawn.y
    for place, block in enumerate(blocks):
        if place:
            drawn.arrow()
        if block.parts and block.parts[0].name in NORMS:
            split = drawn.y - GAP / 2 if place else drawn.y + 3
            drawn.gap(0 if place else GAP / 2)
        drawn.box(block)
        if block.kind in ("attention", "mlp", "experts"):
            end = drawn.y + 9
            drawn.add(f'<path class="flow" d="M{middle:g} {split:g}H{past:g}V{end:g}H{middle - 6:g}"/>')
            drawn.add(f'<path class="flow" d="M{middle:g} {drawn.y:g}v3M{middle:g} {split - 4:g}v8"/>')
            drawn.add(f'<circle class="box" cx="{middle:g}" cy="{end:g}" r="6"/>')
            drawn.add(f'<path class="flow" d="M{middle - 3:g} {end:g}h6M{middle:g} {end - 3:g}v6"/>')
            drawn.gap(15)
    if adapters:
        drawn.gap(6)
        count = number(sum(part.parameters for part in adapters))
        drawn.line("Adapters (LoRA), trained", "title", count)
        for part in adapters:
            drawn.part(part)
    drawn.gap(7)
    drawn.left, drawn.right = left, edge
    size = f'width="{edge - left:g}" height="{drawn.y - top:g}"'
    drawn.add(f'<rect class="frame" x="{left:g}" y="{top:g}" {size} rx="4"/>')


def _strip(drawn: _Column, graph: Graph) -> None:
    """A column for each stage, a row for each of its chunks, and in it a cell for each layer, in order."""
    stages, chunks = len(graph.stages), len(graph.stages[0].chunks)
    many = f"{len(graph.kinds()):,} layers on {stages:,} pipeline stages"
    drawn.line(f"{many}{f' of {chunks} chunks' if chunks > 1 else ''}" if stages > 1 else "Layers in order", "title")
    drawn.line("from left to right, then the next row" if chunks > 1 else "from left to right", "note")
    wide = (drawn.right - drawn.left) / stages
    kinds = graph.kinds()
    high = 18
    paths: dict[int, list[str]] = {}
    for stage, held in enumerate(graph.stages):
        for chunk, (first, layers) in enumerate(held.chunks):
            cells = [OF_LAYERS[graph.layers[kinds[n]].experts] for n in range(first, first + layers)]
            before = [ENDS[name] for name in held.has if "embedding" in name] if chunk == 0 else []
            after = [ENDS[name] for name in ENDS if name in held.has and "embedding" not in name]
            cells = [*before, *cells, *(after if chunk == chunks - 1 else [])]
            width = (wide - 2) / max(1, len(cells))
            for place, kind in enumerate(cells):
                left = drawn.left + stage * wide + 1 + place * width
                top = drawn.y + chunk * (high + 4) + 3
                paths.setdefault(kind, []).append(f"M{left:.1f} {top:g}h{width:.1f}v{high}h-{width:.1f}z")
    for kind, path in sorted(paths.items()):
        drawn.add(f'<path class="cell f{kind}" d="{"".join(path)}"/>')
    drawn.gap(chunks * (high + 4) + 4)
    if stages > 1:
        stride = -(-stages * 14 // round(drawn.right - drawn.left))
        drawn.gap(9)
        for stage in range(0, stages, stride):
            at = drawn.left + (stage + 0.5) * wide
            drawn.add(f'<text class="note small" x="{at:.1f}" y="{drawn.y:g}">{stage}</text>')
        drawn.gap(3)
    names = ["embedding, output"] + [_kind(layer) for layer in graph.layers]
    shown = [0, *(OF_LAYERS[layer.experts] for layer in graph.layers)]
    if graph.predictions:
        names.append("multi-token prediction")
        shown.append(ENDS["multi-token prediction"])
    for name, kind in zip(names, shown, strict=True):
        drawn.line(name, "note")
        drawn.add(f'<rect class="f{kind}" x="{drawn.left:g}" y="{drawn.y - 12:g}" width="9" height="9"/>')
