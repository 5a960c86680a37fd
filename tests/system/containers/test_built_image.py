"""The CPU image, built for real without a daemon, and a run of several pods in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.launch.kubernetes.launcher import objects_of
from llmrecipes.launch.kubernetes.objects import to_yaml
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.workflow.submit import plan_for
from tests import selection
from tests.helpers import largest_difference
from tests.system.containers.lab import Podman, base_image, expand, podman, require_packages, start_checks

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
STEPS = 100
LISTED = """
import sys
from importlib import metadata, util
found = {each.name.lower().replace("_", "-").replace(".", "-"): each for each in metadata.distributions()}
for line in sys.stdin:
    extra, *names = line.split()
    files = [file.locate() for name in names if name in found for file in found[name].files or ()]
    compiled = [type(file)(util.cache_from_source(file)) for file in files if file.suffix == ".py"]
    print(extra, sum(file.stat().st_size for file in (*files, *compiled) if file.is_file()))
"""
"""Prints the bytes of packages with their bytecode; given lines with a name, and those packages."""
SMALL = [
    f"train.train_iters={STEPS}", "train.log_interval=10", "train.global_batch_size=4", "layout.micro_batch_size=2",
    "train.eval_iters=1", "model.seq_length=64", "model.num_layers=2",
    # As in tests/dist/table.py: Adam must not turn rounding noise into full steps. Nor clipping: DeepSpeed adds up the
    # squares of gradients in fp32, so its norm is off by up to 7e-5 here, and the losses were by 1e-5.
    "optimizer.adam_eps=1e-2", "optimizer.clip_grad=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    require_packages()
    with podman(tmp_path_factory.mktemp("podman")) as made:
        yield made


@pytest.fixture(scope="module")
def image(tool: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tag of the CPU image, built as `make image` builds it, with this machine's pip configuration."""
    from cyclonedx.schema import SchemaVersion  # takes seconds, and every process of a test run imports this module
    from cyclonedx.validation.json import JsonStrictValidator

    folder = tmp_path_factory.mktemp("image")
    wanted = re.search(r"^DEBIAN_IMAGE=(.+)$", (ROOT / "docker" / "versions.env").read_text(), re.MULTILINE)
    assert wanted
    base = base_image(tool, wanted[1], folder)
    torch_index = [] if reaches_pytorch() else ["--torch-index", "pypi"]
    command = [
        sys.executable, "tools/build_image.py", "cpu", "--builder", str(tool.program), "--base", base, "--host-pip",
        *torch_index, "--sbom", str(folder / "sbom.json"), "--repository", "localhost/llmrecipes-test",
        *(f"--builder-arg={word}" for word in ("--pull=never", "--isolation=chroot", "--network=host")),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    text = (folder / "sbom.json").read_text()
    assert validator.validate_str(text) is None
    packages = {component["purl"] for component in json.loads(text)["components"]}
    assert any(purl.startswith("pkg:pypi/torch@2.13.0") for purl in packages)
    assert any(purl.startswith("pkg:pypi/deepspeed@0.19.") for purl in packages)
    assert any(purl.startswith("pkg:deb/debian/python3@") for purl in packages)
    return done.stdout.splitlines()[-2]


def reaches_pytorch() -> bool:
    """Whether PyTorch's index answers, where the CPU wheel of torch is."""
    command = [
        sys.executable,
        "-c",
        "import urllib.request as r; r.urlopen('https://download.pytorch.org/whl/cpu', timeout=10)",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_it_is_small_and_nothing_of_this_machine_is_in_it(tool: Podman, image: str) -> None:
    about = json.loads(tool("image", "inspect", image))[0]
    # Where PyTorch's index cannot be reached, torch is PyPI's, with CUDA, which the image has nowhere else.
    parts = ("nvidia*", "cuda*", "triton", "torch/lib/*cuda*", "torch/lib/*nvshmem*")
    folders = " ".join(f"/opt/llmrecipes/venv/lib/python3*/site-packages/{part}" for part in parts)
    script = f"du --bytes --summarize --total {folders} | tail -n 1"
    of_cuda = 0 if reaches_pytorch() else int(tool("run", "--rm", image, "sh", "-c", script).split()[0])
    labels = about["Config"]["Labels"]
    extras = bytes_by_extra(tool, image, labels["llmrecipes.extras"].split())
    print(
        f"\n{image}: {about['Size'] / 1e9:.2f} GB, of which {of_cuda / 1e9:.2f} GB are packages of CUDA; extras (MB): "
        + ", ".join(f"{name} {size / 1e6:.1f}" for name, size in extras.items())
    )
    assert about["Size"] - of_cuda - extras["together"] < 1.5e9
    assert all(extras.values()), "each extra is in it"
    assert about["Config"]["User"] == "10001"
    assert labels["org.opencontainers.image.version"]
    assert len(labels["llmrecipes.content"]) == 64
    assert image.endswith(labels["llmrecipes.content"][:12])
    script = (
        "find /run /etc/pip.conf ~root/.config -type f -size +0 2>/dev/null; env; cat /opt/llmrecipes/sbom.cdx.json"
    )
    inside = tool("run", "--rm", "--network=none", "--user=0", image, "sh", "-c", script)
    for variable in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "host-pip"):
        assert variable not in inside
    history = tool("image", "history", "--no-trunc", image)
    for value in filter(None, (os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT"))):
        assert value not in history


def bytes_by_extra(tool: Podman, image: str, extras: list[str]) -> dict[str, int]:
    """What each extra adds to an image, and what all of them do, as far as the lists of files in it tell."""
    command = [sys.executable, "tools/runtime_lock.py", "requirements/lock.txt", "--without", "plotly"]

    def packages(*options: str) -> set[str]:
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
        return set(re.findall(r"^([\w.-]+)==", done.stdout, re.MULTILINE))

    base = packages()
    more = {extra: packages("--extra", extra) - base for extra in extras}
    more["together"] = set[str]().union(*more.values())
    given = "\n".join(" ".join([name, *names]) for name, names in more.items())
    script = f"printf %s {shlex.quote(given)} | python -c {shlex.quote(LISTED)}"
    return {
        name: int(size)
        for name, size in map(str.split, tool("run", "--rm", "--network=none", image, "sh", "-c", script).splitlines())
    }


def test_a_rehearsal_runs_without_rights(tool: Podman, image: str) -> None:
    printed = tool(
        "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--volume=rehearsal:/workspace", "--env=OMP_NUM_THREADS=1",
        image, "sh", "-c", "id -u && llmrecipes smoke gpt-tiny",
    )  # fmt: skip
    assert printed.startswith("10001\n")
    assert "smoke gpt-tiny: ok" in printed
    assert "equals the uninterrupted run bit for bit" in printed


def test_pods_of_the_rendered_job_train_with_zero_and_go_on(tool: Podman, image: str, tmp_path: Path) -> None:
    options = KubernetesOptions(image=f"registry.example.com/llmrecipes@sha256:{'0' * 64}")
    applied = objects_of(plan_for("gpt-tiny-zero", SMALL, "laptop", 2), options, "pods")
    name = applied[-1]["metadata"]["name"]
    network, addresses = tool.network()
    pods = expand(list(yaml.safe_load_all(to_yaml(applied))), image, addresses, tmp_path)
    path = tmp_path / "pods.yaml"
    path.write_text(to_yaml(pods))
    tool("kube", "play", f"--network={network}", f"--ip={addresses}.10", f"--ip={addresses}.11", str(path))
    names = [f"{name}-{index}-node" for index in range(2)]

    def logs() -> str:
        return "\n".join(tool("logs", name) for name in names)

    # What an eviction does to one of them.
    deadline = time.monotonic() + 240
    while not re.search(r"step \d\d+/", tool("logs", names[0])):
        assert time.monotonic() < deadline, logs()
        assert "Exited" not in tool("ps", "--all", "--format={{.Names}} {{.Status}}"), logs()
        time.sleep(0.2)
    tool("kill", "--signal=TERM", names[1])
    assert tool("wait", *names).split() == ["75", "75"], logs()
    # The policy of the Job ignores 75: both are started again, and the run goes on.
    for index in range(2):
        tool("pod", "start", f"{name}-{index}")
    assert tool("wait", *names).split() == ["0", "0"], logs()
    assert f"step {STEPS}/{STEPS}" in tool("logs", names[0])
    # One process of the other engine, on the data that the pods have prepared.
    train = ["llmrecipes", "train", "gpt-tiny-zero", *SMALL, "layout.engine=megatron", "layout.zero=null"]
    one = shlex.join([*train, "--run-id", "one", "--nproc", "1", "--no-sample"])
    read = "cd runs/gpt-tiny-zero && cat pods/plan.json; for run in pods one; do echo; cat $run/metrics.jsonl; done"
    shown = tool(
        "run", "--rm", "--network=none", "--env=OMP_NUM_THREADS=1", "--volume=llmrecipes-workspace:/workspace", image,
        "sh", "-c", f"{one} >one.log 2>&1 || {{ cat one.log; exit 1; }}; {read}",
    )  # fmt: skip
    plan, _, metrics = shown.partition("\n}\n")
    assert json.loads(plan + "}")["world_size"] == 2
    curves = [[json.loads(line) for line in text.splitlines()] for text in metrics.strip().split("\n\n")]
    pods_steps, one_steps = ([line for line in lines if "grad_norm" in line] for lines in curves)
    assert [line["step"] for line in pods_steps] == list(range(1, STEPS + 1))
    # Not the gradient norm: torch adds up its squares in fp32, with errors of 1e-5 in so large an embedding.
    assert largest_difference(*([line["loss"] for line in steps] for steps in (one_steps, pods_steps))) < 1e-5
    # One that is started again after the end has nothing to wait for.
    tool("pod", "start", f"{name}-1")
    assert tool("wait", names[1]).split() == ["0"]
    assert "has done all its steps" in tool("logs", names[1])


@pytest.mark.parametrize(("site", "codes"), [("laptop", ["0", "0"]), ("h100-ib", ["1", "1"])])
def test_the_pods_check_their_nodes_together(
    tool: Podman, image: str, tmp_path: Path, site: str, codes: list[str]
) -> None:
    """With the arguments, the variables and the files of the rendered init containers; there is no GPU here."""
    options = KubernetesOptions(image=f"registry.example.com/llmrecipes@sha256:{'0' * 64}")
    small = ["layout.micro_batch_size=1", "train.global_batch_size=64"]
    objects = objects_of(plan_for("gpt-tiny", small, site, 2), options, f"check-{site}")
    pods = start_checks(tool, objects, image, tmp_path)
    assert tool("wait", *pods).split() == codes, "\n".join(tool("logs", name) for name in pods)
    # The first pod speaks for all.
    printed = tool("logs", pods[0])
    assert ("GPU" in printed) == (codes[0] == "1"), printed
    assert all(pod in printed for pod in pods) or codes[0] == "0", printed


def test_a_pod_that_is_killed_loses_nothing_that_it_announced(tool: Podman, image: str) -> None:
    """Its disk is gone with it, and the database of MLflow was there."""
    steps = 200
    words = (
        "--network=none", "--read-only", "--env=OMP_NUM_THREADS=1", "--env=LLMRECIPES_LOCAL_DISK=/tmp/llmrecipes",
        "--volume=killed:/workspace", "--tmpfs=/tmp", image, "llmrecipes", "train", "gpt-tiny", *SMALL,
        f"train.train_iters={steps}", "checkpoint.save_interval=25", "--run-id", "r", "--nproc", "1", "--no-sample",
    )  # fmt: skip
    tool("run", "--detach", "--name=killed", *words)
    deadline = time.monotonic() + 240
    while not re.search(r"step [6-9]\d/", tool("logs", "killed")):
        assert time.monotonic() < deadline, tool("logs", "killed")
        status = tool("ps", "--all", "--filter=name=killed", "--format={{.Status}}")
        assert "Exited" not in status, tool("logs", "killed")
        time.sleep(0.1)
    tool("kill", "--signal=KILL", "killed")
    tool("wait", "killed")
    announced = [int(step) for step in re.findall(rf"step (\d+)/{steps}", tool("logs", "killed"))]
    folder = "/workspace/runs/gpt-tiny/r"
    look = ("run", "--rm", "--network=none", "--volume=killed:/workspace", f"--workdir={folder}", image)
    before = [json.loads(line) for line in tool(*look, "cat", "metrics.jsonl").splitlines()]
    assert set(announced) <= {line["step"] for line in before if "loss" in line}
    assert "mlflow.db" not in tool(*look, "ls"), "it had no time to copy it"
    assert f"step {steps}/{steps}" in tool("run", "--rm", *words, timeout=900)
    query = (
        "import sqlite3; c = sqlite3.connect('file:mlflow.db?mode=ro', uri=True); "
        "print(c.execute('select count(*), max(status) from runs').fetchall(), "
        "[step for step, in c.execute(\"select step from metrics where key = 'train/loss' order by step\")])"
    )
    assert tool(*look, "python", "-c", query).split(" ", 2) == [
        "[(1,", "'FINISHED')]", f"{list(range(10, steps + 1, 10))}\n",
    ]  # fmt: skip


def test_the_record_is_that_of_an_image_that_passed(
    request: pytest.FixtureRequest, golden: Callable[[str, Any], None]
) -> None:
    """The last of this module: `.ci/run` builds no image whose inputs are those of the record."""
    assert not request.session.testsfailed, "an image that failed is not recorded"
    golden("image.sha256", f"{selection.image_digest()}\n")
