"""The level of Kubernetes' Pod Security Standards that a pod meets, from the fields that a run or a profile sets.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LEVELS = ("restricted", "baseline", "privileged")
"""From the strictest."""
BASELINE = frozenset(
    {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
        "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }
)  # fmt: skip
VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
PROFILES = ("RuntimeDefault", "Localhost")


def level(spec: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The strictest level that admits a pod, and what the next stricter one would reject.

    Args:
        spec: of the pod.
    """
    if found := tuple(dict.fromkeys(_privileged(spec))):
        return "privileged", found
    if found := tuple(dict.fromkeys(_baseline(spec))):
        return "baseline", found
    return "restricted", ()


def admits(enforced: str, needed: str) -> bool:
    """Whether a namespace that enforces one level admits a pod that needs another; unknown levels admit all."""
    return enforced not in LEVELS or LEVELS.index(enforced) >= LEVELS.index(needed)


def _containers(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        yield container["name"], container.get("securityContext") or {}


def _privileged(spec: dict[str, Any]) -> Iterator[str]:
    """What `baseline` rejects."""
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    yield from (f"hostPath volume {each['name']}" for each in spec.get("volumes") or () if "hostPath" in each)
    for name, security in _containers(spec):
        if security.get("privileged"):
            yield f"privileged container {name}"
        added = set((security.get("capabilities") or {}).get("add") or ()) - BASELINE
        yield from (f"capability {each} of {name}" for each in sorted(added))
    for name, security in (("the pod", spec.get("securityContext") or {}), *_containers(spec)):
        if (security.get("seccompProfile") or {}).get("type") == "Unconfined":
            yield f"unconfined seccomp profile of {name}"


def _baseline(spec: dict[str, Any]) -> Iterator[str]:
    """What `restricted` rejects besides."""
    pod = spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        if kinds := volume.keys() - VOLUMES - {"name"}:
            yield f"{', '.join(sorted(kinds))} volume {volume['name']}"
    for name, security in _containers(spec):
        capabilities = security.get("capabilities") or {}
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"allowPrivilegeEscalation of {name}"
        if (
            not security.get("runAsNonRoot", pod.get("runAsNonRoot"))
            or security.get("runAsUser", pod.get("runAsUser")) == 0
        ):
            yield f"root in {name}"
        if "ALL" not in (capabilities.get("drop") or ()):
            yield f"capabilities of {name} that are not dropped"
        if added := set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            yield f"capability {', '.join(sorted(added))} of {name}"
        if (security.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in PROFILES:
            yield f"no seccomp profile of {name}"
