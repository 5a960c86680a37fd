"""InfiniBand, RoCE and EFA ports that are missing, down, slow or count errors, according to the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn
from llmrecipes.hardware.nics import CHOICE, RDMA, Choice, Port, choose, expected
from llmrecipes.hardware.profile import Profile

FLAPS = 10
"""Times a link may have gone down since the driver was loaded."""
ERRORS = {
    "symbol_error": 10,
    "link_error_recovery": 10,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_rcv_remote_physical_errors": 100,
    "port_xmit_constraint_errors": 100,
    "port_rcv_constraint_errors": 100,
}
"""Counts from which a link is worth a look: the defaults of infiniband-diags' ibcheckerrors."""
SURELY_BAD = 100_000
"""Errors after which a link is no longer used: each costs a retransmission that all ranks wait for."""


def check(found: Sequence[Port], profile: Profile | None, user: Mapping[str, str]) -> Iterator[Finding]:
    """Check the ports.

    Args:
        found: ports of this node.
        profile: which ports training uses, and their rate; None: no expectation.
        user: the environment of the user, whose NCCL_IB_HCA decides which ports are used.
    """
    if profile is not None and profile.inter_node.kind in RDMA:
        yield from _check_wanted(found, profile, user)
        return
    for port in found:
        if port.state != "ACTIVE":
            yield _down(port, bad=False)
        yield from _errors(port, bad=False)
    if found and all(port.state == "ACTIVE" for port in found):
        yield ok("adapters", f"{len(found)} ports active, {_rates(found)}")


def _check_wanted(found: Sequence[Port], profile: Profile, user: Mapping[str, str]) -> Iterator[Finding]:
    wanted, choice = expected(profile), choose(found, profile, user)
    for name in choice.absent:
        there = ", ".join(sorted({port.device for port in found})) or "none"
        yield fail(f"adapter {name}", f"not there, but chosen by {choice.reason}", f"adapters of this node: {there}")
    if not choice.ports:
        yield _none_chosen(found, profile, choice)
        return
    good = [port for port in choice.ports if port.state == "ACTIVE" and port.gb_per_s >= 0.9 * wanted.gb_per_s]
    # Chosen by their kind alone, ports of storage may be among them.
    spare = not choice.exact and len(good) >= wanted.ports
    for port in choice.ports:
        if port.state != "ACTIVE":
            yield _down(port, bad=not spare, more=_which(profile) if spare else "")
        elif port not in good:
            what = f"{port.gb_per_s:g} GB/s, but {profile.name} has {wanted.gb_per_s:g} a port"
            fix = _which(profile) if spare else "a cable or switch port negotiated a lower rate; see ibstat"
            yield (warn if spare else fail)(f"adapter {port.name}", what, fix)
        yield from _errors(port, bad=not spare or port in good)
    if len(good) < wanted.ports:
        what = f"{len(good)} of {wanted.ports} ports are active at {wanted.gb_per_s:g} GB/s, by {choice.reason}"
        if choice.by_user:
            yield warn("adapters", what, f"unset NCCL_IB_HCA to use all of {profile.name}")
        else:
            yield fail("adapters", what, f"see ibstat; or adapters.ports in {profile.name}, if its nodes have fewer")
    elif len(good) == len(choice.ports):
        yield ok("adapters", f"{len(good)} ports active, {_rates(good)}, by {choice.reason}")
    else:
        yield skip("adapters", f"{len(good)} of {len(choice.ports)} ports are as in {profile.name}, by {choice.reason}")


def _none_chosen(found: Sequence[Port], profile: Profile, choice: Choice) -> Finding:
    what = f"none is chosen by {choice.reason}, but {profile.name} has {profile.inter_node.kind}"
    if not found:
        return fail(
            "adapters", f"this node has none; {what}", "load the driver, or pass /dev/infiniband to the container"
        )
    there = ", ".join(f"{port.name} ({port.link_layer or 'no link layer'})" for port in found)
    name = found[0].device
    fix = f"if training uses one of these: adapters.names in {profile.name}, or export {CHOICE}=={name}"
    return fail("adapters", f"{what}; this node has {there}", fix)


def _down(port: Port, *, bad: bool, more: str = "") -> Finding:
    verdict = fail if bad else warn
    return verdict(f"adapter {port.name}", f"port is {port.state}", more or "check cable and switch port; see ibstat")


def _which(profile: Profile) -> str:
    return f"if training does not use this port: adapters.names in {profile.name}; otherwise see ibstat"


def _errors(port: Port, *, bad: bool) -> Iterator[Finding]:
    name = f"adapter {port.name}"
    downed = port.counters.get("link_downed", 0)
    if downed > FLAPS:
        yield warn(name, f"link went down {downed} times since the driver was loaded", "replace the cable")
    many = {key: port.counters[key] for key, least in ERRORS.items() if port.counters.get(key, 0) > least}
    if many:
        what = ", ".join(f"{key} {count:,}" for key, count in many.items())
        fix = (
            "clean or replace cable and transceiver, then perfquery -R resets the counters; switch side: ibqueryerrors"
        )
        yield (fail if bad and max(many.values()) >= SURELY_BAD else warn)(name, what, fix)


def _rates(found: Sequence[Port]) -> str:
    rates = sorted({port.gb_per_s for port in found})
    return " and ".join(f"{rate:g}" for rate in rates) + " GB/s" + (" each" if len(rates) == 1 else "")
