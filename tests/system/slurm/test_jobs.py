"""Submission, preparation, containers and accounting on real daemons."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmrecipes.data.prepare import prepare
from llmrecipes.launch.slurm.sbatch import after
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOT, train_lines, write_recipe
from tests.system.slurm.conftest import PROFILE, Site
from tests.system.slurm.daemons import DATABASE, PROGRAMS, Lab, cluster, missing

TRAIN, PREPARE = str(ROOT / "slurm/train.sbatch"), str(ROOT / "slurm/prepare.sbatch")
HOSTILE = "$(touch owned) `touch owned` 'a' \"b\"\n#SBATCH --account=root\n; touch owned # ../../ %j \\ * ~ ü"


def test_slurm_takes_the_scripts_and_what_is_rendered(site: Site, recipe: Recipe) -> None:
    for script in (TRAIN, PREPARE):
        assert "to start at" in site.sbatch("--test-only", script, "gpt-tiny")
    path = write_recipe(recipe, site.folder)
    printed = site.llmrecipes(
        "submit", path, "--cluster", str(site.folder / "lab.yaml"), "--nodes", "2", "--time", "1:00:00", "--partition",
        "spot", "--sbatch=--nice=10", "--dry-run", "--json",
    )  # fmt: skip
    assert "to start at" in site.sbatch("--test-only", *json.loads(printed)["command"][1:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partition", "nope"], "invalid partition specified: nope"),
        (["--partition", "nope"], "--partition train or spot"),
        (["--sbatch=--constraint=quantum"], "Invalid feature specification"),
    ],
)
def test_a_refusal_shows_slurms_message(site: Site, recipe: Recipe, arguments: list[str], words: str) -> None:
    said = site.llmrecipes(
        "submit", write_recipe(recipe, site.folder), "--cluster", str(site.folder / "lab.yaml"), "--nodes", "2",
        *arguments, code=2,
    )  # fmt: skip
    assert "error: sbatch: " in said
    assert words in said
    assert "Traceback" not in said


def test_more_nodes_than_the_partition_has_are_refused(site: Site, recipe: Recipe) -> None:
    """Where limits of partitions are not enforced, Slurm would queue such a job forever."""
    path = write_recipe(recipe, site.folder)
    said = site.llmrecipes("submit", path, "--cluster", str(site.folder / "lab.yaml"), "--nodes", "4", code=2)
    assert "error: --nodes: 4 nodes, but partition train has 3" in said


def test_hostile_values_reach_the_job_as_they_are(site: Site) -> None:
    """Through a shell's quoting, sbatch, the batch script and srun; nothing of it runs."""
    program = site.folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen('seen', 'w').write(json.dumps(sys.argv))\nsys.exit(2)\n"
    )
    program.chmod(0o755)
    job = site.sbatch(
        "--parsable", "-N1", TRAIN, "--doctor", "no", "--python", str(program), "--run-id", HOSTILE, "gpt-1b",
        f"data.x={HOSTILE}",
    )  # fmt: skip
    assert site.lab.wait(job, "FAILED")["ExitCode"] == "2:0"
    seen = json.loads((site.folder / "seen").read_text())
    assert seen[-3:] == ["--", "gpt-1b", f"data.x={HOSTILE}"]
    assert HOSTILE in seen
    assert not (site.folder / "owned").exists()


