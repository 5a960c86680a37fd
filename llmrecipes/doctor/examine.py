"""All checks of one node, in order, and those of its packages and directories. Nothing heavy is imported."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.doctor import ethernet, fabric, gpus, nodes
from llmrecipes.doctor.check_result import Finding, fail, ok, skip, warn
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware import builds, nics
from llmrecipes.hardware.builds import ASYNC_IO, CPU_ADAM, operator_obstacle
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB, MIB

ROOT = Path(__file__).parents[2]
BYTES_A_PARAMETER = 14
"""Of a checkpoint: bf16 weights, fp32 weights and two fp32 moments."""


@dataclass(frozen=True)
class DoctorContext:
    """What to examine.

    Args:
        profile: expected hardware; None: no expectation.
        recipe: checks its data and checkpoint size; None: neither.
        several: whether the run spans several nodes.
        leads: whether this node measures shared resources; thousands writing at once would measure each other.
        own_gpus: numbers of the job's GPUs on a shared node; None: all.
    """

    profile: Profile | None
    recipe: Recipe | None
    runs_dir: Path
    data_dir: Path
    port: int
    several: bool
    leads: bool
    own_gpus: frozenset[int] | None = None

    @property
    def parameters(self) -> int:
        """How many the model has; 0 without a recipe."""
        return 0 if self.recipe is None else count(self.recipe.model, shape(self.recipe.model)).total


def examine(subject: DoctorContext) -> list[Finding]:
    """Check this node; leaves nothing behind, and imports nothing heavy."""
    return [replace(finding, node=socket.gethostname()) for finding in _findings(subject)]


def _asked(profile: Profile | None) -> tuple[str | None, list[gpus.GpuState] | None, list[Finding]]:
    """Driver and GPUs, None if they are not known, and what is wrong with nvidia-smi's report."""
    try:
        report = gpus.query()
    except (OSError, subprocess.SubprocessError) as error:
        return None, None, [gpus.unanswered(error)]
    if report is None:
        return None, [], []
    try:
        return *gpus.parse(report), list(gpus.damaged(report))
    except gpus.UnreadableReport as error:
        return None, None, [gpus.unreadable(report, error, profile)]


def _findings(subject: DoctorContext) -> Iterator[Finding]:
    driver, known, about_report = _asked(subject.profile)
    yield from about_report
    if known is not None:
        yield from gpus.check(known, subject.profile, subject.own_gpus)
    if states := known or []:
        yield from _nvlinks(subject.profile, subject.own_gpus)
        of_job = [
            state for number, state in enumerate(states) if subject.own_gpus is None or number in subject.own_gpus
        ]
        fine = {state.address for state in states if state not in of_job or state.recovery == "None"}
        yield from gpus.check_kernel_log(gpus.kernel_records(), time.clock_gettime(time.CLOCK_MONOTONIC), fine)
    pins = locked(ROOT / "requirements" / "lock.txt")
    packages = installed()
    yield from check_versions(packages, driver, len(states), pins, builds.cuda_version())
    yield from check_zero(packages.get("deepspeed"), subject.recipe)
    yield nodes.inventory(packages, driver)
    ports = nics.ports()
    yield from fabric.check(ports, subject.profile, os.environ)
    yield from fabric.check_roce(ports, subject.profile, os.environ)
    yield from fabric.check_gpudirect(fabric.support(), subject.profile)
    if ports and states:
        yield from fabric.access_control()
    ranks = len(states) or (subject.profile.gpus_per_node if subject.profile else 0)
    yield from fabric.check_limits(fabric.read_limits(), subject.profile, ranks)
    chosen = {name: str(value) for name, value in (subject.profile.environment if subject.profile else {}).items()}
    environment = {**chosen, **os.environ}
    yield from fabric.check_network(subject.port, subject.several, environment)
    addressed = ethernet.addressed()
    yield from ethernet.check_ethernet(subject.profile, subject.several, environment, addressed)
    yield from check_directory(subject.runs_dir, "runs", BYTES_A_PARAMETER * subject.parameters, measured=subject.leads)
    yield from check_directory(subject.data_dir, "data")
    if subject.several and (kind := _temporary(subject.runs_dir)):
        fix = "--runs-dir on a file system that all nodes mount"
        yield fail("runs", f"{subject.runs_dir} is on {kind}, which is not visible to other nodes", fix)
    if subject.recipe is not None:
        yield from check_data(subject.recipe, subject.data_dir)


