"""The hosts of a job whose command runs once on each of them, and their rendezvous: they connect to the first one and
exchange messages.

Its port is open to the network between the nodes, so both sides prove that they have the job's token before anything of
theirs is parsed: HMAC challenge-response, with every later message authenticated too. The token itself is never sent.
Messages are JSON lines of bounded size, and every wait has a deadline that no trickle of bytes extends.
`multiprocessing.connection` has such a challenge too, but no timeouts, and authenticates nothing after it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.launch.open_files import allow_nodes

RANGE = re.compile(r"([^][]*)\[(\d{1,9})-(\d{1,9})\]([^][]*)")
MOST_NODES = 100_000


def job_hosts(nodes: str | None) -> tuple[str, ...]:
    """Hosts of the job, in the same order on each.

    Args:
        nodes: value of --nodes; None: those of the Slurm step, else only this host.

    Raises:
        UserError: the list is invalid, or Slurm cannot be asked.
    """
    if nodes is not None:
        hosts = tuple(host for word in nodes.split(",") if word for host in _expanded(word))
        if len(set(hosts)) != len(hosts) or not hosts:
            rule = "comma-separated host names or ranges n[0-3], without duplicates"
            raise UserError(f"{nodes!r}", where="--nodes", rule=rule)
        return hosts
    if int(os.environ.get("SLURM_NNODES", "1")) == 1 or "SLURM_PROCID" not in os.environ:
        return (socket.gethostname(),)
    listing = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        return tuple(subprocess.run(listing, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"cannot expand the node list {os.environ['SLURM_JOB_NODELIST']}: scontrol failed: {error}",
            where="--nodes",
            rule="a check of several nodes needs their names from scontrol, which containers usually lack",
            fix="outside of the container: --nodes $(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd,)",
        ) from error


def own_number(hosts: tuple[str, ...]) -> int:
    """Index of this host among those of the job.

    Raises:
        UserError: it is not among them.
    """
    for variable in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):  # the latter in pods, which may share the node's network
        if (index := os.environ.get(variable, "")).isdecimal() and int(index) < len(hosts):
            return int(index)
    hostname = socket.gethostname()
    names = {hostname, hostname.partition(".")[0]}
    if matches := [number for number, host in enumerate(hosts) if host in names or host.partition(".")[0] in names]:
        return matches[0]
    raise UserError(
        f"{hostname} is not one of {', '.join(hosts)}",
        where="--nodes",
        rule="the command must run on the nodes of --nodes",
    )


def _expanded(word: str) -> list[str]:
    """The hosts of `node[08-11].site`; another word is a host itself."""
    match = RANGE.fullmatch(word)
    if match is None:
        return [word]
    before, first, last, after = match.groups()
    if int(last) - int(first) >= MOST_NODES:
        raise UserError(f"{word!r}", where="--nodes", rule=f"at most {MOST_NODES:,} nodes")
    return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]


Message = dict[str, Any]

TOKEN = "LLMRECIPES_RENDEZVOUS_TOKEN"  # noqa: S105 - the name of the variable
"""Variable with the secret that the nodes of a job share."""
LEAST_TOKEN = 16
"""Characters; slurm/train.sbatch makes 64, the uid of a Kubernetes Job has 36."""
LONGEST_MESSAGE = 1 << 22
LONGEST_HELLO = 256
"""Bytes of a line before the other side is authenticated."""
HELLO_SECONDS = 5.0
"""For all of the challenge, on the first node. A node that connects waits longer, because the first one may be busy."""
CONNECT_SECONDS = 5.0
MOST_PENDING = 128
"""Connections that the first node authenticates at the same time; further ones wait in the kernel's queue."""
CHALLENGE = re.compile(r"llmrecipes 1 ([0-9a-f]{64})")
HELLO = re.compile(r"([0-9]{1,6}) ([0-9a-f]{64}) ([0-9a-f]{64})")


class Disconnected(Exception):
    """The other side closed the connection, did not answer in time, or sent something that is not a valid message."""


def token_of(environment: Mapping[str, str]) -> bytes:
    """The token of this job.

    Raises:
        UserError: it is missing or too short; the message does not repeat it.
    """
    token = environment.get(TOKEN, "")
    if len(token) < LEAST_TOKEN:
        raise UserError(
            "is not set" if not token else f"has {len(token)} characters",
            where=TOKEN,
            rule=f"the nodes of a job need a shared secret of at least {LEAST_TOKEN} characters",
            fix=f"export {TOKEN}=$(openssl rand -hex 32) before srun, or the same value on every node",
        )
    return token.encode()


