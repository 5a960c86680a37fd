"""Draw the pictures of docs/reference/parallelism.md: which rank holds what, from the plan.

python tools/draw_layout.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from llmrecipes.plan.layout import Layout
from llmrecipes.plan.placement import Placement, Range, place
from llmrecipes.recipe.load import load

FOLDER = Path(__file__).parents[1] / "docs/images"
PICTURES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "layout-dense.svg": ("gpt-tiny-3d", 8, ()),
    "layout-context.svg": (
        "gpt-tiny-3d", 4, ("layout.context_parallel_size=2", "layout.pipeline_model_parallel_size=1"),
    ),
    "layout-stages.svg": (
        "gpt-tiny-3d", 4,
        ("model.num_layers=6", "layout.tensor_model_parallel_size=1", "layout.sequence_parallel=false",
         "layout.pipeline_model_parallel_size=4", "layout.virtual_pipeline_model_parallel_size=2",
         "layout.pipeline_model_parallel_layout=E|(t|)*6L"),
    ),
    "layout-experts.svg": (
        "moe-tiny", 4,
        ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
         "layout.expert_model_parallel_size=4", "layout.expert_tensor_parallel_size=1"),
    ),
}  # fmt: skip
"""File, recipe, ranks, changes."""

BOX, LINE, GAP, PAD = 188, 17, 14, 12
COLOURS = ("#dbe9f6", "#fbe3cf", "#dff0d8", "#eadcf0")
"""A box has the colour of its data-parallel slice."""


def draw(laid_out: Layout, ranks: Sequence[Placement]) -> str:
    """An SVG: a row for each pipeline stage, in it a box for each rank."""
    height = LINE * max(len(_lines(rank)) for rank in ranks) + PAD
    per_stage = len(ranks) // laid_out.pipeline_model_parallel_size
    stages = laid_out.pipeline_model_parallel_size
    width = PAD + per_stage * (BOX + GAP)
    total = PAD + stages * (height + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{total}" fill="white"/>',
    ]
    for rank in ranks:
        x, y = PAD + rank.rank % per_stage * (BOX + GAP), PAD + rank.stage * (height + GAP)
        fill = COLOURS[rank.data % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{height}" rx="4" fill="{fill}" stroke="#666"/>')
        for number, line in enumerate(_lines(rank), start=1):
            weight = ' font-weight="bold"' if number == 1 else ""
            parts.append(f'<text x="{x + 8}" y="{y + number * LINE}"{weight}>{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(rank: Placement) -> list[str]:
    """What the box of a rank says."""
    ends = " and ".join(
        name for name, has in (("embedding", rank.has_embedding), ("output", rank.has_output)) if has
    )  # fmt: skip
    lines = [
        f"rank {rank.rank}",
        f"stage {rank.stage}: layers {_words(rank.layers)}",
        f"heads {_words([rank.query_heads])} of each layer",
    ]
    if ends:
        lines += [f"{ends}:", f"rows {_words([rank.vocabulary])}"]
    if rank.experts != (0, 0):
        lines.append(f"experts {_words([rank.experts])} of each layer")
    lines.append(f"tokens {_words(rank.tokens)}")
    if rank.residual_tokens != rank.tokens:
        lines.append(f"norms: tokens {_words(rank.residual_tokens)}")
    more = ", …" if len(rank.sequences) > 2 else ""
    return [*lines, f"sequences {_words(rank.sequences[:2])}{more}"]


def _words(ranges: Sequence[Range]) -> str:
    some = [(first, end) for first, end in ranges if end > first]  # the chunk of the loss may have no layer
    return ", ".join(f"{first}–{end - 1}" if end - first > 1 else str(first) for first, end in some)


def main() -> int:
    """Write the pictures, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which are out of date")
    check = parser.parse_args().check
    stale = []
    for name, (recipe, ranks, changes) in PICTURES.items():
        picture = draw(*place(load(recipe, list(changes)).recipe, ranks))
        path = FOLDER / name
        if path.is_file() and path.read_text("utf-8") == picture:
            continue
        stale.append(name)
        if not check:
            path.write_text(picture, "utf-8")
    if stale:
        print(f"{'out of date' if check else 'drawn'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
