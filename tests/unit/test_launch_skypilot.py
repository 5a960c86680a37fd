"""A run as a task of SkyPilot: valid, and what each of its nodes runs."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.cli.app import run
from llmrecipes.hardware.load import load_profile, names
from llmrecipes.launch.skypilot.launcher import RECIPE, accelerator
from llmrecipes.recipe.load import load
from llmrecipes.workflow.submit import plan_for
from tests.refusals import require_message

STRING: dict[str, Any] = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0}
SCHEMA: dict[str, Any] = {
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
        "workdir": STRING,
        "num_nodes": {"type": "integer"},
        "volumes": {"type": "object"},
        "setup": STRING,
        "run": STRING,
        "resources": {
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 1},
                "cpus": STRING,
                "memory": STRING,
                "image_id": STRING,
                "network_tier": {"enum": ["standard", "best"]},
                "job_recovery": {
                    "additionalProperties": False,
                    "properties": {
                        "max_restarts_on_errors": NUMBER,
                        "recover_on_exit_codes": {"type": "array", "items": {**NUMBER, "maximum": 255}},
                    },
                },
            },
        },
    },
}
"""The part that is used of the schemas of SkyPilot 0.14.1 (sky/utils/schemas.py)."""
SUBMIT = ["submit", "gpt-1b", "--to", "skypilot", "--cluster", "h100-ib", "--run-id", "first"]


def task(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    import jsonschema  # takes a second, and every process of a test run imports this module

    assert run([*words, "--dry-run"]) == 0
    made: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    jsonschema.validate(made, SCHEMA)
    if find_spec("sky") is not None:
        from sky import Task  # type: ignore[import-not-found]

        Task.from_yaml_config(json.loads(json.dumps(made)))
    return made


def test_each_node_trains_the_recipe_with_its_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = task(capsys, *SUBMIT, "--nodes", "4", "--volume", "ws", "--accept-changes", "--max-restarts", "7")
    assert made["num_nodes"] == 4 and made["volumes"] == {"/llmrecipes": "ws"} and made["workdir"] == "."
    assert made["resources"]["accelerators"] == {"H100": 8} and made["resources"]["network_tier"] == "best"
    assert made["resources"]["job_recovery"] == {"max_restarts_on_errors": 7, "recover_on_exit_codes": [75]}
    program = tmp_path / ".venv" / "bin" / "llmrecipes"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    node = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n"}
    script = made["run"].replace(RECIPE.rpartition("/")[0], str(tmp_path / "own"))
    ran = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **node}, text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    words = ran.stdout.split()
    assert words[:4] == ["train", str(tmp_path / "own" / "recipe.yaml"), "--run-id", "first"]
    assert "--accept-changes" in words and words[words.index("--nproc") + 1] == "32"
    assert words[words.index("--nnodes") :] == ["--nnodes", "4", "--node-rank", "2", "--rdzv", "10.0.0.1:29500"]
    assert load(words[1]).recipe == plan_for("gpt-1b", [], "h100-ib", 4).recipe, "in the layout that was chosen"


def test_one_node_needs_no_volume_and_an_image_no_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    made = task(capsys, *SUBMIT, "--image", "ghcr.io/me/x:1")
    assert made["resources"]["image_id"] == "docker:ghcr.io/me/x:1" and not {"workdir", "setup", "volumes"} & set(made)
    assert "exec llmrecipes train" in made["run"] and "SKYPILOT" not in made["run"]
    made = task(capsys, "submit", "gpt-tiny", "--to", "skypilot", "--cluster", "laptop")
    assert made["resources"]["cpus"] == "4+" and "accelerators" not in made["resources"]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--nodes", "2", "--dry-run"], "--volume"),
        (["--volume", "a b", "--dry-run"], "--volume"),
        (["--claim", "x", "--dry-run"], "--claim"),
        ([], "--to"),
    ],
)
def test_what_is_no_task_is_refused(words: list[str], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SUBMIT, *words]) == 2
    require_message(capsys.readouterr().err, where)


def test_gpus_of_all_profiles_have_names_of_skypilot() -> None:
    gpus = {profile.gpu.name for profile in map(load_profile, names()) if profile.gpu is not None}
    # As in its catalogs.
    known = {"A100-80GB", "H100", "H200", "L40S", "GB200", "RTX4090"}
    assert {accelerator(gpu) for gpu in gpus} == known
    more = {"AMD Instinct MI300X": "MI300X", "NVIDIA A100-PCIE-40GB": "A100", "NVIDIA B200": "B200"}
    assert {accelerator(gpu): gpu for gpu in more} == {name: gpu for gpu, name in more.items()}
