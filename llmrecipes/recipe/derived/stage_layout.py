"""What every pipeline stage has, and megatron-core's notation of it, `layout.pipeline_model_parallel_layout`.

Read here without megatron-core, so that rules and plan know the stages; a test compares the two readings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import LayoutKeys, Recipe

KEY = "pipeline_model_parallel_layout"
EMBEDDING = "E"
LAYER = "t"
PREDICTION = "m"
LOSS = "L"
NAMES = {
    EMBEDDING: "embedding",
    LAYER: "transformer layer",
    PREDICTION: "layer of multi-token prediction",
    LOSS: "output layer and loss",
}

LONGEST = 100_000
"""Characters of a notation once its repetitions are written out."""
_CLOSED, _SINGLE = re.compile(r"\)(?:\*(\d+))?"), re.compile(r"(.)\*(\d+)")
Repeated = tuple[int, int, str, str]
"""Start and end of a repetition, what is repeated, and how often."""


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[str, ...]:
    """The parts of every stage, one character each, repetitions written out; with virtual stages chunk by chunk.

    As megatron-core reads it: commas are cosmetic, groups are written out before single parts and do not nest.

    Raises:
        ValueError: a part has no meaning, or there are too many.
    """
    text = text.replace(",", "")
    for find in (_groups, _singles):
        matches = list(find(text))
        if len(text) + sum(len(part) * _times(digits) for _, _, part, digits in matches) > LONGEST:
            raise ValueError(f"more than {LONGEST:,} parts")
        written: list[str] = []
        last = 0
        for start, end, part, digits in matches:
            written += text[last:start], part * int(digits)
            last = end
        text = "".join([*written, text[last:]])
    if unknown := set(text) - {*NAMES, "|"}:
        raise ValueError(f"unknown {', '.join(repr(letter) for letter in sorted(unknown))}")
    return tuple(text.split("|"))


def _groups(text: str) -> Iterator[Repeated]:
    """Groups as megatron-core's pattern finds them, in a time linear in the text: a group begins at the first opening
    parenthesis after the end of the one before."""
    last = 0
    for closed in _CLOSED.finditer(text):
        start = text.find("(", last, closed.start())
        if closed[1] and 0 <= start < closed.start() - 1:
            yield start, closed.end(), text[start + 1 : closed.start()], closed[1]
        last = closed.end()


def _singles(text: str) -> Iterator[Repeated]:
    for match in _SINGLE.finditer(text):
        yield match.start(), match.end(), match[1], match[2]


def _times(digits: str) -> int:
    # Python refuses to read numbers of thousands of digits.
    return int(digits) if len(digits) < 10 else LONGEST + 1


def text(parts: Sequence[str]) -> str:
    """The notation of stages, with repetitions of more than two equal ones as groups; the opposite of `parse`."""
    *before, last = parts
    words = []
    for part, same in groupby(before):
        number = sum(1 for _ in same)
        words.append(f"({_short(part)}|)*{number}" if number > 2 else f"{_short(part)}|" * number)
    return "".join([*words, _short(last)])


def _short(part: str) -> str:
    runs = ((each, sum(1 for _ in same)) for each, same in groupby(part))
    return "".join(f"{each}*{number}" if number > 3 else each * number for each, number in runs)


def parts_of(notation: str, part: str) -> int:
    """How many of a part a notation has."""
    return sum(stage.count(part) for stage in parse(notation))


def layers_per_stage(recipe: Recipe) -> tuple[tuple[int, ...], ...]:
    """Layers of each chunk of each pipeline stage, as in megatron-core's `get_num_layers_to_build`."""
    parallel = recipe.layout
    layers = recipe.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    if parallel.pipeline_model_parallel_layout:
        counts = [part.count(LAYER) for part in parse(parallel.pipeline_model_parallel_layout)]
        return tuple(tuple(counts[stage::stages]) for stage in range(stages))
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    embedding = int(parallel.account_for_embedding_in_pipeline_split)
    loss = int(parallel.account_for_loss_in_pipeline_split)
    middle = stages - (first is not None) - (last is not None)
    rest = layers + embedding + loss - (first or 0) - (last or 0)
    each = [rest // middle if middle else 0] * stages
    each[0] = first or each[0]
    each[-1] = last or each[-1]
    cut = [[number // chunks] * chunks for number in each]
    cut[0][0] -= embedding
    cut[-1][-1] -= loss
    return tuple(tuple(stage) for stage in cut)


def written(recipe: Recipe) -> str | None:
    """The recipe's notation, or that of its first and last stage's numbers of layers; None: megatron-core divides."""
    parallel = recipe.layout
    if not parallel.num_layers_in_first_pipeline_stage and not parallel.num_layers_in_last_pipeline_stage:
        return parallel.pipeline_model_parallel_layout
    per_stage = layers_per_stage(recipe)
    parts = [LAYER * stage[chunk] for chunk in range(len(per_stage[0])) for stage in per_stage]
    parts[0] = EMBEDDING + parts[0]
    parts[-1] += PREDICTION * (recipe.model.mtp_num_layers or 0) + LOSS
    return text(parts)


def layer_places(recipe: Recipe) -> list[tuple[int, int]]:
    """Pipeline stage and chunk of each layer, in order."""
    per_stage = layers_per_stage(recipe)
    return [
        (stage, chunk)
        for chunk in range(len(per_stage[0]))
        for stage, layers in enumerate(per_stage)
        for _ in range(layers[chunk])
    ]


def small(parallel: LayoutKeys, stages: int, chunks: int) -> str | None:
    """The first, the last and other stages of a layout's notation, for fewer stages; None without one.

    At most two layers each, two where there were more than on another, and one layer of multi-token prediction.

    Args:
        chunks: of a stage, if there are any.
    """
    if not parallel.pipeline_model_parallel_layout:
        return None
    places = stages * (chunks if parallel.virtual_pipeline_model_parallel_size else 1)
    parts = parse(parallel.pipeline_model_parallel_layout)
    layers = [part.count(LAYER) for part in parts]
    kept = [layers[0], *[max(layers[1:-1], default=0)] * (places - 2), layers[-1]]
    numbers = [min(number, 1 + (number > min(kept))) for number in kept]
    if not any(numbers):
        numbers[0] = 1
    few = [LAYER * number for number in numbers]
    few[0], few[-1] = f"{EMBEDDING}{few[0]}", f"{few[-1]}{PREDICTION * (PREDICTION in parts[-1])}{LOSS}"
    return text(few)


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with a recipe's notation: its parts, their number on the stages, and their places."""
    parallel, model = recipe.layout, recipe.model
    written = parallel.pipeline_model_parallel_layout or ""
    try:
        parts = parse(written)
    except ValueError as error:
        yield _problem(
            f"{written[:200]!r}: {error}",
            "stages are separated by | and consist of E (embedding), t (transformer layer), m (multi-token "
            "prediction) and "
            "L (loss), with repetitions as t*3 and (tt|)*2",
            "for example Et*3|(tt|)*2tL; llmrecipes plan --search proposes one for the model",
        )
        return
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    if len(parts) != stages * chunks:
        yield _problem(
            f"{len(parts)} stages for pipeline_model_parallel_size {stages} × virtual_pipeline_model_parallel_size "
            f"{chunks}",
            f"the layout needs {stages * chunks} parts, one per chunk of every stage",
            _degrees(len(parts), stages) or f"{stages * chunks} stages in {KEY}",
        )
        return
    wanted = {EMBEDDING: 1, LAYER: model.num_layers, PREDICTION: model.mtp_num_layers or 0, LOSS: 1}
    counts = {part: parts_of(written, part) for part in NAMES}
    key = {LAYER: "num_layers", PREDICTION: "mtp_num_layers"}
    for part, number in wanted.items():
        if counts[part] != number:
            name = key.get(part)
            other = f", or model.{name} {counts[part] or 'null'}" if name else ""
            yield _problem(
                f"{counts[part]} {part} for {f'{name} ' if name else ''}{number}",
                f"{part} is the {NAMES[part]}: each must be on exactly one stage",
                f"{number} {part} in {KEY}{other}",
            )
            return
    yield from _places(parts, stages, chunks)


def _places(parts: tuple[str, ...], stages: int, chunks: int) -> Iterator[Problem]:
    if not parts[0].startswith(EMBEDDING) or not parts[-1].endswith(LOSS):
        yield _problem(
            f"stages begin with {parts[0] or 'nothing'} and end with {parts[-1] or 'nothing'}",
            "the first stage must begin with the embedding, and the last must end with the loss",
            f"{EMBEDDING} at the beginning and {LOSS} at the end of {KEY}",
        )
        return
    if empty := [number for number, part in enumerate(parts) if not part]:
        yield _problem(
            f"nothing on stage {empty[0] % stages}, chunk {empty[0] // stages}",
            "every chunk of a stage needs a layer",
            f"a layer there, or fewer stages in {KEY}",
        )
    predicting = [number for number, part in enumerate(parts) if PREDICTION in part]
    whole = "".join(parts)
    if not predicting:
        return
    if LAYER in whole[whole.index(PREDICTION) :]:
        yield _problem(
            f"{LAYER} after {PREDICTION}",
            "multi-token prediction must come after the last transformer layer",
            f"{PREDICTION} after every {LAYER}",
        )
    elif predicting != [len(parts) - 1]:
        yield _problem(
            f"{PREDICTION} on stage {predicting[0] % stages}, chunk {predicting[0] // stages}",
            "multi-token prediction layers must be on the stage of the loss",
            f"{parts[-1].replace(LOSS, '')}{PREDICTION * whole.count(PREDICTION)}{LOSS} as the last stage",
        )


def _degrees(number: int, stages: int) -> str:
    chunks, rest = divmod(number, stages)
    if rest or not chunks:
        return f"pipeline_model_parallel_size {number}, without virtual stages" if number > 1 else ""
    return f"virtual_pipeline_model_parallel_size {chunks if chunks > 1 else 'null'}"


def _problem(what: str, rule: str, fix: str) -> Problem:
    return Problem(f"layout.{KEY}", what, rule, fix)
