"""What the user asks for, and the names that follow from it; what Kubernetes would refuse is refused here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from llmrecipes.errors import UserError

FLAVORS = ("job", "jobset", "trainjob")
RUNTIME = "llmrecipes"
"""ClusterTrainingRuntime of k8s/trainjob."""
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w][\w.-]{0,127})?@sha256:[0-9a-f]{64}")
NODE_LABEL = re.compile(r"([a-z0-9][a-z0-9.-]{0,251}[a-z0-9]/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
NAME_LENGTH = 40
"""Leaves room for what controllers append to a name: `-node-0-1999` and five random characters, of 63 in all."""


@dataclass(frozen=True)
class Secret:
    """A key of a Secret that is in the namespace; its value is never known here."""

    name: str
    key: str


@dataclass(frozen=True)
class Options:
    """What the user asks for.

    `claim` is the volume with runs and data, which all nodes mount. `secrets` are variables and where they come from.
    `queue` is Kueue's LocalQueue, and `topology` the label of nodes that should be close to each other. `max_restarts`
    counts starts after failures; those after a save or a disruption are not counted.
    """

    image: str
    flavor: str = "job"
    namespace: str = "default"
    claim: str = "llmrecipes-workspace"
    queue: str | None = None
    topology: str | None = None
    service_account: str | None = None
    pull_secret: str | None = None
    secrets: Mapping[str, Secret] = field(default_factory=lambda: MappingProxyType({}))
    tracking_uri: str | None = None
    host_network: bool = False
    max_restarts: int = 3
    grace_seconds: int = 300


def check(options: Options) -> None:
    """Refuse what Kubernetes would refuse, or what would be unsafe.

    Raises:
        UserError: the first such value.
    """
    if options.flavor not in FLAVORS:
        raise UserError(f"{options.flavor!r}", where="--flavor", rule=f"one of {', '.join(FLAVORS)}")
    if not IMAGE.fullmatch(options.image):
        raise UserError(
            f"{options.image!r}",
            where="--image",
            rule="NAME@sha256:DIGEST: a tag can be another image when a pod is restarted",
            fix="docker buildx imagetools inspect IMAGE prints the digest",
        )
    for where, value in (("--namespace", options.namespace), ("--queue", options.queue)):
        if value is not None and not LABEL.fullmatch(value):
            raise UserError(f"{value!r}", where=where, rule="at most 63 lower-case letters, digits and dashes")
    names = {
        "--claim": options.claim,
        "--service-account": options.service_account,
        "--pull-secret": options.pull_secret,
        **{f"--secret {variable}": secret.name for variable, secret in options.secrets.items()},
    }
    for where, value in names.items():
        if value is not None and not SUBDOMAIN.fullmatch(value):
            raise UserError(
                f"{value!r}", where=where, rule="the name of an object: lower-case letters, digits, - and ."
            )
    for variable, secret in options.secrets.items():
        if not VARIABLE.fullmatch(variable) or not KEY.fullmatch(secret.key):
            raise UserError(
                f"{variable!r} from key {secret.key!r}", where="--secret", rule="VARIABLE=SECRET or VARIABLE=SECRET:KEY"
            )
    if options.topology is not None and not NODE_LABEL.fullmatch(options.topology):
        raise UserError(f"{options.topology!r}", where="--topology", rule="the key of a node label")
    if options.topology is not None and options.queue is None:
        raise UserError("given without --queue", where="--topology", rule="Kueue is what places pods by topology",
                        fix="--queue NAME")  # fmt: skip
    if options.tracking_uri is not None:
        _check_tracking_uri(options.tracking_uri)


def parse_secrets(texts: Sequence[str]) -> dict[str, Secret]:
    """`VARIABLE=SECRET` or `VARIABLE=SECRET:KEY` to where each variable comes from; KEY is else the variable's name.

    Raises:
        UserError: another form. The value is not repeated: it may be a token that was given by mistake.
    """
    found = {}
    for text in texts:
        variable, equals, place = text.partition("=")
        name, _, key = place.partition(":")
        if not equals or not VARIABLE.fullmatch(variable) or not SUBDOMAIN.fullmatch(name):
            raise UserError(
                "not VARIABLE=SECRET or VARIABLE=SECRET:KEY",
                where="--secret",
                rule="a secret is named here, never written: its value is in a Secret of the namespace",
                fix="kubectl create secret generic huggingface --from-file=HF_TOKEN, --secret HF_TOKEN=huggingface",
            )
        found[variable] = Secret(name, key or variable)
    return found


def object_name(recipe: str, run_id: str) -> str:
    """Name of all objects of a run: readable, a DNS label, and another one for every run.

    Args:
        recipe: name of the recipe.
        run_id: a checked run id.
    """
    digest = hashlib.sha256(f"{recipe}\0{run_id}".encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{recipe}-{run_id}".lower()).strip("-")
    # A Service's name starts with a letter.
    words = words if words[:1].isalpha() else f"r-{words}"
    return f"{words[: NAME_LENGTH - 9].rstrip('-')}-{digest}"


def _check_tracking_uri(uri: str) -> None:
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname or not uri.isprintable():
        raise UserError(
            "not an address of an MLflow server", where="--tracking-uri", fix="--tracking-uri http://mlflow:5000"
        )
    if parts.username or parts.password or parts.query:
        raise UserError(
            "there is a user, password or query in the address",
            where="--tracking-uri",
            rule="what is secret comes from a Secret",
            fix="--secret MLFLOW_TRACKING_USERNAME=mlflow --secret MLFLOW_TRACKING_PASSWORD=mlflow",
        )
