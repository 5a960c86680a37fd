"""podman for the tests: with storage of its own, in a mount namespace in which mixed control groups do no harm."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {
    "podman": "podman",
    "netavark": "netavark",
    "aardvark-dns": "aardvark-dns",
    "catatonit": "catatonit",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
}
"""Programs and the Debian packages that have them."""
CONFIGURATION = """\
[network]
network_config_dir = "{folder}/networks"
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def require_packages() -> None:
    """Skip, and say what to install, where something is missing."""
    folders = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/lib/podman"
    missing = sorted({package for program, package in PACKAGES.items() if shutil.which(program, path=folders) is None})
    if os.getuid() != 0:
        pytest.skip("needs root, for podman without an init system")
    if missing:
        pytest.skip(f"needs Debian packages: apt-get install --no-install-recommends {' '.join(missing)}")


class Podman:
    """podman with its storage in a folder.

    Args:
        folder: for storage and configuration; its file `podman` is a program that anything else can call.
        run: for sockets, so podman takes no path above 50 characters.
        holder: process whose mount namespace is used: a container's network lives in one.
    """

    def __init__(self, folder: Path, run: str, holder: int) -> None:
        self.folder = folder
        self.program = folder / "podman"
        self.networks: list[str] = []
        (folder / "containers.conf").write_text(CONFIGURATION.format(folder=folder))
        self.program.write_text(
            "#!/bin/sh\n"
            f"export CONTAINERS_CONF={folder}/containers.conf\n"
            "cwd=$(pwd)\n"
            f'exec nsenter --mount=/proc/{holder}/ns/mnt --wd="$cwd" '
            f'podman --root {folder}/store --runroot {run} --storage-driver overlay "$@"\n'
        )
        self.program.chmod(0o755)

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 300, stdin: Any = None) -> str:
        """Run a command; returns what it printed, both streams."""
        done = subprocess.run(
            [self.program, *arguments],
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout}"
        return done.stdout

    def network(self) -> tuple[str, str]:
        """A new network: its name, and the first three numbers of its addresses, which nobody else here uses."""
        for third in range(77, 250):
            name, start = f"llmrecipes-test-{third}", f"10.89.{third}"
            if "already used" not in self("network", "create", "--subnet", f"{start}.0/24", name, check=False):
                self.networks.append(name)
                return name, start
        raise AssertionError("no free subnet in 10.89")


@contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """A podman that is cleaned away at the end."""
    # Version 2 of control groups beside version 1 confuses runc; a namespace of our own can do without.
    script = "umount /sys/fs/cgroup/unified 2>/dev/null; echo ready; exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    run = tempfile.mkdtemp(prefix="podman-")
    made = Podman(folder, run, holder.pid)
    try:
        yield made
    finally:
        made("pod", "rm", "--all", "--force", check=False)
        made("rm", "--all", "--force", check=False)
        made("volume", "rm", "--all", "--force", check=False)
        for name in made.networks:
            made("network", "rm", "--force", name, check=False)
        holder.send_signal(signal.SIGTERM)
        holder.wait()
        for each in (folder, run):
            shutil.rmtree(each, ignore_errors=True)


