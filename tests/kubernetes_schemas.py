"""Strict checks of Kubernetes objects: a field that the cluster would drop or refuse is an error here.

`python -m tests.kubernetes_schemas FOLDER` renews tests/schemas from those projects' releases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).with_name("schemas")
"""`<group>/<version>/<kind>.json`, of JobSet's, Kubeflow Trainer's, Kueue's and KubeRay's CustomResourceDefinitions."""
OWN_GROUPS = ("jobset.x-k8s.io", "trainer.kubeflow.org", "kueue.x-k8s.io", "ray.io")
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

_CLAIM_TEMPLATE = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
_CHANNEL = {
    "type": "object",
    "properties": {"allocationMode": {"enum": ["All", "Single"]}, "resourceClaimTemplate": _CLAIM_TEMPLATE},
    "required": ["resourceClaimTemplate"],
    "additionalProperties": False,
}
COMPUTE_DOMAIN = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "resource.nvidia.com/v1beta1"},
        "kind": {"const": "ComputeDomain"},
        "metadata": METADATA,
        "spec": {
            "type": "object",
            "properties": {"numNodes": {"type": "integer", "minimum": 0}, "channel": _CHANNEL},
            "required": ["channel"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}
"""The fields that NVIDIA's DRA driver documents; written by hand."""


def require_valid(thing: dict[str, Any]) -> None:
    """Check one object against Kubernetes' own schema or its CustomResourceDefinition."""
    import jsonschema  # takes seconds, and every process of a test run imports modules that import this one
    import kubernetes_validate

    jsonschema.validate(thing["metadata"], METADATA)
    group, _, version = thing["apiVersion"].rpartition("/")
    if group == "resource.nvidia.com":
        jsonschema.Draft202012Validator(COMPUTE_DOMAIN).validate(thing)
    elif group in OWN_GROUPS:
        jsonschema.Draft202012Validator(definition(group, version, thing["kind"])).validate(thing)
        if group == "ray.io":
            for template in pod_templates(thing["spec"]):
                require_valid({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod"}})
    else:
        kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def pod_templates(spec: Any) -> Iterator[dict[str, Any]]:
    """Pod templates anywhere in a specification."""
    for key, value in spec.items() if isinstance(spec, dict) else enumerate(spec) if isinstance(spec, list) else ():
        if str(key).lower().endswith("template"):
            yield value
        else:
            yield from pod_templates(value)


@cache
def definition(group: str, version: str, kind: str) -> Any:
    """The schema of a kind that is not Kubernetes' own."""
    return json.loads((SCHEMAS / group / version / f"{kind}.json").read_text("utf-8"))


def renew(folder: Path) -> None:
    """Write the schemas anew from a folder of CustomResourceDefinitions; only kinds that are there already."""
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.load_all(path.read_text("utf-8"), Loader=yaml.SafeLoader):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                target = SCHEMAS / spec["group"] / version["name"] / f"{spec['names']['kind']}.json"
                if not target.exists():
                    continue
                schema = strict(version["schema"]["openAPIV3Schema"])
                if spec["group"] == "ray.io":  # most of a megabyte, and pods have Kubernetes' own schema
                    for template in pod_templates(schema):
                        template.clear()
                status = schema["properties"].pop("status", {}).get("properties", {})
                if "trainerStatus" in status:
                    _write(target.with_name("TrainerStatus.json"), status["trainerStatus"])
                schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
                schema["properties"]["metadata"] = METADATA
                schema["required"] = ["apiVersion", "kind", "metadata"]
                if "spec" in schema["properties"]:
                    schema["required"].append("spec")
                _write(target, schema)


def _write(path: Path, schema: Any) -> None:
    path.write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n", "utf-8")


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


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
