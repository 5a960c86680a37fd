"""What a recipe needs from extras, against what the image of its job has."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.former import ADAMW
from llmrecipes.cli.app import run
from llmrecipes.launch import image_packages
from llmrecipes.launch.image_packages import DISTRIBUTIONS, IN_IMAGES, missing
from llmrecipes.recipe.derived.extras import of_recipe
from llmrecipes.recipe.load import load
from tests.refusals import require_message
from tests.unit.data_recipes import STEPS

ROOT = Path(__file__).resolve().parents[2]
DIGEST = f"@sha256:{'7' * 64}"
BUILT = "llmrecipes:0.1.0-cuda-0123456789ab"
COMMAND = ["submit", "gpt-tiny", "--to", "k8s", "--cluster", "laptop", "--dry-run", "--json", "--image"]
NEEDY = [
    *ADAMW, "tracking.wandb=true", "tracking.prometheus=true", "tracking.energy_model=codecarbon",
    "train.eval_tasks={tasks: [a], interval: 1}", "layout.zero={stage: 2}",
    "data.sources=[{type: jsonl, path: s3://a/b.jsonl}]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing.cache_clear()
    yield tmp_path
    missing.cache_clear()


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def warned(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert run([*COMMAND, *words]) == 0
    found: list[str] = json.loads(capsys.readouterr().out)["summary"]["warnings"]
    return found


def test_every_package_that_a_recipe_can_need_is_in_the_extra_that_is_named() -> None:
    every = json.dumps([_step(name) for name, step in STEPS.items() if step.does.package])
    needs = [
        *of_recipe(load("gpt-tiny", [*NEEDY, f"data.steps={every}"]).recipe, prepares=True),
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for need in needs:
        names = [re.split(r"[\[<>=]", line)[0] for line in extras[need.extra]]
        assert DISTRIBUTIONS.get(need.package, need.package.replace("_", "-")) in names, need
    assert {need.extra for need in needs} == {"corpora", "energy", "eval", "prometheus", "wandb", "zero"}
    assert not list(of_recipe(load("gpt-tiny", []).recipe, prepares=True))


def _step(name: str) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "language": {"languages": ["en"]},
        "classifier": {"model": "m.bin", "labels": ["a"]},
    }
    return {"type": name, **given.get(name, {})}


def test_the_extras_of_images_are_those_of_the_dockerfiles() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docker").glob("Dockerfile.*"))
    assert set(re.findall(r"--extra (\w+)", text)) == IN_IMAGES


def test_an_image_that_nobody_can_look_into_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    image = f"me/mine{DIGEST}"
    (said,) = (each for each in warned(image, "tracking.prometheus=true", capsys=capsys) if "prometheus" in each)
    assert "prometheus_client" in said and "extras" in said
    assert not any(
        "deepspeed" in each for each in warned(image, *ADAMW, "layout.zero={stage: 2}", capsys=capsys)
    )  # images have it
    lines = "data.steps=[{type: unicode}]"
    assert any("ftfy" in each for each in warned(image, lines, capsys=capsys))
    assert not any("ftfy" in each for each in warned(image, lines, "--prepared", capsys=capsys))


def test_an_image_whose_bill_of_materials_lacks_a_package_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "build").mkdir()
    bill = folder / "build" / f"{BUILT.replace(':', '-')}.cdx.json"
    bill.write_text(json.dumps({"components": [{"name": "prometheus-client"}, {"name": "deepspeed"}]}))
    assert not any("prometheus" in each for each in warned(BUILT + DIGEST, "tracking.prometheus=true", capsys=capsys))
    plain = [word for word in COMMAND if word != "--json"]
    assert run([*plain, f"ghcr.io/me/{BUILT}{DIGEST}", "tracking.wandb=true"]) == 2
    require_message(capsys.readouterr().err, "tracking.wandb")
    bill.write_text("{")
    missing.cache_clear()
    assert warned(BUILT + DIGEST, "tracking.wandb=true", capsys=capsys)


def test_images_are_looked_into_with_what_this_machine_has(folder: Path) -> None:
    packages = frozenset({"yaml", "no_such_package"})
    for image in ("a.sif", "a.sqsh", "ghcr.io#me/a:1", "docker://me/a"):
        assert missing(image, packages) is None
    python = f'while [ $1 != -c ]; do shift; done; echo NVIDIA; {sys.executable} "$@"'
    program(folder, "singularity", python)
    program(folder, "podman", f'[ "$1" = image ] && {{ [ "$4" = ghcr.io/me/a:1 ]; exit; }}; {python}')
    program(folder, "unsquashfs", "echo squashfs-root/opt/venv/lib/python3.12/site-packages/yaml/__init__.py")
    missing.cache_clear()
    for image in ("a.sif", "a.sqsh", "ghcr.io#me/a:1"):
        assert missing(image, packages) == frozenset({"no_such_package"}), image
    assert missing("docker://me/a", packages) is None  # podman does not have it
    program(folder, "unsquashfs", "exit 1")
    missing.cache_clear()
    assert missing("a.sqsh", packages) is None


def test_without_an_image_the_python_that_starts_the_ranks_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_packages, "find_spec", lambda name: None)
    command = ["submit", "gpt-tiny", "--to", "slurm", "--cluster", "laptop", "--dry-run", "tracking.wandb=true"]
    assert run(command) == 0
    assert "wandb" in capsys.readouterr().err
    assert run([*command, "--python", "/opt/python"]) == 0
    assert "extra wandb" not in capsys.readouterr().err
