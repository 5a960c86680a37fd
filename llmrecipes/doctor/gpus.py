"""GPUs: what nvidia-smi reports of them and of their NVLinks, and their errors in the kernel's log."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from llmrecipes.doctor.check_result import Finding, fail, ok, skip, warn
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.profile import Profile

TAKEN_MIB = 1024
"""An idle GPU uses a few hundred MiB at most."""
THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")

_END = "</nvidia_smi_log>"
_UNSAFE = re.compile(r"<process_name>.*?</process_name>|[\x00-\x08\x0b\x0c\x0e-\x1f]", re.DOTALL)
"""Text that nvidia-smi does not escape and XML does not permit, such as process names of other jobs."""
GENERATIONS = ("current_link_gen", "max_link_gen", "max_device_link_gen")


class UnreadableReport(ValueError):
    """nvidia-smi's report is cut off, or no XML."""


@dataclass(frozen=True)
class GpuState:
    """One GPU according to nvidia-smi; None where it reports nothing."""

    name: str
    used_mib: int | None
    processes: tuple[int, ...]
    uncorrectable: int
    remap_pending: bool
    remap_failed: bool
    throttled: tuple[str, ...]
    temperature: int | None
    link_width: tuple[int, int] | None
    """PCIe lanes now and at most."""
    fabric: str | None
    """State of the NVLink fabric, on machines with an NVSwitch."""
    link_gen: tuple[int, int, int] | None = None
    """PCIe generation now, at most in this slot, and at most of this GPU."""
    state: str = ""
    """Performance state: an idle GPU may lower its PCIe generation, one in P0 may not."""
    power_watts: tuple[float, float] | None = None
    """Power limit, and the default one."""
    clock_mhz: tuple[int, int] | None = None
    """Clock that applications get, and the default one."""
    address: str = ""
    """On the PCI bus, `0000:1b:00`."""
    recovery: str | None = None
    """Recovery action of the driver: `None`, `Reset`, `Reboot`, …; drivers since 560."""


def query(timeout: float = 30) -> str | None:
    """nvidia-smi's report; None without nvidia-smi.

    Raises:
        OSError: it could not be started.
        subprocess.SubprocessError: it failed or timed out.
    """
    return nvidia.report("-q", "-x", timeout=timeout)


def parse(report: str) -> tuple[str, list[GpuState]]:
    """(driver version, GPUs) of a report. Warnings before and after it are left out.

    Raises:
        UnreadableReport: it is not complete.
    """
    begin = report.find("<nvidia_smi_log")
    end = report.rfind(_END)
    try:
        text = _UNSAFE.sub("", report[begin : end + len(_END)])
        root = ElementTree.fromstring(text)  # noqa: S314 - written by the machine's own nvidia-smi
    except ElementTree.ParseError as error:
        raise UnreadableReport(str(error)) from error
    return root.findtext("driver_version", ""), [_state(gpu) for gpu in root.iter("gpu")]


def check(gpus: list[GpuState], profile: Profile | None, own_gpus: Collection[int] | None = None) -> Iterator[Finding]:
    """Check the GPUs.

    Args:
        profile: expected GPUs; None: no expectation.
        own_gpus: numbers of the job's GPUs, which are checked one by one; None: all. Others may be in use by another
            job.
    """
    wanted = profile.gpus_per_node if profile else len(gpus)
    if len(gpus) < wanted:
        fix = "expected on a login node; otherwise drain the node, and check dmesg | grep -i xid"
        yield fail("GPUs", f"{len(gpus)} of {wanted}", fix)
    elif not gpus:
        yield ok("GPUs", "none, none expected") if profile else skip("GPUs", "none")
    else:
        yield ok("GPUs", f"{len(gpus)} × {gpus[0].name}")
    if profile and profile.gpu:
        others = sorted({gpu.name for gpu in gpus if gpu.name != profile.gpu.name})
        if others:
            yield warn("GPUs", f"{', '.join(others)}, but {profile.name} has {profile.gpu.name}", "another --cluster")
    for number, gpu in enumerate(gpus):
        if own_gpus is None or number in own_gpus:
            yield from _check_one(f"gpu {number}", gpu)


