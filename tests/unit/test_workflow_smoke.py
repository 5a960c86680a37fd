"""`llmrecipes smoke`: it passes where resuming works, and says so where it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.engine.core import random_states
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.load import load
from llmrecipes.recipe.variants.proxy import proxy, scaled
from llmrecipes.workflow.smoke import SmokeResult
from tests.helpers import ROOMY, ROOT, tiny, tiny_on, write_recipe


def smoke(corpus: Path, data_dir: Path, folder: Path, *options: str, **model: Any) -> int:
    recipe = tiny_on(corpus, "rehearsed", model={"hidden_dropout": 0.2, **model}, train={"precision": "bf16"})
    paths = ("--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir))
    return cli.run(["smoke", write_recipe(recipe, folder), *options, *paths])


@pytest.mark.rotating
def test_a_rehearsal_trains_saves_resumes_and_compares(
    corpus: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an image for GPUs, too: TransformerEngine can be imported there, and its Adam cannot run on a CPU."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/stub_te'}:{os.environ.get('PYTHONPATH', '')}")
    assert smoke(corpus, data_dir, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["first_difference"], found["resumed_at"]) == (True, None, found["steps"] // 2)
    assert found["last_loss"] < found["first_loss"]
    assert (found["layout"]["world_size"], found["reduced"], found["not_run"]) == (1, [], [])
    assert {path.name for path in Path(found["run_dir"]).iterdir()} == {"uninterrupted", "resumed"}


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_fine_tuning_resumes_as_if_it_had_not_stopped(
    packing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    source = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    recipe = tiny("asked", data={"sources": [source], "chat": {"packing": packing}, "split": [90.0, 10.0, 0.0]})
    paths = ("--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data"))
    assert cli.run(["smoke", write_recipe(recipe, tmp_path), "--json", *paths]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["first_difference"]) == (True, None)
    assert found["last_loss"] < found["first_loss"]


@pytest.mark.slow
def test_a_resume_that_forgets_the_random_state_is_found_out(
    corpus: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_states, "set_random_states", lambda states: None)
    # Masks of dropout need no state; noise of routers does.
    noisy: dict[str, Any] = {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_input_jitter_eps": 0.2,
        "add_bias_linear": False,
    }  # fmt: skip
    assert smoke(corpus, data_dir, tmp_path, **noisy) == 1
    printed = capsys.readouterr().out
    assert "smoke rehearsed: FAILED" in printed
    assert "DIFFERS from the uninterrupted run at step 11" in printed


def test_a_rehearsal_reports_what_it_left_out() -> None:
    recipe = load("mixtral-8x7b", ["layout.expert_tensor_parallel_size=2"]).recipe
    small = proxy(recipe)
    layout = derive(small, smallest_world(small.layout), ROOMY).layout.as_dict()
    result = SmokeResult("m", 20, 10, 2.0, 1.0, None, "runs", layout, scaled(recipe, layout))
    assert result.ok
    assert [each["degree"] for each in result.as_dict()["not_run"]] == ["expert_tensor_parallel_size"]
    assert {"PP 4 to 2", "EP 8 to 2"} <= {each.change for each in result.scaled.reduced}
    lines = [line.split(maxsplit=2) for line in result.as_text().splitlines()]
    assert ["not", "run", "expert_tensor_parallel_size"] in [line[:2] + line[2].split()[:1] for line in lines[1:]]
