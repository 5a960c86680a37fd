"""`prepare --on ray`: the bytes of one process, whichever node is lost."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.data.preparation import pipeline
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.sources import file_parts
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.data_steps import DuplicatesStep
from llmrecipes.recipe.sections.source import make_source
from tests.dashboard import free_port
from tests.refusals import refused
from tests.unit.data_recipes import corpus, made_step, recipe


@pytest.mark.parametrize("on", ["rai", "ray"])
def test_an_executor_that_is_not_there_is_refused_before_the_tokenizer_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    monkeypatch.setattr("llmrecipes.data.preparation.ray_cluster.find_spec", lambda name: None)
    said = list[str]()
    with refused("--on"):
        prepare(recipe(corpus(tmp_path / "text")), tmp_path / "data", on=on, progress=said.append)
    assert not said


def compared(folder: Path) -> Recipe:
    """A recipe with near-copies, and a source that ends at `max_tokens`."""
    text = corpus(folder / "text")
    rows = [
        path.read_text() + ("" if n % 3 else " once more")
        for n, path in enumerate(sorted(Path(text.location).iterdir()))
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows), encoding="utf-8")
    made = recipe(
        text.model_copy(update={"max_tokens": 6000}), make_source(type="jsonl", path=str(folder / "rows.jsonl"))
    )
    near = made_step({"type": "near_duplicates", "threshold": 0.7})
    data = made.data.model_copy(
        update={"split": (80.0, 10.0, 10.0), "steps": (DuplicatesStep(type="duplicates"), near)}
    )
    return made.model_copy(update={"data": data})


def node() -> dict[str, object]:
    """Arguments of a node without what only people need. With ports of their own choice, a node gives up if its agents
    take longer than 15 s to start."""
    agents = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
    ports: dict[str, object] = {name: free_port() for name in agents}
    return {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True, **ports}


def content(prepared: Prepared) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.path.iterdir() if path.is_file() and path.name[0] != "."}


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is missing: make test-ray RAY=DIR")
def test_two_nodes_of_which_one_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did is done again, while shards are encoded, and what it had done is kept."""
    from ray.cluster_utils import Cluster

    used = compared(tmp_path)
    expected = content(prepare(used, tmp_path / "one", workers=1))
    monkeypatch.setattr(file_parts, "PART_BYTES", 4000)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **node()})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        lost = cluster.add_node(num_cpus=1, **node())
        add, lines, added = pipeline.EncodingProgress.add, list[str](), list[Any]()

        def lose(progress: pipeline.EncodingProgress, reading: Any) -> None:
            add(progress, reading)
            added.append(reading)
            if len(added) == 3:
                cluster.remove_node(lost, allow_graceful=False)

        monkeypatch.setattr(pipeline.EncodingProgress, "add", lose)
        several = prepare(used, tmp_path / "several", on="ray", progress=lines.append)
        assert "on ray, with 2 items at a time" in lines and len(added) > 10
        assert content(several) == expected
        bad = used.model_copy(update={"data": used.data.model_copy(update={"sources": used.data.sources[1:]})})
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": ', encoding="utf-8")
        with refused(f"{tmp_path}/rows.jsonl"):
            prepare(bad, tmp_path / "bad", on="ray")
        assert [path.suffix for path in (tmp_path / "bad").iterdir()] == [".lock"]
    finally:
        cluster.shutdown()
