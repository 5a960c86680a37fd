"""Name the images of docker/versions.env whose tag has another digest by now.

    python tools/stale_images.py

Ends with 1 if one has, and with 2 if a registry does not answer. Asks the registries' public API; needs nothing but
Python.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VERSIONS = Path(__file__).resolve().parent.parent / "docker" / "versions.env"
PINNED = re.compile(
    r"(?P<host>[a-z0-9.-]+(:\d+)?)/(?P<name>[a-z0-9._/-]+):(?P<tag>[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})"
)
HOSTS = {"docker.io": "registry-1.docker.io"}
INDEXES = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
SECONDS = 30.0


class RegistryError(Exception):
    """A registry that does not answer, or not with a digest."""


@dataclass(frozen=True)
class Pinned:
    """An image of versions.env."""

    variable: str
    host: str
    name: str
    tag: str
    digest: str


def pinned(text: str) -> list[Pinned]:
    """The images of versions.env, in order."""
    rows = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    found = ((variable.strip(), PINNED.fullmatch(value.strip())) for variable, value in rows)
    return [
        Pinned(variable, match["host"], match["name"], match["tag"], match["digest"])
        for variable, match in found
        if match
    ]


def digest_of(image: Pinned, scheme: str = "https") -> str:
    """The digest that the tag has now.

    Raises:
        RegistryError: the registry does not answer.
    """
    url = f"{scheme}://{HOSTS.get(image.host, image.host)}/v2/{image.name}/manifests/{image.tag}"
    try:
        try:
            headers = _head(url, {})
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            headers = _head(url, {"Authorization": f"Bearer {_token(error.headers.get('WWW-Authenticate', ''))}"})
    except (OSError, ValueError) as error:
        raise RegistryError(str(error)) from error
    if (digest := headers.get("Docker-Content-Digest")) is None:
        raise RegistryError("the registry tells no digest")
    return digest


def _head(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    request = urllib.request.Request(url, headers={"Accept": INDEXES, **headers}, method="HEAD")  # noqa: S310
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:  # noqa: S310 - a registry of versions.env
        found: Mapping[str, str] = reply.headers
        return found


def _token(challenge: str) -> str:
    """An anonymous token, from where the registry says (`Bearer realm="…",service="…",scope="…"`)."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not realm.startswith(("https://", "http://127.0.0.1")):
        raise ValueError(f"no place for a token in {challenge!r}")
    with urllib.request.urlopen(f"{realm}?{urllib.parse.urlencode(fields)}", timeout=SECONDS) as reply:  # noqa: S310
        answer = json.load(reply)
    return str(answer.get("token") or answer["access_token"])


def compare(images: list[Pinned], ask: Callable[[Pinned], str] = digest_of) -> tuple[list[str], int]:
    """One line for each image, and the exit code."""
    lines, code = [], 0
    for image in images:
        where = f"{image.variable}  {image.host}/{image.name}:{image.tag}"
        try:
            now = ask(image)
        except (RegistryError, KeyError) as error:
            lines.append(f"unknown  {where}: {error}")
            code = 2
            continue
        stale = now != image.digest
        lines.append(f"stale    {where} is {now}, not {image.digest}" if stale else f"current  {where}")
        code = max(code, int(stale))
    return lines, code


def main() -> int:
    lines, code = compare(pinned(VERSIONS.read_text("utf-8")))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
