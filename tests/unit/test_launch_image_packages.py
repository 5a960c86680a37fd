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
from llmrecipes.launch.image_packages import IN_IMAGES, LABEL, OTHERS, extras_in_tag, missing
from llmrecipes.recipe.derived.extras import Need, of_recipe
from llmrecipes.recipe.load import load
from tests.refusals import require_message
from tests.unit.data_recipes import STEPS

ROOT = Path(__file__).resolve().parents[2]
DIGEST = f"@sha256:{'7' * 64}"
BUILT = "llmrecipes:0.1.0-cuda-all-0123456789ab"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {"fasttext": "fasttext-predict"}
"""Of imported packages with another name."""
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
    for need in needs:
        assert need.extra is not None
        names = [re.split(r"[\[<>=]", line)[0] for line in EXTRAS[need.extra]]
        assert DISTRIBUTIONS.get(need.package, need.package.replace("_", "-")) in names, need
    assert {need.extra for need in needs} == IN_IMAGES - {"gpu", "search", "server"}, "all that recipes can need"
    assert not list(of_recipe(load("gpt-tiny", []).recipe, prepares=True))


def _step(name: str) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "language": {"languages": ["en"]},
        "classifier": {"model": "m.bin", "labels": ["a"]},
    }
    return {"type": name, **given.get(name, {})}


def test_the_extras_of_images_are_those_of_the_dockerfiles() -> None:
    text = {path.suffix[1:]: path.read_text() for path in (ROOT / "docker").glob("Dockerfile.*")}
    by_default = {kind: set(re.findall(r'^ARG EXTRAS="(.+)"$', text[kind], re.MULTILINE)[0].split()) for kind in text}
    assert by_default == {"cpu": IN_IMAGES - {"gpu"}, "cuda": IN_IMAGES}
    assert not IN_IMAGES & OTHERS
    assert IN_IMAGES | OTHERS | {"dev"} == set(EXTRAS)
    assert all(f'{LABEL}="${{EXTRAS:-none}}"' in each for each in text.values())


def test_extras_that_messages_name_exist() -> None:
    for path in (ROOT / "llmrecipes").rglob("*.py"):
        for names in re.findall(r"llmrecipes\[([a-z,]+)\]", path.read_text()):
            assert set(names.split(",")) <= set(EXTRAS), path


def test_an_image_that_nobody_can_look_into_gets_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    image = f"me/mine{DIGEST}"
    (said,) = (each for each in warned(image, "tracking.prometheus=true", capsys=capsys) if "prometheus" in each)
    assert "prometheus_client" in said and "extra" in said
    lines = "data.steps=[{type: unicode}]"
    assert any("ftfy" in each for each in warned(image, lines, capsys=capsys))
    assert not any("ftfy" in each for each in warned(image, lines, "--prepared", capsys=capsys))
    for url, package in {"gs": "gcsfs", "az": "adlfs"}.items():  # no extra has them
        named = [*warned(f"{BUILT}{DIGEST}", f"checkpoint.copy_to={url}://a/b", capsys=capsys)]
        assert any(package in each for each in named)


@pytest.mark.parametrize(
    ("image", "names"),
    [
        ("llmrecipes:0.1.0-cuda-all", IN_IMAGES),
        ("ghcr.io/me/llmrecipes:0.1.0-cpu-all.ray-0123456789ab@sha256:1", IN_IMAGES - {"gpu"} | {"ray"}),
        ("ghcr.io#me/llmrecipes:0.1.0-cuda-efa-wandb.zero", {"wandb", "zero"}),
        ("/images/me+llmrecipes+0.1.0-cuda-none.sqsh", set()),
        ("llmrecipes_0.1.0-cuda-zero.sif", {"zero"}),
        ("llmrecipes:0.1.0-cuda", None),
        ("llmrecipes:0.1.0-cuda-0123456789ab", None),
        ("me/mine:2.1.0-cuda-devel", None),
        ("me/mine@sha256:1", None),
    ],
)
def test_a_tag_names_extras(image: str, names: set[str] | None) -> None:
    assert extras_in_tag(image) == names


def test_an_image_whose_tag_lacks_an_extra_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("extra" in each for each in warned(BUILT + DIGEST, "tracking.wandb=true", capsys=capsys))
    plain = [word for word in COMMAND if word != "--json"]
    lean = f"ghcr.io/me/llmrecipes:0.1.0-cuda-efa-server.zero{DIGEST}"
    assert run([*plain, lean, "tracking.wandb=true"]) == 2
    require_message(
        capsys.readouterr().err, "tracking.wandb", rule=("--extras all", "0.1.0-cuda-efa-all", "--fabric efa")
    )
    assert not any("extra" in each for each in warned(lean, *ADAMW, "layout.zero={stage: 2}", capsys=capsys))
    nodes = ("--prepare-nodes", "2", "--flavor", "jobset")
    assert run([*plain, BUILT + DIGEST, *nodes]) == 2
    require_message(capsys.readouterr().err, "--prepare-nodes", rule="--extras all,ray")


def test_images_are_looked_into_with_what_this_machine_has(folder: Path) -> None:
    yaml, none = Need("a", "yaml", "zero"), Need("b", "no_such_package", "wandb")
    needs = frozenset({yaml, none})
    for image in ("a.sif", "a.sqsh", "ghcr.io#me/a:1", "docker://me/a"):
        assert missing(image, needs) is None
    python = f'while [ $1 != -c ]; do shift; done; echo NVIDIA; {sys.executable} "$@"'
    labels = f"echo '{json.dumps({LABEL: 'zero wandb'})}'"
    program(folder, "singularity", python)
    program(folder, "podman", f'[ "$1" = image ] && {{ [ "$5" = ghcr.io/me/a:1 ] && echo null; exit; }}; {python}')
    program(folder, "unsquashfs", "echo squashfs-root/opt/venv/lib/python3.12/site-packages/yaml/__init__.py")
    missing.cache_clear()
    for image in ("a.sif", "a.sqsh", "ghcr.io#me/a:1"):
        assert missing(image, needs) == frozenset({none}), image
    assert missing("docker://me/a", needs) is None  # podman does not have it
    program(folder, "docker", f'[ "$1" = image ] && {{ {labels}; exit; }}; exit 1')
    missing.cache_clear()
    assert missing("docker://me/a", needs) == frozenset(), "by its label"
    other = needs | {Need("c", "json", "eval")}
    assert missing("docker://me/a", other) is None, "the label lacks one, and its Python does not start"
    program(folder, "docker", f'[ "$1" = image ] && {{ {labels}; exit; }}; {python}')
    missing.cache_clear()
    assert missing("docker://me/a", other) == frozenset({none}), "an image made from a labelled one may have more"
    program(folder, "unsquashfs", "exit 1")
    missing.cache_clear()
    assert missing("a.sqsh", needs) is None


def test_without_an_image_the_python_that_starts_the_ranks_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_packages, "find_spec", lambda name: None)
    command = ["submit", "gpt-tiny", "--to", "slurm", "--cluster", "laptop", "--dry-run", "tracking.wandb=true"]
    assert run(command) == 0
    assert "wandb" in capsys.readouterr().err
    assert run([*command, "--python", "/opt/python"]) == 0
    assert "extra wandb" not in capsys.readouterr().err
