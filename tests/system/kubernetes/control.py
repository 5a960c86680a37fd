"""A control plane for the tests: etcd, an API server and the controllers of Kubernetes, without nodes.

There is no kubelet: a test plays its part and writes the status of a pod.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Object = dict[str, Any]
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
SECONDS = 120.0
# Without kubelets, nodes would count as lost, and pods that end as on no node.
NOT_RUN = ",".join(
    f"-{name}-controller"
    for name in ("node-lifecycle", "taint-eviction", "device-taint-eviction", "pod-garbage-collector")
)


class Cluster:
    """Kubernetes' API and its controllers.

    Args:
        folder: for their data and logs; `kubeconfig` in it has all rights.
        programs: the folder with the programs.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.programs = programs
        self.kubeconfig = folder / "kubeconfig"
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all of them, and wait until they answer."""
        client, peer, secure, manager = _free_ports(4)
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self.kubeconfig.write_text(json.dumps(_kubeconfig(f"https://127.0.0.1:{secure}", token)))
        self.run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        self.run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={secure}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/24",
        )
        self.wait(lambda: self("get", "--raw", "/readyz", check=False) == "ok")
        self.run(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={manager}",
            f"--controllers=*,{NOT_RUN}",
        )
        self.wait(lambda: "default" in self("get", "serviceaccounts", "--output=name", check=False))

    def run(self, program: str, *arguments: str) -> None:
        """Start a program that runs until the end; its output goes to a log."""
        with (self.folder / f"{program}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen([self.programs / program, *arguments], stdout=log, stderr=log, cwd=self.folder)
            )

    def stop(self) -> None:
        """End all of them, the last one first."""
        for process in reversed(self.running):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def __call__(self, *arguments: str, text: str | None = None, check: bool = True) -> str:
        """kubectl; returns what it printed, both streams."""
        done = subprocess.run(
            ["kubectl", "--kubeconfig", self.kubeconfig, *arguments],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stdout}"
        return done.stdout

    def get(self, *arguments: str) -> Object:
        found: Object = json.loads(self("get", *arguments, "--output=json"))
        return found

    def wait(self, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Wait for a condition; returns its first true value.

        Raises:
            AssertionError: a program ended, or time is up.
        """
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            for process in self.running:
                assert process.poll() is None, f"one has ended; see the logs in {self.folder}"
            assert time.monotonic() < deadline, "time is up"
            time.sleep(0.2)
        return value

    def namespace(self, name: str, enforce: str = "privileged") -> str:
        """A new namespace that enforces a Pod Security Standard."""
        labels = {"pod-security.kubernetes.io/enforce": enforce}
        thing = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self("create", "--filename=-", text=json.dumps(thing))
        self.wait(lambda: "default" in self("get", "serviceaccounts", f"-n{name}", "--output=name", check=False))
        return name

    def pods(self, namespace: str) -> dict[int, Object]:
        """Pods of the only run of a namespace that have not ended, by their index."""
        found = [
            each for each in self.get("pods", f"-n{namespace}")["items"] if "deletionTimestamp" not in each["metadata"]
        ]
        return {
            int(each["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]): each
            for each in found
            if each["status"].get("phase") not in ("Failed", "Succeeded")
        }

    def report(self, pod: Object, **status: Any) -> None:
        """What the kubelet would write into the status of a pod."""
        place = (f"-n{pod['metadata']['namespace']}", pod["metadata"]["name"])
        self("patch", "pod", *place, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))

    def start_pod(self, pod: Object) -> None:
        """It runs and is ready."""
        conditions = [{"type": "Ready", "status": "True"}]
        self.report(pod, phase="Running", conditions=conditions, podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])

    def end_pod(self, pod: Object, code: int, disrupted: bool = False) -> None:
        """Its container ended with an exit code."""
        ended = {"name": "node", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
        self.report(
            pod,
            phase="Failed" if code else "Succeeded",
            containerStatuses=[{**ended, "state": {"terminated": {"exitCode": code}}}],
            **({"conditions": conditions} if disrupted else {}),
        )


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """A cluster that is stopped at the end."""
    programs = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
    missing = [name for name in PROGRAMS if not os.access(programs / name, os.X_OK)]
    assert not missing, f"KUBEBUILDER_ASSETS={programs} has no {', '.join(missing)}"
    made = Cluster(folder, programs)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [socket.getsockname()[1] for socket in sockets]
    for each in sockets:
        each.close()
    return ports


def _kubeconfig(server: str, token: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "admin"}}],
        "current-context": "lab",
    }