def _nvlinks(profile: Profile | None, own_gpus: frozenset[int] | None) -> Iterator[Finding]:
    try:
        report = gpus.query_nvlink()
    except (OSError, subprocess.SubprocessError) as error:
        yield skip("NVLink", f"nvidia-smi nvlink: {type(error).__name__}")
    else:
        yield from gpus.check_nvlink(gpus.parse_nvlink(report or ""), profile, own_gpus)


PACKAGES = ("torch", "megatron-core", "transformer-engine", "deepspeed", "numpy", "datasets", "mlflow")
MEGATRON = "0.19"
"""megatron-core release that the test suite covers."""
DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest Linux driver by CUDA major version (CUDA compatibility guide, minor version compatibility)."""


def installed() -> dict[str, str]:
    """Versions of the relevant packages that are installed, by name."""
    versions = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in PACKAGES or name.startswith(("nvidia-nccl", "nvidia-cuda-runtime", "transformer-engine")):
            versions[name] = distribution.version
    return versions


def check_versions(
    versions: Mapping[str, str],
    driver: str | None,
    gpus: int,
    locked: Mapping[str, str],
    cuda: str | None,
) -> Iterator[Finding]:
    """Find incompatible versions.

    Args:
        driver: GPU driver version according to nvidia-smi; None without one.
        gpus: number of GPUs of this machine.
        locked: pinned versions; empty without a lock file.
        cuda: `torch.version.cuda`; None for a build without CUDA.
    """
    for name in ("torch", "megatron-core"):
        if name not in versions:
            yield fail(f"version of {name}", "not installed", "make setup")
    if "megatron-core" in versions:
        yield _megatron(versions["megatron-core"])
    if "torch" in versions:
        yield from _torch(versions["torch"], cuda, driver, gpus)
    yield from _transformer_engine(versions)
    nccl = {name: version for name, version in versions.items() if name.startswith("nvidia-nccl")}
    if len(nccl) > 1:
        both = ", ".join(f"{name} {version}" for name, version in sorted(nccl.items()))
        yield fail("version of NCCL", f"several packages provide it: {both}", "keep the one that torch requires")
    other = [
        f"{name} {versions[name]} (lock {wanted})"
        for name, wanted in sorted(locked.items())
        if name in versions and _public(versions[name]) != _public(wanted)
    ]
    if other:
        fix = "make setup; expected in a container with its own torch"
        yield warn("lock file", f"versions differ from the tested ones: {', '.join(other)}", fix)


def locked(requirements: Path) -> dict[str, str]:
    """Versions that a lock file pins for the relevant packages."""
    if not requirements.is_file():
        return {}
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", requirements.read_text("utf-8"), re.MULTILINE)
    return {name.lower(): version for name, version in pins if name.lower() in PACKAGES}


def _megatron(version: str) -> Finding:
    if version.startswith(f"{MEGATRON}."):
        return ok("version of megatron-core", version)
    what = f"{version}, tested with {MEGATRON}"
    return warn("version of megatron-core", what, f"pip install 'megatron-core~={MEGATRON}.0', or make setup")


def _torch(version: str, cuda: str | None, driver: str | None, gpus: int) -> Iterator[Finding]:
    if gpus and cuda is None:
        yield fail("version of torch", f"{version} is a CPU build on a node with {gpus} GPUs", "make setup TORCH=cuda")
        return
    if not gpus or cuda is None:
        yield ok("version of torch", version)
        return
    present, wanted = (re.match(r"(\d+)(?:\.(\d+))?", text or "") for text in (driver, cuda))
    oldest = DRIVER.get(int(wanted[1])) if wanted else None
    if present is None or oldest is None:
        yield skip("CUDA driver", f"driver {driver or 'unknown'}, torch {version} for CUDA {cuda}")
        return
    if (int(present[1]), int(present[2] or 0)) < oldest:
        what = f"driver {driver} is too old for CUDA {cuda} of torch {version} ({oldest[0]}.{oldest[1]} required)"
        yield fail("CUDA driver", what, f"a driver >= {oldest[0]}.{oldest[1]}, or a torch build for an older CUDA")
    else:
        yield ok("CUDA driver", f"{driver}, torch {version} for CUDA {cuda}")


def _transformer_engine(versions: Mapping[str, str]) -> Iterator[Finding]:
    parts = {name: version for name, version in versions.items() if name.startswith("transformer-engine")}
    if len(set(parts.values())) > 1:
        what = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
        yield fail(
            "version of TransformerEngine",
            f"its packages differ: {what}",
            "install the same version of all its packages",
        )


def _public(version: str) -> str:
    return version.partition("+")[0]


OPERATORS = {
    CPU_ADAM: "offload of the optimizer",
    ASYNC_IO: "offload to NVMe",
}


def check_zero(version: str | None, recipe: Recipe | None) -> Iterator[Finding]:
    """Check DeepSpeed and its operators.

    Args:
        version: of DeepSpeed; None if it is not installed.
        recipe: fails if its engine cannot run on this machine; None: nothing is required.
    """
    if version is None:
        yield skip("zero", "deepspeed is not installed; make setup-zero installs it")
    else:
        yield ok("zero", f"deepspeed {version}")
        for operator, purpose in OPERATORS.items():
            problem = operator_obstacle(operator)
            if problem is None:
                yield ok(f"zero {operator}", f"can be compiled or loaded, for {purpose}")
            else:
                yield warn(f"zero {operator}", f"no {purpose}: {problem.what}", problem.fix)
    if recipe is not None:
        try:
            require_packages(recipe)
        except UserError as error:
            yield fail("zero", f"recipe {recipe.name}: {error.where}: {error.what}", error.fix)


TRIED_BYTES = 64 * MIB
FILES, FILES_SECONDS = 100, 2.0
"""Small files that are written and removed, and the time above which metadata slow down checkpoints of many ranks."""
FULL = 0.95
"""Used share above which shared file systems become slow."""
SLOW = 100e6
"""Bytes per second below which checkpoints and logs slow training down."""
CHECKPOINTS = 3
"""Checkpoints that have to fit: those kept by default, and the one being written."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs")
_OCTAL = re.compile(r"\\([0-7]{3})")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")


