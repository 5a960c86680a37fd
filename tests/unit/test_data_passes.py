"""The order of text over several passes: each has every token once, and depends on nothing that comes later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset

from llmrecipes.checkpoint.local_parts import LocalPart, LocalParts, folder_of
from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord
from llmrecipes.data.folder.prepared import most_passes
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.read.batches import batches
from llmrecipes.data.read.dataset import build
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import require_same_recipe
from tests.refusals import refused
from tests.unit.data_recipes import corpus, recipe

LENGTH = 32


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[float, tuple[Recipe, Prepared]]:
    """Runs of so many passes over the first source, and half as many over the second, which is as large."""
    root = tmp_path_factory.mktemp("passes")
    sources = (
        corpus(root / "first").model_copy(update={"weight": 2.0}),
        corpus(root / "second", seed=1, word="omega"),
    )
    base = recipe(*sources, seq_length=LENGTH)
    tokens = prepare(base, root / "data", workers=1).manifest.sources[0].splits["train"].tokens
    made = {}
    for passes in (0.9, 1.95, 3.4):
        iters = int(passes * tokens * 1.5 / LENGTH / base.train.global_batch_size)
        used = recipe(*sources, seq_length=LENGTH, train_iters=iters)
        made[passes] = used, prepare(used, root / "data", workers=1)
    return made


def places(source: Any, samples: range) -> np.ndarray:
    """Which tokens of a source samples have, by their place in it: [samples, LENGTH]."""
    lengths = source.dataset.sequence_lengths.astype(int)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    joined = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in source.document_index])
    found = np.stack([joined[n * LENGTH : (n + 1) * LENGTH] for n in map(int, source.shuffle_index[samples])])
    text = np.concatenate([source.dataset[n] for n in range(len(lengths))])
    for row, number in zip(found[::50], samples[::50], strict=True):
        assert source[number]["tokens"].tolist() == text[row].tolist()
    return found


def test_each_pass_has_every_token_once(drawn: dict[float, tuple[Recipe, Prepared]]) -> None:
    blend: Any = build(*drawn[3.4], "train")
    for source, passes in zip(blend.datasets, (3, 1), strict=True):
        tokens = int(source.dataset.sequence_lengths.sum())
        borders = [0, *((turn * tokens - 1) // LENGTH for turn in range(1, passes + 1))]
        assert borders[-1] < len(source)
        seen = np.zeros(tokens, int)
        for first, end in pairwise(borders):
            of_pass = places(source, range(first, end))
            assert not np.array_equal(of_pass, np.sort(of_pass.reshape(-1)).reshape(of_pass.shape))
            counts = np.bincount(of_pass.reshape(-1), minlength=tokens)
            # A sample across the border of two passes has tokens of both.
            assert (counts != 1).sum() < 2 * LENGTH
            seen += counts
        assert seen.sum() == borders[-1] * LENGTH and (seen == passes).sum() >= tokens - LENGTH


def samples(chosen: tuple[Recipe, Prepared]) -> Iterator[list[int]]:
    blend: Any = build(*chosen, "train")
    return (blend[number]["tokens"].tolist() for number in range(chosen[0].train.train_iters * 8))


def test_a_longer_run_begins_alike(drawn: dict[float, tuple[Recipe, Prepared]]) -> None:
    assert [most_passes(*chosen) for chosen in drawn.values()] == [1, 2, 4]
    longest = list(samples(drawn[3.4]))
    for chosen in drawn.values():
        shorter = list(samples(chosen))
        assert shorter == longest[: len(shorter)]


def test_a_resume_in_a_later_pass_goes_on_in_its_order(drawn: dict[float, tuple[Recipe, Prepared]]) -> None:
    used, prepared = drawn[3.4]
    size = used.train.global_batch_size
    blend: Any = build(used, prepared, "train")

    def read(consumed: int) -> list[list[int]]:
        stream = batches(
            blend,
            consumed_samples=consumed,
            micro_batch_size=size,
            global_batch_size=size,
            data_parallel_rank=0,
            data_parallel_size=1,
            num_workers=0,
            prefetch_factor=1,
            pin_memory=False,
        )
        return [sample.tolist() for batch in stream for sample in batch["tokens"]]

    whole = read(0)
    for passes in (1.5, 2.5):
        consumed = int(len(whole) * passes / 3.4) // size * size
        assert read(consumed) == whole[consumed:]


def test_one_pass_has_the_order_of_megatron_core(drawn: dict[float, tuple[Recipe, Prepared]], tmp_path: Path) -> None:
    used, prepared = drawn[0.9]
    blend: Any = build(used, prepared, "train")
    for source in blend.datasets:
        source.config.path_to_cache = str(tmp_path)
        theirs = GPTDataset(
            source.dataset, source.dataset_path, source.indices, source.num_samples, source.index_split, source.config
        )
        assert np.array_equal(theirs.shuffle_index, source.shuffle_index)
        assert np.array_equal(theirs.document_index, source.document_index)
        assert np.array_equal(theirs.sample_index, source.sample_index)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("passes", "order"), [(0.9, 1), (1.95, 1), (1.95, 2)])
def test_a_run_whose_passes_were_shuffled_as_one_is_resumed_only_if_that_is_accepted(
    drawn: dict[float, tuple[Recipe, Prepared]],
    tmp_path: Path,
    passes: float,
    order: int,
    local: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    used, prepared = drawn[passes]
    run = Run(tmp_path / "t" / "r")
    run.create()
    if local:
        places = {"non_persistent_save_interval": 5, "non_persistent_local_ckpt_dir": str(tmp_path / "local")}
        used = used.model_copy(update={"checkpoint": used.checkpoint.model_copy(update=places)})
    run.recipe_file.write_text(to_yaml(used), encoding="utf-8")
    info = CheckpointInfo(
        step=5, consumed_samples=40, consumed_tokens=1280, layout={}, recipe_hash="r", sample_order=order
    )
    if local:
        run.local_checkpoints.write_text('{"token": "abc", "resumed": 0}')
        parts, part = LocalParts(folder_of(str(tmp_path / "local"), "t", "abc", 0)), LocalPart(5, "0" * 8, 0, 1)
        temporary = parts.temporary(part)
        temporary.mkdir()
        parts.publish(temporary, part, info, {}, {"weights.bin": FileRecord(size=7, sha256="0" * 64)})
    else:
        store = run.store()
        temporary = store.temporary(5)
        (temporary / "weights.bin").write_bytes(b"weights")
        store.publish(temporary, info, versions={})
    if (passes, order) == (1.95, 1):
        with refused(run.path, rule=("2", "step 5", "--accept-changes")):
            require_same_recipe(used, run, prepared.path.parent, accept=False)
        require_same_recipe(used, run, prepared.path.parent, accept=True)
        assert "step 5" in caplog.text
    else:
        require_same_recipe(used, run, prepared.path.parent, accept=False)