class Channel:
    """A connection to another node. Until `secure`, lines are exchanged; then authenticated messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._key = b""
        self._sent = self._received = 0
        self._ours = self._theirs = b""

    def secure(self, key: bytes, ours: bytes, theirs: bytes) -> None:
        """Authenticate messages from now on.

        Args:
            key: of this connection.
            ours, theirs: names of the two sides, so that no message can be sent back to its sender.
        """
        self._key = key
        self._ours = ours
        self._theirs = theirs

    def send(self, message: Message, seconds: float = CONNECT_SECONDS) -> None:
        """Send a message.

        Raises:
            Disconnected: the other side does not read it.
        """
        text = json.dumps(message).encode()
        proof = _proof(self._key, self._ours, b"%d" % self._sent, text)
        self._sent += 1
        self.send_line(f"{proof} ".encode() + text, seconds)

    def receive(self, seconds: float) -> Message:
        """The next message.

        Args:
            seconds: after which the whole message must have arrived.

        Raises:
            Disconnected: it did not, or it is invalid.
        """
        proof, _, text = self.receive_line(LONGEST_MESSAGE, seconds).partition(b" ")
        if not hmac.compare_digest(proof, _proof(self._key, self._theirs, b"%d" % self._received, text).encode()):
            raise Disconnected("sent a message that is not authentic")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Disconnected("sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise Disconnected("sent a message that is not an object")
        return message

    def send_line(self, line: bytes, seconds: float) -> None:
        """Send one line.

        Raises:
            Disconnected: the other side does not read it.
        """
        try:
            self._connection.settimeout(max(0.01, seconds))
            self._connection.sendall(line + b"\n")
        except OSError as error:
            raise Disconnected(error.strerror or "timed out while reading") from error

    def receive_line(self, longest: int, seconds: float) -> bytes:
        """The next line, without its end.

        Raises:
            Disconnected: it is longer than `longest`, or is not complete after `seconds`.
        """
        deadline = time.monotonic() + seconds
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0 and len(self._buffer) <= longest:
            searched = len(self._buffer)
            try:
                # One byte at a time must not extend the wait: the time left shrinks.
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                received = self._connection.recv(1 << 16)
            except OSError as error:
                raise Disconnected(error.strerror or "timed out") from error
            if not received:
                raise Disconnected("closed the connection")
            self._buffer += received
            if time.monotonic() > deadline:
                raise Disconnected("timed out")
        if not 0 <= end <= longest:
            raise Disconnected(f"sent a line of more than {longest} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def close(self) -> None:
        """Close the connection; may be called again."""
        self._connection.close()


class FirstNode:
    """The listening side: accepts the nodes of a job, and ignores and counts everything else.

    A context manager that listens inside its block.

    Args:
        hosts: names of all nodes.
        port: on all interfaces.
        token: of the job.
        serve: called in a thread of its own for every node, with its index and the authenticated connection, which is
            closed if it raises `Disconnected`.
        first_too: whether the first node connects to itself as well.

    Raises:
        UserError: the port is in use, or too few files may be open.
    """

    def __init__(
        self,
        hosts: tuple[str, ...],
        port: int,
        token: bytes,
        serve: Callable[[int, Channel], None],
        *,
        first_too: bool = False,
    ) -> None:
        allow_nodes(len(hosts))
        self._least, self._count = 0 if first_too else 1, len(hosts)
        self._token = token
        self._serve = serve
        self._lock = threading.Lock()
        self._present: set[int] = set()
        self._ignored = 0
        self._closed = False
        self._pending = threading.BoundedSemaphore(MOST_PENDING)
        self._server = listening(port, hosts[0], backlog=len(hosts) + MOST_PENDING)

    def __enter__(self) -> FirstNode:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept, which close does not
        finally:
            self._server.close()

    @property
    def ignored(self) -> int:
        """Connections that were malformed, of a node that is already there, or have not been authenticated so far."""
        with self._lock:
            return self._ignored

    def _accept(self) -> None:
        while True:
            self._pending.acquire()
            try:
                connection = self._server.accept()[0]
            except OSError:
                self._pending.release()
                if self._closed:
                    return
                time.sleep(0.1)  # out of open files, or the other side has gone: others are still to come
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        with self._lock:
            self._ignored += 1  # until it has proved that it has the token
        try:
            number = self._authenticate(channel)
        except Disconnected:
            channel.close()
            return
        finally:
            self._pending.release()
        try:
            self._serve(number, channel)
        except Disconnected:  # its answers are missing, which the caller reports
            channel.close()

    def _authenticate(self, channel: Channel) -> int:
        """The index of the node, once both sides have proved that they have the token."""
        deadline = time.monotonic() + HELLO_SECONDS
        challenge = secrets.token_hex(32).encode()
        channel.send_line(b"llmrecipes 1 " + challenge, HELLO_SECONDS)
        hello = channel.receive_line(LONGEST_HELLO, deadline - time.monotonic())
        matched = HELLO.fullmatch(hello.decode("ascii", "replace"))
        if matched is None:
            raise Disconnected("is not a node")
        number = matched[1].encode()
        nonce = matched[2].encode()
        proof = matched[3]
        if not hmac.compare_digest(proof, _proof(self._token, b"node", number, challenge, nonce)):
            raise Disconnected("does not have the token")
        index = int(number)
        with self._lock:
            if not self._least <= index < self._count or index in self._present:
                raise Disconnected("is not an expected node, or has already joined")
            self._present.add(index)
            self._ignored -= 1
        try:
            channel.send_line(_proof(self._token, b"first", number, challenge, nonce).encode(), HELLO_SECONDS)
        except Disconnected:  # it may try again
            with self._lock:
                self._present.discard(index)
                self._ignored += 1
            raise
        channel.secure(_key(self._token, number, challenge, nonce), b"first", b"node")
        return index


@contextmanager
def joined(hosts: tuple[str, ...], number: int, port: int, token: bytes, patience: float) -> Iterator[Channel]:
    """A connection to the first node, as soon as it listens; the block of another node.

    Args:
        hosts: names of all nodes.
        number: index of this node; the first one connects to itself.
        port: on which the first node listens.
        token: of the job.
        patience: seconds to try.

    Raises:
        UserError: the first node does not respond, does not have the token, or is lost within the block.
    """
    channel = _connected("127.0.0.1" if number == 0 else hosts[0], number, port, token, patience)
    try:
        yield channel
    except Disconnected as error:
        raise UserError(
            f"lost the connection to the first node: {error}",
            where=f"{hosts[0]}:{port}",
            fix="check that node's output, and which network its host name resolves to",
        ) from error
    finally:
        channel.close()


def listening(port: int, host: str, backlog: int) -> socket.socket:
    """A socket that listens on all interfaces.

    Raises:
        UserError: the port is in use; `host` is named.
    """
    try:
        return socket.create_server(("", port), backlog=backlog)
    except OSError as error:
        what = f"cannot use port {port}: {error.strerror}"
        raise UserError(what, where=host, fix="stop the program on that port (ss -ltnp)") from error


def _connected(host: str, number: int, port: int, token: bytes, patience: float) -> Channel:
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            channel = Channel(connection)
            try:
                _introduce(channel, number, token, deadline - time.monotonic())
            except Disconnected:
                channel.close()
                raise
        except (OSError, Disconnected) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the first node does not respond: {getattr(error, 'strerror', None) or error}",
                    where=f"{host}:{port}",
                    fix="start the same command on every node at the same time, with the same "
                    f"{TOKEN}; check for a firewall between them",
                ) from error
            time.sleep(0.2)
        else:
            return channel


def _introduce(channel: Channel, number: int, token: bytes, patience: float) -> None:
    """Answer the challenge of the first node, and challenge it."""
    deadline = time.monotonic() + min(3 * HELLO_SECONDS, max(1.0, patience))
    line = channel.receive_line(LONGEST_HELLO, deadline - time.monotonic())
    matched = CHALLENGE.fullmatch(line.decode("ascii", "replace"))
    if matched is None:
        raise Disconnected("another program listens on its port")
    challenge = matched[1].encode()
    nonce = secrets.token_hex(32).encode()
    own = b"%d" % number
    proof = _proof(token, b"node", own, challenge, nonce).encode()
    channel.send_line(b" ".join((own, nonce, proof)), deadline - time.monotonic())
    answer = channel.receive_line(LONGEST_HELLO, deadline - time.monotonic())
    if not hmac.compare_digest(answer, _proof(token, b"first", own, challenge, nonce).encode()):
        raise Disconnected("it does not have this job's token")
    channel.secure(_key(token, own, challenge, nonce), b"node", b"first")


def _key(token: bytes, *parts: bytes) -> bytes:
    """The key of one connection: messages of another one are not authentic in it."""
    return bytes.fromhex(_proof(token, b"key", *parts))


def _proof(key: bytes, *parts: bytes) -> str:
    # Every part but the last has no space, so that no two lists give the same text.
    return hmac.new(key, b" ".join(parts), hashlib.sha256).hexdigest()