def check_directory(
    directory: Path, name: str, checkpoint_bytes: int = 0, *, measured: bool = False
) -> Iterator[Finding]:
    """Check a directory that a run writes to. Test files are removed again.

    Args:
        directory: `runs` or `data`; it may not exist yet.
        name: its name in findings.
        checkpoint_bytes: size of one checkpoint; 0 if none are written.
        measured: whether to time a write of 64 MiB.
    """
    try:
        existing = _existing(directory)
    except OSError as error:
        yield fail(name, f"{error.filename}: {error.strerror}", "mount it again, or fix its permissions")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as folder:
            yield from _operations(Path(folder), name)
            if measured:
                yield _speed(Path(folder), name)
                yield from _metadata(Path(folder), name)
    except OSError as error:
        yield fail(
            name, f"{existing} is not writable: {error.strerror}", "use another directory, or fix its permissions"
        )
        return
    disk = shutil.disk_usage(existing)
    free = disk.free
    needed = CHECKPOINTS * checkpoint_bytes
    if free < max(needed, GIB):
        what = f"{free / GIB:.1f} GiB free in {existing}"
        what += f", but {CHECKPOINTS} checkpoints need {needed / GIB:.1f}" if needed else ""
        yield fail(name, what, "free some space, or use another directory")
    elif disk.used > FULL * disk.total and _file_system(existing) in SHARED:
        what = f"{existing} is {disk.used / disk.total:.0%} full, {free / GIB:,.0f} GiB free, {_file_system(existing)}"
        yield warn(name, what, "free some space: Lustre and GPFS are slow when nearly full")
    else:
        yield ok(name, f"{existing}: {free / GIB:,.0f} GiB free, {_file_system(existing)}")
    if os.statvfs(existing).f_files and os.statvfs(existing).f_favail < 1000:
        yield fail(
            name, f"{os.statvfs(existing).f_favail} free inodes in {existing}", "delete files, or use another directory"
        )


def _temporary(directory: Path) -> str | None:
    """Type of a file system that is local and lost at a restart; None for others."""
    kind = _file_system(directory)
    return kind if kind in MEMORY_FILE_SYSTEMS else None


def _operations(folder: Path, name: str) -> Iterator[Finding]:
    """Check directory rename, which publishes checkpoints, and file replacement."""
    old = folder / "old"
    new = folder / "new"
    new.mkdir()
    (new / "part").write_text("x", "ascii")
    try:
        new.rename(old)
        (old / "next").write_text("y", "ascii")
        (old / "next").replace(old / "part")
        complete = (old / "part").read_text("ascii") == "y" and not new.exists()
    except OSError as error:
        yield fail(
            name, f"rename fails: {error.strerror}", "use a file system with atomic rename (NFS, Lustre, GPFS, local)"
        )
        return
    if not complete:
        yield fail(name, "rename is not atomic", "use a file system with atomic rename (NFS, Lustre, GPFS, local)")