def base_image(tool: Podman, name: str, folder: Path) -> str:
    """The base image: pulled where a registry answers, else Debian's own bootstrap under the base's name.

    Args:
        tool: where it goes.
        name: with tag and digest.
        folder: for the bootstrap.
    """
    try:
        tool("pull", "--quiet", name, timeout=60)
    except (AssertionError, subprocess.TimeoutExpired):
        root = folder / "debian"
        subprocess.run(["debootstrap", "--variant=minbase", "trixie", str(root)], check=True, capture_output=True)
        # As the slim image is made: without documentation and translations.
        for part in ("var/cache/apt", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
            shutil.rmtree(root / part)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        stand_in = name.partition("@")[0]
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            tool("import", "-", stand_in, stdin=archive.stdout)
        shutil.rmtree(root)
        return stand_in
    return name


def expand(objects: list[dict[str, Any]], image: str, network: str, folder: Path) -> list[dict[str, Any]]:
    """The pods of an Indexed Job, and what they mount, as `podman kube play` takes them.

    podman knows no Job and no headless Service, publishes every port on the host, takes no long annotations, makes no
    folders in a ConfigMap's volume, and makes an emptyDir that only root can write: host names stand in for the
    Service, folders for the volumes.

    Args:
        objects: of `submit --to k8s`.
        image: to run instead of the one that is asked for.
        network: the first three numbers of its addresses; pod *n* has address 10 + *n*.
        folder: for the folders.
    """
    job = next(thing for thing in objects if thing["kind"] == "Job")
    service = next(thing for thing in objects if thing["kind"] == "Service")["metadata"]["name"]
    name, number = job["metadata"]["name"], job["spec"]["completions"]
    aliases = [{"ip": f"{network}.{10 + n}", "hostnames": [f"{name}-{n}.{service}"]} for n in range(number)]
    made: list[dict[str, Any]] = []
    for index in range(number):
        template = copy.deepcopy(job["spec"]["template"])
        spec = template["spec"]
        assert spec.pop("subdomain") == service
        spec |= {"hostname": f"{name}-{index}", "hostAliases": aliases}
        # podman starts one pod after the other, and each would wait for the others before its container.
        words = spec["initContainers"][0]["args"]
        del words[words.index("--nodes") :]
        for container in (*spec["initContainers"], *spec["containers"]):
            container |= {"image": image, "imagePullPolicy": "Never"}
            container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
            container.pop("ports", None)
            container.pop("resources")
        for volume in spec["volumes"]:
            if volume.pop("configMap", None) is not None:
                volume["hostPath"] = {"path": str(mounted_files(objects, folder)), "type": "Directory"}
            if volume.pop("emptyDir", None) is not None:
                empty = folder / f"{volume['name']}-{index}"
                empty.mkdir()
                empty.chmod(0o1777)
                volume["hostPath"] = {"path": str(empty), "type": "Directory"}
        metadata = {"name": f"{name}-{index}", "labels": template["metadata"]["labels"]}
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return made


def mounted_files(objects: list[dict[str, Any]], folder: Path) -> Path:
    """What the kubelet puts into the ConfigMap's volume."""
    job = next(thing for thing in objects if thing["kind"] == "Job")
    files = next(thing for thing in objects if thing["kind"] == "ConfigMap")["data"]
    volumes = job["spec"]["template"]["spec"]["volumes"]
    for item in next(volume for volume in volumes if volume["name"] == "recipe")["configMap"]["items"]:
        file = folder / "files" / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files[item["key"]], "utf-8")
    return folder / "files"


def start_checks(tool: Podman, objects: list[dict[str, Any]], image: str, folder: Path) -> list[str]:
    """Start the init containers of all pods of an Indexed Job at once; returns the names of the containers.

    Args:
        tool: where they run.
        objects: of `submit --to k8s`.
        image: to run instead of the one that is asked for.
        folder: for what they mount.
    """
    job = next(thing for thing in objects if thing["kind"] == "Job")
    service = next(thing for thing in objects if thing["kind"] == "Service")["metadata"]["name"]
    checked = job["spec"]["template"]["spec"]["initContainers"][0]
    name, network = job["metadata"]["name"], tool.network()
    names = [f"{name}-{index}" for index in range(job["spec"]["completions"])]
    hosts = [f"--add-host={each}.{service}:{network[1]}.{10 + index}" for index, each in enumerate(names)]
    words = [word.replace("$$", "$") for word in (*checked["command"], *checked["args"])]
    for index, each in enumerate(names):
        # A value from the pod's fields is the uid of the Job, by which its nodes recognise each other.
        variables = {each["name"]: each.get("value", "7f3c" * 9) for each in checked["env"]}
        variables["JOB_COMPLETION_INDEX"] = str(index)
        tool(
            "run", "--detach", f"--name={each}", f"--hostname={each}", f"--network={network[0]}",
            f"--ip={network[1]}.{10 + index}", *hosts, "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
            f"--volume={name}:/workspace", f"--volume={mounted_files(objects, folder)}:/etc/llmrecipes:ro",
            *(f"--env={variable}={value}" for variable, value in variables.items()), image, *words,
        )  # fmt: skip
    return names