def test_bad_input_ends_the_job_with_2_and_a_message(site: Site) -> None:
    job = site.sbatch("--parsable", "-N1", TRAIN, "--python", sys.executable, "gpt-tny")
    fields = site.lab.wait(job, "FAILED", "COMPLETED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("2:0", "0")
    assert "did you mean gpt-tiny" in (site.folder / f"llmrecipes-{job}.out").read_text()
    array = site.sbatch("--parsable", "-N1", "--array=0-1", TRAIN, "gpt-tiny")
    assert site.lab.wait(array, "FAILED")["ExitCode"] == "2:0"
    several = site.sbatch("--parsable", "-N1", ":", "-N1", TRAIN, "gpt-tiny")
    log = site.folder / f"llmrecipes-{several}.out"
    site.lab.until(lambda: True if log.exists() and "heterogeneous" in log.read_text() else None, "it is not refused")


def test_a_package_that_is_missing_ends_the_job_at_once(site: Site) -> None:
    """Before, it was requeued without end: the check that counts restarts was never reached."""
    program = site.folder / "python"
    program.write_text("#!/bin/sh\necho No module named llmrecipes >&2\nexit 1\n")
    program.chmod(0o755)
    words = ["--parsable", "-N1", TRAIN, "--doctor", "no", "--python", str(program), "gpt-tiny"]
    job = site.sbatch(*words)
    fields = site.lab.wait(job, "FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("2:0", "0")


def test_a_run_waits_for_the_job_that_tokenizes(site: Site, recipe: Recipe) -> None:
    """What `submit` does for GPUs; by hand here, because these nodes have none."""
    data, path = site.folder / "prepared", write_recipe(recipe, site.folder)

    def submit(python: str) -> tuple[str, str]:
        words = ["--data-dir", str(data), path]
        prepare = site.sbatch("--parsable", PREPARE, "--python", python, *words)
        train = ("sbatch", "--parsable", "-N1", TRAIN, "--python", sys.executable, *words, "train.train_iters=5")
        return prepare, site.sbatch(*after(train, prepare)[1:])

    prepare, job = submit(sys.executable)
    _, never = submit("/bin/false")
    site.lab.wait(job, "COMPLETED")
    site.lab.wait(never, "CANCELLED")
    assert "documents" in (site.folder / f"llmrecipes-prepare-{prepare}.out").read_text()
    assert list(data.glob("*/manifest.json"))
    assert len(train_lines(site.folder / f"runs/{recipe.name}/slurm-{job}")) == 5
    assert "documents" not in (site.folder / f"llmrecipes-{job}.out").read_text()


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is missing: make test-ray RAY=DIR")
def test_a_job_of_two_nodes_is_a_ray_cluster_that_prepares(site: Site, recipe: Recipe, tmp_path: Path) -> None:
    expected = prepare(recipe, tmp_path / "one", workers=1).path
    data = site.folder / "two"
    nodes = ("--nodes=2", "--cpus-per-task=1", "--time=5")
    words = ("--python", sys.executable, "--data-dir", str(data), write_recipe(recipe, site.folder))
    ray = f"{ROOT}:{Path(str(find_spec('ray').origin)).parents[1]}"  # type: ignore[union-attr]
    job = site.sbatch("--parsable", *nodes, PREPARE, *words, PYTHONPATH=ray)
    site.lab.wait(job, "COMPLETED", timeout=600)  # Ray starts slowly on a busy machine
    (found,) = (path.parent for path in data.glob("*/manifest.json"))
    assert found.name == expected.name
    names = [path.name for path in expected.iterdir() if path.is_file() and path.name[0] != "."]
    assert [name for name in names if (found / name).read_bytes() != (expected / name).read_bytes()] == []
    said = (site.folder / f"llmrecipes-prepare-{job}.out").read_text()
    addresses = {line.rpartition(":")[2] for line in said.splitlines() if "Local node IP" in line}
    assert len(addresses) == 2, said  # a node of Ray on each


def test_in_a_container(site: Site, recipe: Recipe, pyxis: Path | None) -> None:
    """The image is all that ranks see, besides what is mounted; its Python is found there and nowhere else."""
    if pyxis is None:
        pytest.skip("the double of pyxis: apt-get install gcc libslurm-dev")
    image = site.folder / "image"
    (image / "only/here").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    program = image / "only/here/python"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    seen = dict.fromkeys(["/usr", "/etc", sys.prefix, sys.base_prefix, str(ROOT), str(site.data_dir)])
    folders = [folder for folder in seen if not folder.startswith("/usr/")]
    sources = {source.location for source in recipe.data.sources if source.location}
    (site.folder / "lab.yaml").write_text(
        f"{PROFILE}slurm:\n  container_runtime: pyxis\n  mounts: {json.dumps([*folders, *sorted(sources)])}\n"
    )
    job, run_dir = site.submit(
        recipe, "contained", "train.train_iters=5", "--image", str(image), "--python", "/only/here/python"
    )
    site.finish(job, run_dir)
    assert len(train_lines(run_dir)) == 5
    assert "PYTHONPATH" not in site.log(run_dir, job)
    # Three steps, two nodes: the image is imported once on each.
    imported = (image / "imports").read_text().split()
    assert sorted(imported) == sorted(set(imported)) and len(imported) == 2


def test_accounting(new_site: Callable[[Lab], Site], recipe: Recipe, tmp_path: Path) -> None:
    if lacks := missing({**PROGRAMS, **DATABASE}):
        pytest.skip(f"accounting: {lacks}")
    with cluster(1, 2, accounting=True) as lab:
        site = new_site(lab)
        job, run_dir = site.submit(recipe, "accounted", "train.train_iters=5", "--account", "research", nodes=1)
        site.finish(job, run_dir)

        def look() -> str | None:
            columns = ["--format=JobID,Account,State", "--noheader", "--parsable2", "--jobs", job]
            listed = lab.run("sacct", *columns).stdout
            return listed if f"{job}|research|COMPLETED" in listed else None

        lab.until(look, "sacct does not know the job", 30)
        said = site.llmrecipes(
            "submit", write_recipe(recipe, site.folder), "--cluster", str(site.folder / "lab.yaml"), "--account",
            "nobody", code=2,
        )  # fmt: skip
        assert "Invalid account" in said
        # slurmctld forgets a job minutes after its end; then accounting knows it, and without accounting the run does.
        lab.forget_jobs()
        assert "has already ended: completed" in site.llmrecipes("cancel", job)
        (run_dir / "status.json").unlink()
        conf = tmp_path / "slurm.conf"
        text = (lab.root / "etc/slurm.conf").read_text("utf-8")
        conf.write_text(text.replace("accounting_storage/slurmdbd", "accounting_storage/none"), "utf-8")
        for name in ("accounted", str(run_dir)):
            assert "has already ended: completed" in site.llmrecipes("cancel", name, SLURM_CONF=str(conf))
