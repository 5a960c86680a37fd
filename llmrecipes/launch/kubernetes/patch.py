"""A site's own patch of the pod template, merged by kubectl: lists by their keys, as Kubernetes itself does it."""

from __future__ import annotations

import json
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.launch.programs import require_program, run
from llmrecipes.recipe.section import JsonObject


def patched(template: dict[str, Any], patch: JsonObject, cluster: str) -> dict[str, Any]:
    """A pod template after a strategic merge patch; no cluster is needed.

    Args:
        template: `metadata` and `spec` of a pod.
        patch: the same keys.
        cluster: name of the profile, for messages.

    Raises:
        UserError: no kubectl on this machine, or it rejects the patch.
    """
    if not patch:
        return template
    where = f"kubernetes.patch of {cluster}"
    require_program("kubectl", f"kubectl applies {where}; run this where it is, or remove the patch")
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod", **template["metadata"]}}
    command = ("kubectl", "patch", "--local", "--filename", "-", "--type", "strategic", "--output", "json")
    code, answer, words = run((*command, "--patch", json.dumps(patch)), json.dumps(pod))
    if code:
        raise UserError(f"refused by kubectl:\n{words}", where=where, rule="a strategic merge patch of a pod template")
    merged = json.loads(answer)
    if missing := _containers(template["spec"]) - _containers(merged["spec"]):
        rule = "the containers of a run stay"
        raise UserError(f"leaves no container {', '.join(sorted(missing))}", where=where, rule=rule)
    # kubectl sorts keys; those of the template keep their order.
    return {key: _in_order(merged[key], template[key]) for key in template} | {"metadata": _metadata(merged, template)}


def _containers(spec: dict[str, Any]) -> set[str]:
    """Names of all containers; kubectl does not check that a patch leaves a valid pod."""
    listed = [spec.get(key) for key in ("initContainers", "containers")]
    return {each["name"] for part in listed if isinstance(part, list) for each in part if "name" in each}


def _metadata(merged: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in merged["metadata"].items() if key not in ("name", "creationTimestamp")}
    ordered: dict[str, Any] = _in_order(found, template["metadata"])
    return ordered


def _in_order(value: Any, like: Any) -> Any:
    if isinstance(value, dict) and isinstance(like, dict):
        keys = [*(key for key in like if key in value), *(key for key in value if key not in like)]
        return {key: _in_order(value[key], like.get(key)) for key in keys}
    if isinstance(value, list) and isinstance(like, list):
        named = {each["name"]: each for each in like if isinstance(each, dict) and "name" in each}
        return [
            _in_order(each, named.get(each["name"]) if isinstance(each, dict) and "name" in each else None)
            for each in value
        ]
    return value