def unanswered(error: Exception) -> Finding:
    """The driver does not respond."""
    return fail("GPUs", f"nvidia-smi does not respond ({type(error).__name__})", "drain and reboot the node")


def unreadable(report: str, error: UnreadableReport, profile: Profile | None) -> Finding:
    """The driver responds, but not in a form that can be checked.

    A node whose profile has GPUs is not passed unchecked.
    """
    what = f"nvidia-smi's report of {len(report):,} characters cannot be read: {error}"
    verdict = fail if profile is not None and profile.gpus_per_node else warn
    return verdict("GPUs", what, "nvidia-smi -q -x; if its output is complete, report this as a bug of the doctor")


def damaged(report: str) -> Iterator[Finding]:
    """GPUs whose infoROM is corrupt, which nvidia-smi prints beside its report."""
    for line in report.splitlines():
        if "infoROM is corrupted" in line:
            yield warn("GPUs", line.strip(), "have the GPU checked: its ECC and row-remapping records may be lost")


def _check_one(name: str, gpu: GpuState) -> Iterator[Finding]:
    yield from _check_use(name, gpu)
    yield from _check_link(name, gpu)
    yield from _check_limits(name, gpu)
    if gpu.fabric not in (None, "Completed", "N/A"):
        yield fail(name, f"NVLink fabric: {gpu.fabric}", "restart nvidia-fabricmanager")


def _check_use(name: str, gpu: GpuState) -> Iterator[Finding]:
    """Whether it is free and sound, and not throttled."""
    if gpu.processes or (gpu.used_mib or 0) > TAKEN_MIB:
        who = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
        yield fail(
            name, f"in use: {gpu.used_mib} MiB{who}", "kill leftover processes of an earlier job, or use another node"
        )
    if gpu.uncorrectable:
        yield fail(name, f"{gpu.uncorrectable} uncorrectable memory errors", "reset the GPU; replace it if they return")
    if gpu.recovery in ("Reset", "Reboot", "Drain and Reset"):
        yield fail(name, f"the driver requests: {gpu.recovery}", "reset the GPU or reboot the node accordingly")
    if gpu.remap_failed:
        yield fail(name, "row remapping failed", "replace the GPU")
    elif gpu.remap_pending:
        yield fail(name, "row remapping is pending", "reset the GPU")
    if gpu.throttled:
        hot = f" at {gpu.temperature} °C" if gpu.temperature is not None else ""
        yield fail(
            name,
            f"throttled{hot}: {', '.join(gpu.throttled)}",
            "check cooling and power; the slowest GPU sets the pace",
        )


def _check_link(name: str, gpu: GpuState) -> Iterator[Finding]:
    if gpu.link_width and gpu.link_width[0] < gpu.link_width[1]:
        yield warn(name, f"PCIe with {gpu.link_width[0]} of {gpu.link_width[1]} lanes", "reseat the GPU")
    if gpu.link_gen:
        now, slot, device_most = gpu.link_gen
        if slot < device_most:
            yield warn(name, f"PCIe generation {slot} of {device_most}", "limited by BIOS settings, riser or slot")
        elif now < slot and gpu.state == "P0":
            yield warn(name, f"PCIe generation {now} of {slot}", "reseat the GPU; check the riser and the BIOS")


def _check_limits(name: str, gpu: GpuState) -> Iterator[Finding]:
    if gpu.power_watts and gpu.power_watts[0] < gpu.power_watts[1]:
        limit, usual = gpu.power_watts
        fix = f"nvidia-smi -pl {usual:.0f}, unless the site limits all GPUs; the slowest sets the pace"
        yield warn(name, f"power limit {limit:.0f} W of {usual:.0f}", fix)
    if gpu.clock_mhz and gpu.clock_mhz[0] < gpu.clock_mhz[1]:
        yield warn(name, f"clock limited to {gpu.clock_mhz[0]} MHz of {gpu.clock_mhz[1]}", "nvidia-smi -rac, and -rgc")


