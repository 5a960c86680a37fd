"""A real Slurm on one machine: munged, slurmctld, and a slurmd for each node in a network and host name of its own.

Made for Debian's slurm-wlm 22.05 without systemd and without control groups; needs root.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

PROGRAMS = {
    "munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-client", "ip": "iproute2",
    "nsenter": "util-linux", "unshare": "util-linux",
}  # fmt: skip
DATABASE = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
T = TypeVar("T")
PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"
NODE_PORT = 17000


def missing(programs: dict[str, str]) -> str:
    """What is not here, in one line; empty where nothing is missing.

    Args:
        programs: names of programs, and the Debian packages that have them.
    """
    packages = {package for program, package in programs.items() if shutil.which(program, path=PATH) is None}
    words = [f"apt-get install {' '.join(sorted(packages))}"] if packages else []
    if os.geteuid() != 0:
        words.append("root, for networks of their own")
    elif not packages and not _may_make_networks():
        words.append("the right to make networks (CAP_NET_ADMIN, CAP_SYS_ADMIN)")
    return "; ".join(words)


def _may_make_networks() -> bool:
    bridge = f"slp{os.getpid() % 100000}"
    made = subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
    entered = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return made.returncode == entered.returncode == 0


@dataclass
class Lab:
    """A running cluster.

    Args:
        root: its files.
        nodes: names of its nodes.
        cpus: processor cores each node claims.
        network: the second and third number of its addresses, which no other cluster on this machine has.
        port: of slurmctld; the next two are those of slurmdbd and MariaDB.
        stack: ends what was started.
    """

    root: Path
    nodes: list[str]
    cpus: int
    network: str
    port: int
    stack: ExitStack
    slurmds: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What a client needs; nothing that pytest or this machine's scheduler has set."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PYTEST"))}
        return {**kept, "SLURM_CONF": str(self.root / "etc/slurm.conf"), "PATH": PATH}

    def run(self, *command: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a client program."""
        done = subprocess.run(
            command, env=self.variables, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        return done

    def job(self, number: str) -> dict[str, str]:
        """A job's fields as `scontrol show job` has them."""
        command = ["scontrol", "--oneliner", "show", "job", number]

        def ask() -> list[str] | None:  # again where it fails, as it did once, without a word, on a busy machine
            done = self.run(*command, check=False)
            return done.stdout.split() if done.returncode == 0 else None

        words = self.until(ask, " ".join(command), 30)
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, timeout: float = 240) -> dict[str, str]:
        """Wait until a job is in one of the states."""
        return self.until(lambda: self._in(number, states), f"job {number} is not {' or '.join(states)}", timeout)

    def _in(self, number: str, states: tuple[str, ...]) -> dict[str, str] | None:
        found = self.job(number)
        return found if found["JobState"] in states else None

    def until(self, look: Callable[[], T | None], what: str, timeout: float = 240, pause: float = 0.3) -> T:
        """Look again and again: Slurm tells nobody when a job changes, and each question is a process."""
        deadline = time.monotonic() + timeout
        while (found := look()) is None:
            assert time.monotonic() < deadline, f"{what} after {timeout:g} s\n{self.state()}"
            time.sleep(pause)
        return found

    def state(self) -> str:
        """Queue, nodes and the ends of all logs, for messages."""
        parts = [self.run(*command, check=False).stdout for command in (["squeue"], ["sinfo", "-N"])]
        parts += [f"== {path}\n{_tail(path)}" for path in sorted((self.root / "log").iterdir())]
        return "\n".join(parts)

    def forget_jobs(self) -> None:
        """Start slurmctld without its state, so that it knows no job, as it does MinJobAge after a job's end."""
        self.stop_controller()
        self.start_controller("-c")

    def stop_controller(self) -> None:
        """End slurmctld; jobs that run go on."""
        self.run("scontrol", "shutdown", "slurmctld")
        pid = self.root / "run/slurmctld.pid"
        self.until(lambda: None if pid.exists() and pid.read_text() else True, "slurmctld has not ended", 20)

    def start_controller(self, *options: str) -> None:
        """Start slurmctld, with its state unless options say otherwise."""
        _daemon(self, self.stack, "slurmctld", "slurmctld", "-D", *options)
        self.until(
            lambda: True if self.run("scontrol", "ping", check=False).returncode == 0 else None, "no slurmctld", 20
        )

    def kill_node(self, name: str) -> None:
        """Pull the plug: every process of a node ends at once, and its network with them."""
        for pid in _pids_of(self, name):
            os.kill(pid, signal.SIGKILL)
        self.slurmds.pop(name).wait()

    def inside(self, node: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program in the network of a node."""
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{_namespace(self, node)}", *command], env=self.variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, in the network, with the host name and with the /etc/hosts of the node."""
        hosts = self.root / "etc/hosts"
        # nsenter, because `ip netns exec` mounts /sys anew, and slurmd does not start without /sys/fs/cgroup.
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'
        with (self.root / f"log/slurmd.{name}.out").open("ab") as log:
            self.slurmds[name] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{_namespace(self, name)}", "unshare", "--uts", "--mount", "sh", "-c",
                 script, "sh", name, str(hosts)],
                env=self.variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