def _speed(folder: Path, name: str) -> Finding:
    data = os.urandom(MIB)  # incompressible
    started = time.monotonic()
    with (folder / "tried").open("wb") as file:
        for _ in range(TRIED_BYTES // MIB):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    speed = TRIED_BYTES / (time.monotonic() - started)
    if speed < SLOW:
        return warn(f"{name} speed", f"writes {speed / 1e6:.0f} MB/s", "use a faster file system, or save less often")
    return ok(f"{name} speed", f"writes {speed / 1e6:,.0f} MB/s")


def _metadata(folder: Path, name: str) -> Iterator[Finding]:
    started = time.monotonic()
    for number in range(FILES):
        (folder / f"{number}").write_text("x", "ascii")
    for number in range(FILES):
        (folder / f"{number}").unlink()
    seconds = time.monotonic() - started
    if seconds > FILES_SECONDS:
        what = f"{FILES} small files take {seconds:.1f} s"
        yield warn(
            f"{name} files", what, "check for a busy metadata server: other jobs, or a folder with millions of files"
        )


def _existing(directory: Path) -> Path:
    """The directory, or the nearest above it that there is.

    Raises:
        OSError: it exists, but is a stale handle of a server, or this user may not look.
    """
    for folder in (directory, *directory.absolute().parents):
        try:
            if stat.S_ISDIR(folder.stat().st_mode):
                return folder
        except (FileNotFoundError, NotADirectoryError):
            continue
    return Path("/")


def _file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    try:
        lines = [line.split() for line in mounts.read_text("utf-8", "surrogateescape").splitlines()]
    except OSError:
        return "unknown"
    folder = path.resolve()
    # The kernel writes spaces and backslashes as \040 and \134.
    points = [(Path(_OCTAL.sub(lambda each: chr(int(each[1], 8)), line[1])), line[2]) for line in lines if line[2:]]
    under = [(len(point.parts), kind) for point, kind in points if folder.is_relative_to(point)]
    return max(under, default=(0, "unknown"))[1]


UNEQUAL = 10
"""A file this many times larger than the median keeps one process busy after the others have finished."""


def check_data(recipe: Recipe, data_dir: Path) -> Iterator[Finding]:
    """Check the prepared data, or its sources if it is not prepared."""
    from llmrecipes.data.folder.prepared import TOKENIZER, fingerprint, open_prepared

    if (data_dir / fingerprint(recipe)).is_dir():
        try:
            prepared = open_prepared(recipe, data_dir)
            prepared.tokenizer()
        except UserError as error:
            yield fail(
                "data",
                str(error).splitlines()[0].removeprefix("error: "),
                "delete that folder, then llmrecipes prepare",
            )
            return
        counts = prepared.manifest.counts("train")
        yield ok("data", f"{prepared.path}: {counts.tokens:,} training tokens, {TOKENIZER}")
        return
    yield warn(
        "data",
        f"recipe {recipe.name} is not prepared in {data_dir}",
        command_line("prepare", recipe.name, data_dir=data_dir),
    )
    yield from _sources(recipe)


def _sources(recipe: Recipe) -> Iterator[Finding]:
    from llmrecipes.data.sources.sources import files, label, size_of

    for source in recipe.data.sources:
        check_name = f"source {label(source)}"
        if source.type == "hub":
            yield warn(check_name, "is on the Hugging Face Hub", "llmrecipes prepare on a node with internet access")
            continue
        try:
            sizes = [size_of(file) for file in files(source)]
        except (UserError, OSError) as error:
            yield fail(check_name, str(error).splitlines()[0].removeprefix("error: "), "data.sources in the recipe")
            continue
        middle = statistics.median(sizes)
        if source.type in ("jsonl", "parquet") and len(sizes) > 1 and max(sizes) > UNEQUAL * max(middle, 1):
            what = f"the largest of {len(sizes)} files has {max(sizes) / max(middle, 1):.0f} times the median size"
            yield warn(check_name, what, "split it into files of equal size")
        else:
            yield ok(check_name, f"{len(sizes)} files, {sum(sizes) / MIB:,.1f} MiB")
    tokenizer = recipe.data.tokenizer
    if tokenizer.type == "huggingface" and "/" in tokenizer.path and not Path(tokenizer.path).exists():
        yield warn(
            "tokenizer", f"{tokenizer.path} is not a directory on this node", "a directory, or a node with Hub access"
        )