def _state(gpu: ElementTree.Element) -> GpuState:
    link = "pci/pci_gpu_link_info"
    widths = _numbers(gpu, *(f"{link}/link_widths/{name}_link_width" for name in ("current", "max")))
    gens = _numbers(gpu, *(f"{link}/pcie_gen/{name}" for name in GENERATIONS))
    clocks = _numbers(gpu, *(f"{name}applications_clocks/graphics_clock" for name in ("", "default_")))
    processes = [_number(pid.text or "") for pid in gpu.iterfind("processes/process_info/pid")]
    return GpuState(
        name=gpu.findtext("product_name", "unknown"),
        used_mib=_number(gpu.findtext("fb_memory_usage/used", "")),
        processes=tuple(process for process in processes if process is not None),
        uncorrectable=_uncorrectable(gpu),
        remap_pending=gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
        remap_failed=gpu.findtext("remapped_rows/remapped_row_failure") == "Yes",
        throttled=tuple(reason for reason in _reasons(gpu) if reason in THROTTLES),
        temperature=_number(gpu.findtext("temperature/gpu_temp", "")),
        link_width=(widths[0], widths[1]) if widths else None,
        fabric=gpu.findtext("fabric/state"),
        link_gen=(gens[0], gens[1], gens[2]) if gens else None,
        state=gpu.findtext("performance_state", ""),
        power_watts=_power(gpu),
        clock_mhz=(clocks[0], clocks[1]) if clocks else None,
        address=nvidia.pci_address(gpu.get("id", "")).partition(".")[0],
        recovery=gpu.findtext("gpu_recovery_action"),
    )


def _numbers(gpu: ElementTree.Element, *paths: str) -> list[int] | None:
    """The numbers at these paths; None: not all of them are there and positive."""
    numbers = [number for path in paths if (number := _number(gpu.findtext(path, "").rstrip("x")))]
    return numbers if len(numbers) == len(paths) else None


def _uncorrectable(gpu: ElementTree.Element) -> int:
    """Memory errors since the driver was loaded."""
    counters = gpu.iterfind("ecc_errors/volatile/*")
    errors = (each.text for each in counters if "uncorrectable" in each.tag or each.tag == "double_bit")
    return sum(_number(text or "") or 0 for text in errors)


def _reasons(gpu: ElementTree.Element) -> Iterator[str]:
    """Why the clock is lowered now."""
    for tag in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in gpu.iterfind(f"{tag}/*"):
            if reason.text == "Active":
                yield reason.tag.partition("_reason_")[2]


def _power(gpu: ElementTree.Element) -> tuple[float, float] | None:
    # Older drivers call the section power_readings, and its limit power_limit.
    for section, limit in (("gpu_power_readings", "current_power_limit"), ("power_readings", "power_limit")):
        words = [gpu.findtext(f"{section}/{name}", "").partition(" ")[0] for name in (limit, "default_power_limit")]
        if all(re.fullmatch(r"[0-9]+(\.[0-9]+)?", word) for word in words):
            return float(words[0]), float(words[1])
    return None


def _number(text: str) -> int | None:
    first = text.split(" ")[0]
    return int(first) if first.isascii() and first.isdecimal() else None


_NVLINK_GPU = re.compile(r"GPU (\d+):")
_NVLINK = re.compile(r"\s+Link (\d+): (?:(<inactive>)|[\d.]+ GB/s)")


def query_nvlink(timeout: float = 20) -> str | None:
    """nvidia-smi's report; None without nvidia-smi.

    Raises:
        OSError: it could not be started.
        subprocess.SubprocessError: it failed or timed out.
    """
    return nvidia.report("nvlink", "--status", timeout=timeout)


def parse_nvlink(report: str) -> list[tuple[int, int]]:
    """(links that are up, links) of each GPU."""
    states: dict[int, list[bool]] = {}
    gpu = -1
    for line in report.splitlines():
        if head := _NVLINK_GPU.match(line):
            gpu = int(head[1])
            states[gpu] = []
        elif (link := _NVLINK.match(line)) and gpu >= 0:
            states[gpu].append(link[2] is None)
    return [(sum(states[number]), len(states[number])) for number in sorted(states)]


