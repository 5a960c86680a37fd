"""The Kubernetes options of `submit` and the names derived from them, checked before Kubernetes would reject them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from llmrecipes.errors import UserError
from llmrecipes.hardware.slurm_words import TIME, TIME_RULE, limit_seconds

FLAVORS = ("job", "jobset", "trainjob")
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w][\w.-]{0,127})?@sha256:[0-9a-f]{64}")
NODE_LABEL = re.compile(r"([a-z0-9][a-z0-9.-]{0,251}[a-z0-9]/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
NAME_LENGTH = 40
"""Out of 63 characters; the rest is for suffixes of controllers, `-node-0-1999-` and five random characters."""


@dataclass(frozen=True)
class Secret:
    """A key of a Secret in the namespace; its value is never read here."""

    name: str
    key: str


@dataclass(frozen=True)
class KubernetesOptions:
    """The options of a run.

    `claim` is the volume with runs and data, mounted on all nodes. `secrets` maps variables to the Secrets that hold
    their values. `queue` is Kueue's LocalQueue; `topology` is a node label, and pods are placed on nodes that share its
    value. `prepared`: the claim has the prepared data, so that no Job has to look; else
    what prepares it is a Job of a pod, or a Ray cluster of `prepare_nodes`. `max_restarts` limits restarts after
    failures; those after a save or a disruption are not counted. `time` is a limit in Slurm's notation.
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
    prepared: bool = False
    prepare_nodes: int = 1
    max_restarts: int = 3
    grace_seconds: int = 300
    time: str | None = None

    @property
    def time_limit_seconds(self) -> int | None:
        """None without a limit."""
        return None if self.time is None else limit_seconds(self.time)


def check(options: KubernetesOptions) -> None:
    """Reject what Kubernetes would reject, and what would be unsafe.

    Raises:
        UserError: the first such value.
    """
    if options.flavor not in FLAVORS:
        raise UserError(f"{options.flavor!r}", where="--flavor", rule=f"one of {', '.join(FLAVORS)}")
    label = "at most 63 lowercase letters, digits and dashes"
    name = "must be an object name: lowercase letters, digits, - and ."
    wanted: list[tuple[str, str | None, re.Pattern[str], str, str]] = [
        (
            "--image",
            options.image,
            IMAGE,
            "must be NAME@sha256:DIGEST: a tag may point to another image by the time a pod restarts",
            "docker buildx imagetools inspect IMAGE prints the digest",
        ),
        ("--namespace", options.namespace, LABEL, label, ""),
        ("--queue", options.queue, LABEL, label, ""),
        ("--claim", options.claim, SUBDOMAIN, name, ""),
        ("--service-account", options.service_account, SUBDOMAIN, name, ""),
        ("--pull-secret", options.pull_secret, SUBDOMAIN, name, ""),
        *((f"--secret {key}", secret.name, SUBDOMAIN, name, "") for key, secret in options.secrets.items()),
        ("--time", options.time, TIME, TIME_RULE, "--time 8:00:00"),
        ("--topology", options.topology, NODE_LABEL, "must be the key of a node label", ""),
    ]
    for where, value, pattern, rule, fix in wanted:
        if value is not None and not pattern.fullmatch(value):
            raise UserError(f"{value!r}", where=where, rule=rule, fix=fix)
    for variable, secret in options.secrets.items():
        if not VARIABLE.fullmatch(variable) or not KEY.fullmatch(secret.key):
            raise UserError(
                f"{variable!r} from key {secret.key!r}",
                where="--secret",
                rule="must be VARIABLE=SECRET or VARIABLE=SECRET:KEY",
            )
    if options.topology is not None and options.queue is None:
        raise UserError(
            "set without --queue", where="--topology", rule="only Kueue places pods by topology", fix="--queue NAME"
        )
    if options.tracking_uri is not None:
        _check_tracking_uri(options.tracking_uri)


def parse_secrets(texts: Sequence[str]) -> dict[str, Secret]:
    """The Secret of each variable, from `VARIABLE=SECRET[:KEY]`; KEY defaults to the variable's name.

    Raises:
        UserError: another form. The message leaves the value out: it may be a token pasted by mistake.
    """
    secrets = {}
    for text in texts:
        variable, equals, place = text.partition("=")
        name, _, key = place.partition(":")
        if not equals or not VARIABLE.fullmatch(variable) or not SUBDOMAIN.fullmatch(name):
            raise UserError(
                "not VARIABLE=SECRET or VARIABLE=SECRET:KEY",
                where="--secret",
                rule="--secret takes the name of a Secret in the namespace, never its value",
                fix="kubectl create secret generic hf --from-file=HF_TOKEN, then --secret HF_TOKEN=hf",
            )
        secrets[variable] = Secret(name, key or variable)
    return secrets


def object_name(recipe: str, run_id: str) -> str:
    """Name of all objects of a run: readable, a DNS label, unique to the run.

    Args:
        recipe: name of the recipe.
        run_id: a checked run id.
    """
    digest = hashlib.sha256(f"{recipe}\0{run_id}".encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{recipe}-{run_id}".lower()).strip("-")
    # A Service's name must start with a letter.
    words = words if words[:1].isalpha() else f"r-{words}"
    return f"{words[: NAME_LENGTH - 9].rstrip('-')}-{digest}"


def _check_tracking_uri(uri: str) -> None:
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname or not uri.isprintable():
        raise UserError(
            "not the URL of an MLflow server", where="--tracking-uri", fix="--tracking-uri http://mlflow:5000"
        )
    if parts.username or parts.password or parts.query:
        raise UserError(
            "the URL has a user name, a password or a query",
            where="--tracking-uri",
            rule="credentials must come from a Secret",
            fix="--secret MLFLOW_TRACKING_USERNAME=mlflow --secret MLFLOW_TRACKING_PASSWORD=mlflow",
        )
