"""The folders under k8s/: what kubectl makes of them is valid, safe, and what the program renders."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.launch.kubernetes.launcher import objects_of
from llmrecipes.launch.kubernetes.objects import runtime, to_yaml
from llmrecipes.launch.kubernetes.options import Options
from llmrecipes.workflow.submit import plan_for
from tests.kubernetes_schemas import require_valid

ROOT = Path(__file__).parents[2]
BASES = sorted(path.parent.name for path in (ROOT / "k8s").glob("*/kustomization.yaml"))
IMAGE = f"registry.example.com/llmrecipes@sha256:{'0' * 64}"
GENERATED = "# Written by pytest --update-golden tests/unit/test_kubernetes_bases.py\n"


def kustomized(base: str) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a base."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(["kubectl", "kustomize", ROOT / "k8s" / base], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return list(yaml.safe_load_all(done.stdout))


def everything(thing: Any) -> list[dict[str, Any]]:
    """All mappings within an object."""
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    return [*([thing] if isinstance(thing, dict) else []), *(found for value in inner for found in everything(value))]


def test_there_is_a_base_for_each_purpose() -> None:
    assert BASES == ["job", "jobset", "mlflow", "queue", "storage", "trainjob"]


@pytest.mark.parametrize("base", BASES)
def test_what_kubectl_makes_of_it_is_valid(base: str) -> None:
    things = kustomized(base)
    assert things
    for thing in things:
        require_valid(thing)


@pytest.mark.parametrize("base", BASES)
def test_no_secret_no_root_no_open_port(base: str) -> None:
    for thing in kustomized(base):
        assert thing["kind"] != "Secret"
        for part in everything(thing):
            assert part.get("type") not in ("NodePort", "LoadBalancer")
            assert not part.get("privileged")
            assert "hostPath" not in part
            if isinstance(part.get("containers"), list) and thing["kind"] != "TrainJob":
                assert part["automountServiceAccountToken"] is False
                assert part["securityContext"]["runAsNonRoot"] is True
                for container in part["containers"]:
                    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
                    assert container["securityContext"]["readOnlyRootFilesystem"] is True
            if "image" in part and isinstance(part["image"], str):
                assert re.search(r"@sha256:[0-9a-f]{64}$", part["image"]), part["image"]


@pytest.mark.parametrize("flavor", ["job", "jobset", "trainjob"])
def test_runs_are_what_submit_renders(golden: Callable[[str, Any], None], flavor: str) -> None:
    options = Options(image=IMAGE, flavor=flavor, namespace="llmrecipes")
    applied = objects_of(plan_for("gpt-tiny", [], "laptop", 2), options, "run-1")
    golden(f"../../k8s/{flavor}/run.yaml", GENERATED + to_yaml(applied))


def test_the_runtime_is_what_the_program_renders(golden: Callable[[str, Any], None]) -> None:
    golden("../../k8s/trainjob/runtime.yaml", GENERATED + to_yaml([runtime(Options(image="").max_restarts)]))


def test_the_database_is_the_one_of_the_images() -> None:
    versions = (ROOT / "docker" / "versions.env").read_text()
    digest = re.search(r"^POSTGRES_IMAGE=.*@(sha256:\w+)$", versions, re.MULTILINE)
    assert digest
    assert digest[1] in (ROOT / "k8s" / "mlflow" / "kustomization.yaml").read_text()


def test_who_submits_reads_no_secret() -> None:
    roles = [thing for thing in kustomized("storage") if thing["kind"] == "Role"]
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert not {"secrets", "*"} & {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}
