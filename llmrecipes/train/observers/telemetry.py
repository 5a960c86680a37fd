"""What every rank and node did, put together on the first rank.

Each rank has a row of numbers. Every report interval all rows are summed, each rank's in its place of a table of zeros:
an all-reduce, whose steps grow with the logarithm of the ranks, where a gather in a ring would take one for each rank.
It begins after a step and is read after the next one, when the device has passed it: the host does not wait for it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from llmrecipes.console import console
from llmrecipes.engine.base import Platform, World
from llmrecipes.faults.stragglers import Straggler, StragglerWatch
from llmrecipes.hardware import process
from llmrecipes.plan.derive import Plan
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import ENERGY, Note, is_measured
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.tracking.spread import spread
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.observers.node_monitor import COLUMNS, GAUGES, NodeReadings, monitored
from llmrecipes.train.observers.waits import waits_counted

logger = logging.getLogger(__name__)

TIMES = ("data_seconds", "compute_seconds", "communication_seconds")
"""Of a step, mean; they add up to it."""
BLOCKED = {"save_seconds": "save", "evaluate_seconds": "evaluate"}
"""Phases between steps, whose seconds are added up."""
MEMORY = ("memory_allocated_bytes", "memory_reserved_bytes", "memory_resident_bytes")
OWN = "own_seconds"
"""Own time of the median step; not reported as such."""
RANK_COLUMNS = (*TIMES, *BLOCKED, *MEMORY, OWN)
NAME_BYTES = 64
"""Of a node's name; Linux has no longer ones."""
SETTLING_STEPS = 2
"""First steps of a start, which compile, connect and allocate."""
LEAST_STEPS = 5
"""On a CPU, whose cores other processes use too, ranks are compared by no fewer."""
BAD_NODES = "LLMRECIPES_BAD_NODES"
"""Environment variable with the file of the nodes that a Slurm job leaves out when it is requeued."""
NODES_TO_SPARE = "LLMRECIPES_NODES_TO_SPARE"
"""Environment variable with how many nodes such a job could leave out when it started; unset: unknown."""
LAST_SAMPLE_SECONDS = 1.0
"""That the end of a start waits for a sample of its nodes, at most; it takes a millisecond."""
METERS = {"nvml": "gpu_joules", "rapl": "cpu_joules", "codecarbon": "codecarbon_joules"}
"""Columns of nodes with joules, by how they are known."""
XID = "https://docs.nvidia.com/deploy/xid-errors"