@contextmanager
def cluster(nodes: int, cpus: int, *, spank: str = "", accounting: bool = False, prolog: str = "") -> Iterator[Lab]:
    """Start a cluster with the partitions `train` (the default) and `spot` (jobs of `train` take its nodes).

    Args:
        nodes: how many.
        cpus: cores that each claims.
        spank: line of plugstack.conf.
        accounting: with MariaDB and slurmdbd, so that sacct answers.
        prolog: program that every node runs before a job.
    """
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path: sockets have at most 108 characters
    root.chmod(0o755)
    with ExitStack() as stack:
        names = [f"n{number}" for number in range(1, nodes + 1)]
        lab = Lab(root, names, cpus, _free_network(), _free_ports(), stack)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        for name in ("etc", "log", "state", "spool", "munge", "run"):
            (root / name).mkdir()
        (root / "munge").chmod(0o700)
        _configure(lab, spank, accounting, prolog)
        _start_munge(lab, stack)
        _make_network(lab, stack)
        if accounting:
            _start_database(lab, stack)
        _daemon(lab, stack, "slurmctld", "slurmctld", "-D")
        stack.callback(_stop_nodes, lab)
        for name in lab.nodes:
            lab.start_node(name)
        idle = ["sinfo", "--noheader", "--Node", "--states=idle", "--partition=train"]
        lab.until(
            lambda: True if len(lab.run(*idle, check=False).stdout.splitlines()) == nodes else None,
            "not all nodes are idle",
            60,
        )
        yield lab


def _configure(lab: Lab, spank: str, accounting: bool, prolog: str) -> None:
    root, etc = lab.root, lab.root / "etc"
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr={_address(lab, number)} Port={NODE_PORT} "
        f"CPUs={lab.cpus} RealMemory=4000 Features=small State=UNKNOWN"
        for number, name in enumerate(lab.nodes, 1)
    ]
    account = ["AccountingStorageType=accounting_storage/none"]
    if accounting:
        account = [
            "AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={lab.port + 1}", f"AccountingStoragePass={root}/run/munge.sock",
            "AccountingStorageEnforce=associations",
        ]  # fmt: skip
    plugin = [f"PlugStackConfig={etc}/plugstack.conf"] if spank else []
    if prolog:
        plugin += [f"Prolog={prolog}", "PrologFlags=Alloc"]
    # Jobs whose prolog fails go back to the queue; by default they would be held there.
    scheduling = "sched_interval=1,bf_interval=1,nohold_on_prolog_fail"
    (etc / "plugstack.conf").write_text(f"{spank}\n")
    (etc / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (etc / "topology.conf").write_text(f"SwitchName=leaf Nodes={','.join(lab.nodes)}\n")
    hosts = [f"{_address(lab, number)} {name}" for number, name in enumerate(lab.nodes, 1)]
    here = socket.gethostname()
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{_address(lab, 254)} {here}", *hosts]) + "\n")
    (etc / "slurm.conf").write_text(
        "\n".join(
            [
                "ClusterName=lab", f"SlurmctldHost={here}({_address(lab, 254)})",
                f"SlurmctldPort={lab.port}", "SlurmctldDebug=verbose",  # which signals it has sent
                "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge",
                # A job that is requeued waits until its old credential has expired.
                f"AuthInfo=socket={root}/run/munge.sock,cred_expire=5",
                f"StateSaveLocation={root}/state", f"SlurmdSpoolDir={root}/spool/%n",
                f"SlurmctldPidFile={root}/run/slurmctld.pid", f"SlurmdPidFile={root}/run/slurmd.%n.pid",
                f"SlurmctldLogFile={root}/log/slurmctld.log", f"SlurmdLogFile={root}/log/slurmd.%n.log",
                "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none",
                "SwitchType=switch/none",
                "JobAcctGatherType=jobacct_gather/linux", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core",
                "SchedulerType=sched/backfill", f"SchedulerParameters={scheduling}",
                "PriorityType=priority/basic", "SlurmdParameters=config_overrides", "ReturnToService=2",
                "SlurmdTimeout=10", "SlurmctldTimeout=10", "InactiveLimit=0", "KillWait=5", "MinJobAge=3600",
                "BatchStartTimeout=20", "JobRequeue=1", "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
                "TopologyPlugin=topology/tree", "EnforcePartLimits=ALL", "MessageTimeout=30", *account, *plugin, *lines,
                "PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
                "PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE "
                "GraceTime=60",
            ]
        )
        + "\n"
    )  # fmt: skip


def _start_munge(lab: Lab, stack: ExitStack) -> None:
    munge = lab.root / "munge"
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o400)
    _daemon(
        lab, stack, "munged", "munged", "--foreground", "--force", f"--key-file={munge}/key",
        f"--seed-file={munge}/seed", f"--socket={lab.root}/run/munge.sock", f"--pid-file={lab.root}/run/munged.pid",
        f"--log-file={munge}/log",
    )  # fmt: skip
    lab.until(lambda: True if (lab.root / "run/munge.sock").exists() else None, "munged has no socket", 20)


