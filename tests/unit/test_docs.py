"""Printed samples in the documentation are what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmrecipes.cli.app import run
from llmrecipes.files import recipes_dir
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load, names

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md")))
REPEATABLE = re.compile(
    r"llmrecipes (list$|clusters$|plan (?!.*--(search|what-if|scaling-curve)).*--cluster|"
    r"submit (?!.*--to (k8s|skypilot)).*--cluster .*--dry-run)"
)
"""Commands whose output depends neither on this machine nor on earlier ones; Kubernetes' objects have golden files."""
ABSOLUTE = re.compile(r"(^|[ =])/")
"""A path of the machine that printed the sample."""
ELIDED = ("...", "…")


def samples() -> list[tuple[str, str, list[str]]]:
    """Page, command and printed lines of every sample of such a command."""
    found = []
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            if language not in ("", "console"):
                continue
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *printed = part.splitlines()
                command = command.partition("  #")[0].strip()
                if (
                    printed
                    and REPEATABLE.match(command)
                    and "mine.yaml" not in command
                    and not set("|<>;&") & set(command)
                ):
                    found.append((page.name, command, printed))
    return found


SAMPLES = samples()


@pytest.mark.parametrize(("page", "command", "printed"), SAMPLES, ids=[f"{page}: {what}" for page, what, _ in SAMPLES])
def test_a_sample_is_what_the_command_prints(
    page: str, command: str, printed: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = ["--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)] if " submit " in command else []
    run([*shlex.split(command)[1:], *folders])
    captured = capsys.readouterr()
    real = {" ".join(line.split()) for line in f"{captured.out}\n{captured.err}".splitlines()}
    wanted = [" ".join(line.split()) for line in printed if line.strip() not in ELIDED]
    wanted = [line for line in wanted if line and not line.endswith(ELIDED) and not ABSOLUTE.search(line)]
    assert [line for line in wanted if line not in real] == []


def test_samples_are_found_and_every_recipe_is_listed() -> None:
    assert {"recipes.md", "tutorial.md"} <= {page for page, _, _ in SAMPLES}
    page = (ROOT / "docs" / "guide" / "recipes.md").read_text("utf-8")
    listed = page.partition("llmrecipes list\n")[2].partition("```")[0]
    assert {line.split()[0] for line in listed.splitlines()[1:]} == set(names(recipes_dir()))


README = (ROOT / "README.md").read_text("utf-8")


def test_the_recipe_of_the_readme_is_one(tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text(README.partition("```yaml\n")[2].partition("```")[0], "utf-8")
    plan = derive(load(str(path)).recipe, 4, detect())
    assert plan.layout.data_parallel_size == 2
    assert f" {len(names(recipes_dir()))} recipes " in README


def test_every_guarantee_names_its_test() -> None:
    page = (ROOT / "docs" / "reference" / "verify.md").read_text("utf-8")
    guarantees = page.partition("## What the tests cover")[2].partition("\n## ")[0]
    lines = [line for line in guarantees.splitlines() if line.startswith("- ")]
    proofs = re.findall(r"`(test_\w+)`\s+\(\[(tests/\S+)\]", guarantees)
    assert len(proofs) == len(lines) > 3
    assert [name for name, file in proofs if f"def {name}(" not in (ROOT / file).read_text("utf-8")] == []


def test_every_page_is_in_the_map_of_the_docs() -> None:
    linked = set(re.findall(r"\]\(([\w-]+/[\w-]+\.md)", (ROOT / "docs" / "README.md").read_text("utf-8")))
    assert {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]} == linked
    assert "(docs/README.md)" in README


def test_no_page_names_a_line_of_source() -> None:
    """The next change of the file would move it."""
    assert [each for page in PAGES for each in re.findall(r"\S+\.py:\d+", page.read_text("utf-8"))] == []