@dataclass
class _MeasuredSteps:
    """What this rank measured since its last row."""

    data: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Means of a step, and the median of its own time."""
        if not self.own:
            return {}
        mean = {
            name: sum(each) / len(each) for name, each in zip(TIMES, (self.data, self.own, self.waited), strict=True)
        }
        return mean | {OWN: median(self.own)}


class Telemetry(Observer):
    """The numbers of all ranks and nodes in a step's record, alarms of them, and the energy that a run has used."""

    notes: Sequence[Note] = ()
    """Alarms of the last step."""

    def begin(self) -> None:
        """Measure this rank, and on the first rank of a node the node; a collective of all ranks."""
        loop = self.loop
        spec = self.joined.spec
        tracking = loop.plan.recipe.tracking
        self._on_gpu = on_gpu = loop.engine.platform.name == "cuda"
        self._clock = self.stack.enter_context(waits_counted(on_gpu=on_gpu))
        self._readings: NodeReadings | None = None
        if tracking.system_metrics_interval is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            self._readings = self.stack.enter_context(monitored(spec.run_dir, model=tracking.energy_model))
        self._phase, self._since = "", time.perf_counter()
        self._phases: dict[str, float] = {}
        self._reported_phases: dict[str, float] = {}
        self._data_before = 0.0
        self._steps = _MeasuredSteps()
        self._step_number = 0
        self._pending: dist.Work | None = None
        size = loop.world.size, len(RANK_COLUMNS) + len(COLUMNS)
        self._row = torch.zeros(size[1], dtype=torch.float32, pin_memory=on_gpu)
        self._table = torch.zeros(size, dtype=torch.float32, device=loop.engine.platform.device)
        self._read = torch.zeros(size, dtype=torch.float32, pin_memory=True) if on_gpu else self._table
        self._names = node_names(loop.engine.platform, loop.world)
        self._stragglers = straggler_watch(loop.plan)
        self._kept: set[str] = set()
        self.energy = loop.tracker.energy if isinstance(loop.tracker, RunTracker) else Energy()
        self._energy_step: int | None = None
        self._energy_at = time.monotonic()
        self._is_measured = False

    def beat(self, phase: str, step: int | None = None) -> None:
        """The phase before is measured."""
        now = time.perf_counter()
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._since
        self._phase = phase
        self._since = now
        if phase == "step" and step is not None:
            self._step_number += 1
            self._data_before = self._phases.get("data", 0.0)
            self._clock.take()
            self._clock.counting = not self._on_gpu or is_measured(step + 1, self.loop.plan.recipe)

    def fields(self, step: int, seconds: float) -> dict[str, Any]:
        """Count a step; a collective of all ranks before each measured step (`events.is_measured`).

        Returns:
            What the ranks did up to the step before, on the first rank at a measured step.
        """
        if self._clock.counting and self._step_number > SETTLING_STEPS:
            data = self._phases.get("data", 0.0) - self._data_before
            waited = self._clock.take()
            self._steps.data.append(data)
            self._steps.waited.append(waited)
            self._steps.own.append(max(0.0, seconds - data - waited))
        if self._energy_step is None:
            self._energy_step = step
        report = self._receive(step)
        if is_measured(step + 1, self.loop.plan.recipe):
            self._send()
        return report

    def after_step(self, done: StepDone) -> None:
        """Note the alarms."""
        for note in self.notes:
            logger.warning("ALARM: step %d: %s", note.step, note.details["text"])
            self.loop.tracker.note(note)

    def end(self) -> None:
        """Take part in what was begun, and add up the energy of the last steps; a collective of all ranks."""
        step = self.loop.progress.step
        self._receive(step + 1, ended=True)
        if self._readings is not None:
            self._readings.refresh(LAST_SAMPLE_SECONDS)
        self._send()
        self._receive(step + 1, ended=True)
        self._has_used = bool(self.loop.losses and self.energy.joules)
        if self._has_used:
            details = self.energy.details(self.loop.progress.consumed_tokens)
            self.loop.tracker.note(Note(step=step, event=ENERGY, details=details))

    def lines(self) -> None:
        """Print what was used."""
        if self._has_used:
            console().print(self.energy.line(self.loop.progress.consumed_tokens), markup=False)

    def _send(self) -> None:
        values = dict.fromkeys((*RANK_COLUMNS, *COLUMNS), float("nan")) | self._steps.row() | self._memory()
        if not self._on_gpu and len(self._steps.own) < LEAST_STEPS:
            values[OWN] = float("nan")
        if self._readings is not None:
            values |= self._readings.take()
        for name, phase in BLOCKED.items():
            values[name] = self._phases.get(phase, 0.0) - self._reported_phases.get(phase, 0.0)
        self._reported_phases, self._steps = dict(self._phases), _MeasuredSteps()
        self._row.copy_(torch.tensor(list(values.values())))
        self._table.zero_()
        self._table[self.loop.world.rank].copy_(self._row, non_blocking=True)
        self._pending = dist.all_reduce(self._table, async_op=True)
        if self._on_gpu:
            # Only the stream waits. The copy is behind the device before it begins the next step.
            self._wait(self._pending)
            if self.loop.world.is_first:
                self._read.copy_(self._table, non_blocking=True)

    def _receive(self, step: int, *, ended: bool = False) -> dict[str, Any]:
        self.notes = ()
        if self._pending is None:
            return {}
        self._wait(self._pending)
        self._pending = None
        if not self.loop.world.is_first:
            return {}
        if self._on_gpu and ended:
            torch.cuda.synchronize(self.loop.engine.platform.device)
        return self._report(step, self._read.numpy().astype(np.float64), ended=ended)

    def _wait(self, work: dist.Work) -> None:
        counting = self._clock.counting
        self._clock.counting = False
        work.wait()
        self._clock.counting = counting

    def _report(self, step: int, table: NDArray[np.float64], *, ended: bool) -> dict[str, Any]:
        columns = dict(zip(RANK_COLUMNS, table[:, : len(RANK_COLUMNS)].T, strict=True))
        own = columns.pop(OWN)
        notes: list[Note] = []
        if self._stragglers is not None and not np.isnan(own).any():
            columns["slowness"], slow = self._stragglers.add(own)
            notes = [self._straggler(step, straggler) for straggler in slow]
            if (left_out := self._left_out(step)) is not None:
                notes.append(left_out)
        ranks = {name: each for name, values in columns.items() if (each := spread(values, "rank"))}
        of_nodes = dict(zip(COLUMNS, table[:, len(RANK_COLUMNS) :].T, strict=True))
        notes += self._xids(step, of_nodes)
        shown = (*GAUGES, "infiniband_errors")
        nodes = {name: each for name in shown if (each := spread(of_nodes[name], "node", self._names))}
        self.notes = notes
        return {"ranks": ranks, "nodes": nodes or None, "energy": self._used(step, of_nodes, ended=ended)}

    def _used(self, step: int, of_nodes: dict[str, NDArray[np.float64]], *, ended: bool) -> dict[str, Any] | None:
        """Energy of all nodes since the last record of it; None: there is nothing new, or no way to know it."""
        meters = {name: of_nodes[column] for name, column in METERS.items() if not np.isnan(of_nodes[column]).all()}
        self._is_measured = self._is_measured or bool(meters)
        if self._is_measured:
            joules = {name: float(np.nansum(values)) for name, values in meters.items()}
        elif ended or self._readings is None or not np.isnan(of_nodes["memory_use"]).all():  # not before a first sample
            joules = {"profile": self._estimated()}
        else:
            joules = {}
        total = sum(joules.values())
        if not total or self._energy_step is None:
            return None
        batches = self.loop.plan.batches
        tokens = (batches.samples(step) - batches.samples(self._energy_step)) * self.loop.plan.recipe.model.seq_length
        self._energy_step = step
        self.energy = self.energy.plus(total, [name for name, value in joules.items() if value], self.joined.spec.costs)
        unmetered = [np.isnan(values) for values in meters.values()]
        missing = int(np.logical_and.reduce([~np.isnan(of_nodes["memory_use"]), *unmetered]).sum()) if meters else 0
        incomplete = {"nodes_missing": missing} if missing else {}
        return {"joules": total, "tokens_per_joule": tokens / total, **incomplete, **self.energy.values()}

    def _estimated(self) -> float:
        """Joules of all ranks since the last time, by the cluster profile; 0 without one."""
        if self.joined.spec.costs is None or self.joined.spec.costs.watts_per_gpu is None:
            return 0.0
        before = self._energy_at
        self._energy_at = time.monotonic()
        return (self._energy_at - before) * self.joined.spec.costs.watts_per_gpu * self.loop.world.size

    def _xids(self, step: int, of_nodes: dict[str, NDArray[np.float64]]) -> list[Note]:
        notes = []
        for rank in np.flatnonzero(of_nodes["xid_count"] > 0):
            node = self._names[rank]
            code = int(of_nodes["xid_code"][rank])
            text = f"a GPU of {node} reported Xid {code}: {XID}"
            details = {"node": node, "code": code, "text": text}
            notes.append(Note(step=step, event="xid", details=details, alarm=True))
        return notes

    def _straggler(self, step: int, straggler: Straggler) -> Note:
        node = self._names[straggler.rank]
        text = f"rank {straggler.rank} on {node} takes {straggler.factor:.2f} times as long for its own work as others"
        details = {
            "rank": straggler.rank,
            "node": node,
            "factor": round(straggler.factor, 3),
            "compute_seconds": straggler.seconds,
            "usual_seconds": straggler.usual,
            "text": text,
        }
        return Note(step=step, event="straggler", details=details, alarm=True)

    def _left_out(self, step: int) -> Note | None:
        """Have the nodes of lasting stragglers left out, where several nodes and a job that can do so run this."""
        reports = self.loop.plan.recipe.faults.straggler_exclude_reports
        path = os.environ.get(BAD_NODES)
        if reports is None or not path or self._stragglers is None or self.loop.stop.requested:
            return None
        nodes = sorted({self._names[rank] for rank in self._stragglers.slow_for(reports)})
        if not nodes or len(nodes) == len(set(self._names)):  # none, or the only one
            return None
        to_spare = os.environ.get(NODES_TO_SPARE, "")
        if to_spare.isdecimal() and len(nodes) > int(to_spare):
            if self._kept.issuperset(nodes):
                return None
            self._kept.update(nodes)
            text = (
                f"{', '.join(nodes)}: slow in {reports} reports in a row; not left out, because the job can spare "
                f"only {to_spare} of its nodes"
            )
            return Note(step=step, event="straggler_kept", details={"nodes": nodes, "text": text}, alarm=True)
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{int(time.time())} {node}\n" for node in nodes)
        self.loop.stop.signal = signal.SIGTERM
        text = f"slow in {reports} reports in a row; the job saves and continues without {', '.join(nodes)}"
        return Note(step=step, event="straggler_left_out", details={"nodes": nodes, "text": text}, alarm=True)

    def _memory(self) -> dict[str, float]:
        resident = process.peak_memory()
        if not self._on_gpu:
            return {"memory_resident_bytes": float(resident)}
        device = self.loop.engine.platform.device
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        return dict(zip(MEMORY, map(float, (allocated, reserved, resident)), strict=True))


def straggler_watch(plan: Plan) -> StragglerWatch | None:
    """What judges the reports; None: nothing does."""
    threshold = plan.recipe.faults.straggler_threshold
    return None if threshold is None else StragglerWatch(threshold, stage_work(plan))


def stage_work(plan: Plan) -> tuple[float, ...]:
    """Matrix products of each pipeline stage, for comparing stages of a single rank."""
    layout = plan.layout
    output = 6.0 * plan.shape.hidden_size * plan.shape.vocab_size
    layers = sum(map(sum, layout.layers_per_stage))
    a_layer = max(plan.flops_per_token_full - output, 1.0) / max(layers, 1)
    work = [a_layer * sum(chunks) for chunks in layout.layers_per_stage]
    work[-1] += output
    return tuple(work)


def node_names(platform: Platform, world: World) -> list[str]:
    """The node of each rank, as its scheduler names it; a collective of all ranks. 1 MiB at 16,384 ranks, once."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    letters = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    table = torch.zeros(world.size, NAME_BYTES, dtype=torch.uint8)
    table[world.rank] = torch.frombuffer(bytearray(letters), dtype=torch.uint8)
    table = table.to(platform.device)
    dist.all_reduce(table)
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in table.cpu().numpy()]
