"""The training loss by source of the blend: the sums of one process in every layout, and what steps report of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Batch, Engine, Progress, World
from llmrecipes.engine.parts.source_losses import SourceLosses
from llmrecipes.tracking.events import is_measured
from tests.dist.table import BOUND, Row, Sections
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld
from tests.helpers import tiny

pytestmark = pytest.mark.dist

NAMES = ("a", "b", "c")
BLEND: Sections = {
    "data": {"sources": [{"type": "jsonl", "path": name} for name in NAMES]},
    "tracking": {"loss_by_source": True},
}
STEPS = 3
LAYOUTS: list[tuple[str, str, Sections]] = [
    ("gpt", "dp2", {}),
    ("gpt", "tp2 sp", {}),
    ("gpt", "pp2 vpp2", {}),
    ("gpt", "cp2", {}),
    ("mtp", "tp2", {}),
    ("packed llama", "dp2", {}),
]


def numbered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Micro-batches whose samples have a source that depends on their tokens only."""
    for batch in batches:
        yield {**batch, "source": batch["tokens"].sum(1) % len(NAMES)}


def only(batches: Iterator[Batch], source: int) -> Iterator[Batch]:
    """Micro-batches whose loss counts the tokens of one source."""
    for batch in numbered(batches):
        kept = (batch["source"] == source)[:, None]
        yield {**batch, "loss_mask": batch["loss_mask"] * kept}


def sums(row: Row) -> tuple[list[tuple[tuple[float, ...], float]], list[float | None]]:
    """Sums by source and the loss of each step; before them the loss of each source by itself, of one process."""
    with training(row.recipe) as (engine, world):
        sources = engine.parts.the(SourceLosses)
        alone = [] if world.size > 1 else [_evaluated(engine, world, source) for source in range(len(NAMES))]
        steps, batches = [], numbered(loaders(row.recipe, world))
        for _ in range(STEPS):
            sources.start()
            result = engine.train_step(batches)
            steps.append((sources.take(), result.loss))
        return steps, alone


def _evaluated(engine: Engine, world: World, source: int) -> float | None:
    with engine.params_synced():
        return engine.evaluate(only(loaders(engine.recipe, world), source), 1)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


def of_one_process(model: str, alone: dict[str, Any], worlds: dict[int, GlooWorld]) -> Any:
    if model not in alone:
        alone[model] = worlds[1].run(sums, Row(model, "dp1", BLEND))
    return alone[model]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "changes"), LAYOUTS)
def test_sums_are_those_of_one_process(
    model: str, layout: str, changes: Sections, alone: dict[str, Any], worlds: dict[int, GlooWorld]
) -> None:
    expected, by_themselves = of_one_process(model, alone, worlds)
    losses, tokens = expected[0][0][: len(NAMES)], expected[0][0][len(NAMES) :]
    assert [loss / count for loss, count in zip(losses, tokens, strict=True)] == pytest.approx(by_themselves, rel=BOUND)
    require_same(worlds[2].run(sums, Row(model, layout, {**BLEND, **changes}))[0], expected)


@pytest.mark.slow
@pytest.mark.deepspeed
def test_deepspeed_sums_the_same(alone: dict[str, Any], worlds: dict[int, GlooWorld]) -> None:
    for layout in ("dp2", "tp2"):
        row = Row("gpt", layout, {**BLEND, "layout": {"zero": {"stage": 2}}}, engine="deepspeed")
        require_same(worlds[2].run(sums, row)[0], of_one_process("gpt", alone, worlds)[0])


def require_same(steps: list[tuple[tuple[float, ...], float]], expected: list[tuple[tuple[float, ...], float]]) -> None:
    """Tokens are exact; the losses of the sources are together the loss of the step."""
    for (found, loss), (other, _) in zip(steps, expected, strict=True):
        losses, tokens = found[: len(NAMES)], found[len(NAMES) :]
        assert tokens == other[len(NAMES) :] and all(tokens)
        assert losses == pytest.approx(other[: len(NAMES)], rel=BOUND)
        assert sum(losses) / sum(tokens) == pytest.approx(loss, rel=1e-6)


def test_sums_of_a_micro_batch() -> None:
    plan: Any = SimpleNamespace(
        recipe=tiny(data={"sources": [{"type": "text", "path": name} for name in NAMES]}),
        layout=SimpleNamespace(tensor_model_parallel_size=2),
    )
    step: Any = SimpleNamespace(plan=plan)
    sources = SourceLosses(step)
    losses, mask = (
        torch.tensor([[1.0, 2.0], [4.0, 0.0], [8.0, 16.0]]),
        torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
    )
    found = sources.by_source(losses, mask, torch.tensor([2, 0, 2]))
    assert found.tolist() == [4, 0, 27, 1, 0, 4] and found.dtype == torch.float64
    assert sources.by_source(losses, mask, None).tolist() == [0.0] * 6
    sources.start()
    sources.add(found.tolist())
    sources.add(found.tolist())  # of two ranks that share each token
    assert sources.take() == (4, 0, 27, 1, 0, 4)


def test_a_report_is_of_the_steps_since_the_last_one_also_after_a_resume() -> None:
    recipe = tiny(data={"sources": [{"type": "text", "path": name} for name in NAMES]}, train={"train_iters": 25})
    now: list[tuple[float, ...]] = []
    plan: Any = SimpleNamespace(recipe=recipe, layout=SimpleNamespace(tensor_model_parallel_size=1))
    step_of: Any = SimpleNamespace(plan=plan)
    sources = SourceLosses(step_of)
    sources.take = lambda: now[0]  # type: ignore[method-assign]

    def reports(progress: Progress, last: int) -> tuple[Progress, dict[int, Any]]:
        seen = {}
        while progress.step < last:
            step = progress.step + 1
            bad = step == 14
            now[:] = [(math.nan if bad else 2.0 * step, 0.0, 3.0, 2.0, 0.0, 1.0)]
            fields = sources.fields(progress)
            if fields:
                seen[step] = fields["source_loss"]
            progress = Progress(step=step, **sources.progress())
        return progress, seen

    _, whole = reports(Progress(), 25)
    assert list(whole) == [step for step in range(1, 26) if is_measured(step, recipe)] == [1, 10, 20, 25]
    assert whole[1] == {"a": 1.0, "c": 3.0}
    assert whole[10]["a"] == sum(range(2, 11)) / 9
    assert whole[20]["a"] == (sum(range(11, 21)) - 14) / 9
    for stop in (4, 10, 17):
        progress, first = reports(Progress(), stop)
        assert first | reports(progress, 25)[1] == whole
    # Switched on in the middle of a run, and another number of sources: both begin with nothing.
    assert reports(Progress(step=18, source_sums=(1.0, 1.0)), 20)[1][20]["a"] == 19.5