def check_nvlink(
    links: Sequence[tuple[int, int]], profile: Profile | None, own_gpus: Collection[int] | None = None
) -> Iterator[Finding]:
    """Check the links.

    Args:
        profile: of a site with NVLink; on others links are only compared with each other: bridges may join some GPUs.
        own_gpus: numbers of the job's GPUs; None: all.
    """
    wanted = profile.name if profile is not None and profile.intra_node.kind == "nvlink" else None
    most = max((up for up, _ in links), default=0)
    for number, (up, number_of_links) in enumerate(links):
        if own_gpus is None or number in own_gpus:
            yield from _check_links(f"gpu {number}", up, number_of_links, most, wanted=wanted is not None)
    if wanted is not None and links and not most:
        yield fail("NVLink", f"no GPU has a link that is up, but {wanted} has NVLink", LINK_FIX)
    elif most and all(up == most == number_of_links for up, number_of_links in links):
        yield ok("NVLink", f"{most} links of each GPU are up")
    elif not links:
        yield skip("NVLink", "nvidia-smi lists no links")


LINK_FIX = "reset the GPUs, restart nvidia-fabricmanager; a link that stays down: replace GPU or bridge"


def _check_links(name: str, up: int, links: int, most: int, *, wanted: bool) -> Iterator[Finding]:
    if up < most:
        verdict = fail if wanted else warn
        yield verdict(name, f"{up} of {links} NVLinks are up, {most} on another GPU", LINK_FIX)
    elif wanted and up < links:
        yield warn(name, f"{up} of {links} NVLinks are up", LINK_FIX)


KERNEL_LOG = Path("/dev/kmsg")
LONGEST_RECORD = 8192
DAY = 86400.0
_RECORD = re.compile(r"\d+,\d+,(\d+),")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
APPLICATION = frozenset({8, 13, 31, 32, 43, 45, 68, 69, 109})
"""Errors of the program that ran, not of the GPU (NVIDIA's Xid catalogue)."""
NEEDS = {
    48: "reset the GPU: an uncorrectable memory error",
    62: "reset the GPU: its internal controller has halted",
    64: "reset the GPU, replace it if this returns: a row could not be remapped",
    74: "check the NVLinks (nvidia-smi nvlink -e), reset the GPUs; replace them if this returns",
    79: "reboot the node; if it returns, check power and seating, replace the GPU",
    95: "reset the GPU: a memory error that other programs may have seen",
    119: "reset the GPU or reboot the node: its GSP firmware does not respond",
    120: "reset the GPU or reboot the node: its GSP firmware failed",
    140: "reset the GPU: an unrecovered memory error",
    143: "reboot the node; replace the GPU if this returns: it could not be initialised",
}
"""What a GPU needs before it can be used again."""


def kernel_records(log: Path = KERNEL_LOG) -> list[str] | None:
    """Records of the kernel's log, as Documentation/ABI/testing/dev-kmsg describes them; None if it cannot be read."""
    try:
        source = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while True:
            try:
                record = os.read(source, LONGEST_RECORD)
            except BlockingIOError:
                return lines
            except BrokenPipeError:  # records were overwritten meanwhile; the next read returns the oldest one left
                continue
            except OSError:
                return lines
            if not record:
                return lines
            lines += record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(source)


def check_kernel_log(log: Sequence[str] | None, now: float, fine: Collection[str] = ()) -> Iterator[Finding]:
    """Find Xid messages; those of programs are left out, and old ones do not fail a node that may have been reset.

    Args:
        now: seconds since the machine started.
        fine: addresses of GPUs whose errors do not fail the node: the driver says that they need nothing, or
            they belong to another job.
    """
    if log is None:
        yield skip("kernel log", "cannot be read: root only (kernel.dmesg_restrict), or a container")
        return
    seen: dict[tuple[str, int], tuple[float, str, int]] = {}
    for line in log:
        message = _XID.search(line)
        stamp = _RECORD.match(line)
        if message and int(message[2]) not in APPLICATION:
            at = int(stamp[1]) / 1e6 if stamp else now
            key = (message[1], int(message[2]))
            seen[key] = (at, message[3] or "", seen[key][2] + 1 if key in seen else 1)
    for (gpu, xid), (at, text, times) in seen.items():
        age = max(0.0, now - at)
        what = f"Xid {xid} on {gpu}, {times} times, last {_ago(age)} ago" + (f": {text}" if text else "")
        verdict = fail if xid in NEEDS and age < DAY and gpu.lower() not in fine else warn
        yield verdict("kernel log", what, NEEDS.get(xid, "look up the number in NVIDIA's Xid catalog"))
    if not seen:
        yield ok("kernel log", "no Xid errors")


def _ago(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days"
