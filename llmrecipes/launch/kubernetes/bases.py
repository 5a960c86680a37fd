"""The manifests in k8s/, which `submit` fills in: what is the same for all runs is written there and nowhere else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llmrecipes import files
from llmrecipes.errors import UserError

Object = dict[str, Any]

RULE = "submit fills in the manifests of k8s/, so all fields that it sets must be there"
FIX = "restore the file, with git or by installing again"
WORKLOADS = ("Job", "JobSet", "TrainJob", "RayJob", "ClusterTrainingRuntime")
KEYS = {"apiVersion", "kind", "resources", "namespace", "images", "configurations"}
"""Of a kustomization; the namespace and the image are options of `submit`."""
NAMED = {"containers", "initContainers", "env", "volumes", "volumeMounts", "replicatedJobs"}
WORDS = {"command", "args", "add", "drop"}
TYPES: dict[str, Any] = {
    **dict.fromkeys(("metadata", "labels", "annotations", "spec", "template", "securityContext"), dict),
    **dict.fromkeys(("seccompProfile", "capabilities", "resources"), dict),
    **dict.fromkeys((*NAMED, *WORDS, "rules"), list),
    **dict.fromkeys(("kind", "name", "value", "entrypoint"), str),
}
"""Types of the fields that are read here; the API server checks all others."""


@dataclass(frozen=True)
class ManifestPart:
    """A mapping in a manifest.

    Paths name its fields, as in `spec.containers.node.image`: an item of a list goes by its name, or its index.
    """

    where: str
    """Folder and kind, for messages."""
    content: Object
    path: str = ""
    """Of this mapping in the manifest, with a dot at its end."""

    def get(self, path: str) -> Any:
        """The value of a field.

        Raises:
            UserError: the manifest has no such field.
        """
        value: Any = self.content
        for key in path.split("."):
            value = _item(value, key)
            if value is None:
                raise UserError(f"has no {self.path}{path}", where=self.where, rule=RULE, fix=FIX)
        return value

    def part(self, path: str) -> ManifestPart:
        """The mapping at a path; changes to it change this one, too."""
        return ManifestPart(self.where, self.get(path), f"{self.path}{path}.")

    def set(self, path: str, value: Any) -> None:
        """Replace a field that the manifest has."""
        self.get(path)
        holder, _, key = path.rpartition(".")
        (self.get(holder) if holder else self.content)[key] = value

    def add(self, fields: Object) -> None:
        """Set fields that the manifest need not have; lists and mappings that it has keep what is in them."""
        for key, value in fields.items():
            present = self.content.get(key)
            if isinstance(present, list):
                self.content[key] = [*present, *value]
            elif isinstance(present, dict):
                self.content[key] = {**present, **value}
            else:
                self.content[key] = value

    def words(self, path: str, options: dict[str, str | None]) -> list[str]:
        """A command line of the manifest with other values of options that it has; None leaves an option out."""
        words = list(self.get(path))
        for option, value in options.items():
            if option not in words:
                raise UserError(f"has no {option} in {self.path}{path}", where=self.where, rule=RULE, fix=FIX)
            at = words.index(option)
            words[at : at + 2] = [] if value is None else [option, value]
        return words


def load(base: str, name: str | None = None) -> tuple[ManifestPart, list[ManifestPart]]:
    """The workload of a base, and its other objects.

    Args:
        base: folder in k8s/.
        name: takes the place of the workload's own name, wherever that occurs.

    Raises:
        UserError: the folder's files cannot be read, or do not have one workload.
    """
    where = f"k8s/{base}"
    objects = json.loads(_read(files.folder("k8s") / base, where))
    workloads = [thing for thing in objects if thing.get("kind") in WORKLOADS]
    if len(workloads) != 1:
        raise UserError(f"has {len(workloads)} workloads", where=where, rule=f"one of {', '.join(WORKLOADS)}", fix=FIX)
    if name is not None:
        own = ManifestPart(where, workloads[0]).get("metadata.name")
        objects = [_renamed(thing, own, name) for thing in objects]
    parts = [ManifestPart(f"{where}, {thing.get('kind')}", thing) for thing in objects]
    [workload] = [part for part in parts if part.content.get("kind") in WORKLOADS]
    return workload, [part for part in parts if part is not workload]


@cache
def _read(folder: Path, where: str) -> str:
    """All objects as JSON, which has no anchors: no two parts of an object are one."""
    objects: list[Object] = []
    try:
        kustomization = dict(yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8")))
        for name in kustomization["resources"]:
            objects += (dict(thing) for thing in yaml.safe_load_all((folder / name).read_text("utf-8")) if thing)
        for thing in objects:
            _check_types(thing)
        text = json.dumps(objects)
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"cannot be read: {error}", where=where, rule=RULE, fix=FIX) from None
    if ignored := kustomization.keys() - KEYS:
        rule = "submit applies no other key than resources"
        fix = "kubernetes.patch of a profile changes pods"
        raise UserError(f"has {', '.join(sorted(ignored))}", where=where, rule=rule, fix=fix)
    return text


def _check_types(value: Any) -> None:
    """TypeError for a field of another type than in TYPES, and for a list with other items than it should have."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    for key, item in fields.items():
        if not isinstance(item, TYPES.get(key, object)):
            raise TypeError(f"{key} is not a {TYPES[key].__name__}: {item}")
        if key in NAMED and not all(isinstance(each, dict) and "name" in each for each in item):
            raise TypeError(f"{key} has an item without a name")
        if key in WORDS and not all(isinstance(each, str) for each in item):
            raise TypeError(f"{key} has an item that is not a string")
    for item in value if isinstance(value, list) else fields.values():
        _check_types(item)


def _item(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list):
        if key.isdigit():
            return value[int(key)] if int(key) < len(value) else None
        return next((item for item in value if isinstance(item, dict) and item.get("name") == key), None)
    return None


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value
