"""Print the SBOM of the image this runs in: its Python and Debian packages, as CycloneDX 1.6.

It lists what is installed, not what was requested. Needs only Python.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote


def component(kind: str, name: str, version: str, namespace: str = "") -> dict[str, Any]:
    """One package, with the package URL that scanners look it up by."""
    place = f"{kind}/{namespace}/" if namespace else f"{kind}/"
    purl = f"pkg:{place}{quote(name, safe='')}@{quote(version, safe='')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python_packages() -> list[dict[str, Any]]:
    """Every distribution this interpreter sees."""
    found = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        # The first on the path is the one that is imported.
        found.setdefault(name, component("pypi", name, distribution.version))
    return list(found.values())


def debian_packages() -> list[dict[str, Any]]:
    """Every package dpkg has installed; empty where there is no dpkg."""
    try:
        done = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Package}\t${Version}\t${db:Status-Abbrev}\n"],
            capture_output=True,
            text=True,
            check=True,
        )
        system = distribution_name()
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = (line.split("\t") for line in done.stdout.splitlines())
    return [component("deb", name, version, system) for name, version, status in rows if status.startswith("ii")]


def distribution_name() -> str:
    """`debian`, `ubuntu` …"""
    lines = Path("/etc/os-release").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line).get("ID", "debian").strip('"')


def main() -> None:
    components = {entry["bom-ref"]: entry for entry in [*python_packages(), *debian_packages()]}
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [components[reference] for reference in sorted(components)],
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
