"""What a layout is called: its ZeRO stage is part of the name wherever it is shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.former import ADAMW
from llmrecipes.engine.base import Implementation, Progress
from llmrecipes.plan.plan_table import rows
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.load import load
from llmrecipes.recipe.variants.proxy import scaled
from llmrecipes.train.summary import describe
from llmrecipes.verify.report import layout_words
from llmrecipes.verify.result import VerifyResult
from llmrecipes.verify.verify_spec import TrainingRecord
from tests.helpers import ROOMY


@pytest.mark.parametrize(
    ("overrides", "words"), [((), ""), (("layout.zero.stage=1",), ", ZeRO 1"), (("layout.zero.stage=3",), ", ZeRO 3")]
)
def test_the_stage_is_part_of_the_name(
    overrides: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load("gpt-tiny", [*ADAMW, *overrides]).recipe
    run = derive_run(recipe, 2, ROOMY)
    plan = run.largest
    assert {name: origin for name, _, origin in rows(run)}["ranks"] == f"parallel: data 2{words}"
    record = TrainingRecord(layout=plan.layout.as_dict(), steps=(), kept_step=None, replicas=None)
    result = VerifyResult(
        "gpt-tiny", 1e-5, record, record, 0.0, None, scaled(recipe, plan.layout.as_dict()), recipe.layout.zero
    )
    assert layout_words(result) == f"DP2{words}, 2 ranks"
    prepared = SimpleNamespace(manifest=SimpleNamespace(chat=None, counts=lambda _split: SimpleNamespace(tokens=1)))
    spec = SimpleNamespace(run_dir=tmp_path)
    joined: Any = SimpleNamespace(spec=spec, cluster=ROOMY, prepared=prepared, network=None)
    describe(joined, plan, Implementation("local", "no GPU"), Progress())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "data-parallel" in line]
    assert line.endswith(f"2 data-parallel{words}")