def _start_database(lab: Lab, stack: ExitStack) -> None:
    root, data = lab.root, lab.root / "sql"
    data.mkdir()
    shutil.chown(data, "mysql", "mysql")
    options = ["--no-defaults", "--user=mysql", f"--datadir={data}"]
    with (root / "log/mariadb.out").open("ab") as log:
        subprocess.run(
            ["mariadb-install-db", *options, "--auth-root-authentication-method=socket", "--skip-test-db"],
            env=lab.variables, stdout=log, stderr=log, check=True, timeout=120,
        )  # fmt: skip
    sock = data / "sock"
    _daemon(
        lab, stack, "mariadbd", "mariadbd", *options, f"--socket={sock}", f"--port={lab.port + 2}",
        "--bind-address=127.0.0.1", f"--pid-file={data}/pid", "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
    )  # fmt: skip
    client = ["mariadb", "--no-defaults", "-S", str(sock), "-e"]
    lab.until(lambda: True if lab.run(*client, "select 1", check=False).returncode == 0 else None, "no MariaDB", 60)
    password = secrets.token_hex(8)
    lab.run(*client, "create database slurm_acct_db; " + "".join(
        f"create user slurm@'{host}' identified by '{password}'; grant all on slurm_acct_db.* to slurm@'{host}';"
        for host in ("localhost", "127.0.0.1")
    ))  # fmt: skip
    path = root / "etc/slurmdbd.conf"
    path.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={root}/run/munge.sock\nDbdHost=localhost\nDbdAddr=127.0.0.1\n"
        f"DbdPort={lab.port + 1}\nSlurmUser=root\n"
        f"LogFile={root}/log/slurmdbd.log\nPidFile={root}/run/slurmdbd.pid\n"
        f"StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={lab.port + 2}\nStorageUser=slurm\n"
        f"StoragePass={password}\nStorageLoc=slurm_acct_db\n"
    )
    path.chmod(0o600)
    _daemon(lab, stack, "slurmdbd", "slurmdbd", "-D")
    sacctmgr = ["sacctmgr", "--immediate"]
    lab.until(
        lambda: True if lab.run(*sacctmgr, "list", "cluster", check=False).returncode == 0 else None, "no slurmdbd", 60
    )
    for words in ("add cluster lab", "add account research", "add user root account=research"):
        lab.run(*sacctmgr, *words.split())


def _daemon(lab: Lab, stack: ExitStack, name: str, *command: str) -> None:
    with (lab.root / f"log/{name}.out").open("ab") as log:
        process = subprocess.Popen(
            command, env=lab.variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _stop_nodes(lab: Lab) -> None:
    """End slurmds, then whatever a job has left in a node's network."""
    for process in lab.slurmds.values():
        process.terminate()
    for name in lab.nodes:
        for pid in _pids_of(lab, name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for process in lab.slurmds.values():
        process.wait(20)


def _make_network(lab: Lab, stack: ExitStack) -> None:
    bridge = f"slb{lab.network}"
    _ip("link", "add", bridge, "type", "bridge")
    stack.callback(_ip, "link", "del", bridge)
    _ip("addr", "add", f"{_address(lab, 254)}/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for number, name in enumerate(lab.nodes, 1):
        space, cable = _namespace(lab, name), f"slv{lab.network}.{number}"
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "del", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{_address(lab, number)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, env={"PATH": PATH})
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _namespace(lab: Lab, node: str) -> str:
    return f"sl-{lab.network}-{node}"


def _address(lab: Lab, host: int) -> str:
    return f"10.{lab.network}.{host}"


def _pids_of(lab: Lab, node: str) -> list[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", _namespace(lab, node)], capture_output=True, text=True, check=False, env={"PATH": PATH}
    )
    return [int(word) for word in done.stdout.split()]


def _tail(path: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[-30:])


def _free_network() -> str:
    """Numbers of a network that this machine does not have, so that several runs of the tests do not meet."""
    show = ["ip", "-4", "-oneline", "addr"]
    done = subprocess.run(show, capture_output=True, text=True, check=True, env={"PATH": PATH})
    # From a place of its own: another process of pytest-xdist may be about to take one.
    numbers = ((os.getpid() * 16 + number) % 254 + 1 for number in range(254))
    return f"231.{next(number for number in numbers if f' 10.231.{number}.' not in done.stdout)}"


def _free_ports() -> int:
    """The first of three ports in a row that nobody listens on, below those that Linux gives out by itself."""
    while True:
        first = random.randrange(16000, 30000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
