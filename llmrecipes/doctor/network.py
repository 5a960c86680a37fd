"""This node's names, interfaces and ports."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from llmrecipes.doctor.finding import Finding, fail, ok, warn


def check(port: int, several: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check this node's network.

    Args:
        port: on which the first rank will listen.
        several: whether a run spans several nodes; a host name that resolves to loopback is an error then.
        environment: of the ranks; may name interfaces.
    """
    yield name(socket.gethostname(), several)
    interfaces = {interface for _, interface in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        wanted = [] if value.startswith("^") else [part for part in value.lstrip("=").split(",") if part]
        missing = [part for part in wanted if not any(interface.startswith(part) for interface in interfaces)]
        if missing:
            what = f"{variable}: no interface {', '.join(missing)} (found {', '.join(sorted(interfaces))})"
            yield fail("interfaces", what, f"set {variable} to an interface that all nodes have")
    yield free_port(port)


def name(host: str, several: bool) -> Finding:
    """Whether a host name resolves to an address that other nodes can reach."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # the latter for a name that DNS does not permit
        verdict = fail if several else warn
        return verdict("host name", f"{host} does not resolve: {error}", f"an entry for {host} in DNS or /etc/hosts")
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        what = f"{host} is {', '.join(sorted(addresses))}, a loopback address, which every node resolves to itself"
        # Debian writes 127.0.1.1 into /etc/hosts.
        return (fail if several else ok)(
            "host name", what, *([f"remove {host} from the 127.0.1.1 line of /etc/hosts"] if several else [])
        )
    return ok("host name", f"{host} is {', '.join(sorted(addresses))}")


def free_port(port: int) -> Finding:
    """Whether the first rank can listen on its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("", port))
        except OSError as error:
            return fail("port", f"{port} cannot be used: {error.strerror}", "stop what listens there (ss -ltnp)")
    return ok("port", f"{port} is free")
