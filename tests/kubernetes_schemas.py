"""Strict checks of Kubernetes objects: a field that the cluster would drop or refuse is an error here."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

CRDS = "LLMRECIPES_CRDS"
"""Variable with a folder of CustomResourceDefinitions: JobSet, Kubeflow's Trainer, Kueue."""
OWN_GROUPS = ("jobset.x-k8s.io", "trainer.kubeflow.org", "kueue.x-k8s.io")
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"},
        "namespace": {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def require_valid(thing: dict[str, Any]) -> None:
    """Check one object against Kubernetes' own schema or its CustomResourceDefinition.

    Skips the test, and says so, where the definitions are absent.
    """
    jsonschema.validate(thing["metadata"], METADATA)
    group, _, version = thing["apiVersion"].rpartition("/")
    if group not in OWN_GROUPS:
        kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)
        return
    schema = definitions().get((group, version, thing["kind"]))
    if schema is None:
        pytest.skip(f"no definition of {thing['kind']} {thing['apiVersion']}: {CRDS} names a folder that has it")
    jsonschema.Draft202012Validator(schema).validate(thing)


@cache
def definitions() -> dict[tuple[str, str, str], dict[str, Any]]:
    """(group, version, kind) to a schema that refuses unknown fields; empty where there is no folder."""
    folder = os.environ.get(CRDS)
    found = {}
    for path in sorted(Path(folder).glob("*.yaml")) if folder else ():
        for document in yaml.load_all(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
                schema["properties"]["metadata"] = METADATA
                schema["required"] = (
                    ["apiVersion", "kind", "metadata", "spec"] if "spec" in schema["properties"] else []
                )
                found[spec["group"], version["name"], spec["names"]["kind"]] = schema
    return found


def strict(schema: Any) -> Any:
    """A structural schema of a CustomResourceDefinition as a JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key.startswith("x-") or key in ("description", "default", "format", "nullable"):
            continue
        made[key] = {name: strict(entry) for name, entry in value.items()} if key == "properties" else strict(value)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    return made
