"""Going back from a spike: to which checkpoint, without which samples, and how often.

`rewinds.json` has every time that a run went back. It is written before a newer checkpoint is deleted, and again after
the last one: the next start of a run that is killed in between deletes the rest, and leaves the samples out too.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.data.read.batches import Ranges
from llmrecipes.engine.base import Progress, Rank
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import StepSpike
from llmrecipes.io import write_atomic
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import Note
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.untrusted import RECORD, read_json

logger = logging.getLogger(__name__)


class Rewind(Exception):
    """The loop goes back to a checkpoint; raised on every rank."""

    def __init__(self, entry: Entry, skipped: Ranges, note: Note) -> None:
        super().__init__(note.event)
        self.entry = entry
        self.skipped = skipped
        self.note = note


@dataclass(frozen=True)
class Rewinds:
    """The decisions of a run to go back. All ranks call its methods, and the first one decides."""

    recipe: Recipe
    files: RunFiles
    store: CheckpointStore
    rank: Rank

    def skipped(self) -> Ranges:
        """Samples that earlier decisions leave out."""
        return _ranges(of_first_rank(self._read() if self.rank.is_first else []))

    def finish(self) -> tuple[Note, ...]:
        """Delete the checkpoints that a start was killed before it had deleted; before one is chosen.

        Returns:
            What that start did not note; on the first rank.
        """
        records = self._read() if self.rank.is_first else []
        if not records or records[-1].get("deleted", True):
            return ()
        self._delete(records)
        return (_note(records[-1]),)

    def require(self, spike: StepSpike, progress: Progress, began: int) -> None:
        """Go back, if there is a checkpoint that is old enough.

        Args:
            spike: spike of the step.
            progress: after it.
            began: first sample of its batch.

        Raises:
            Rewind: the checkpoint is chosen, and newer ones are deleted.
            UserError: the run has gone back `loss_spike_max_rewinds` times; with `ExitCode.STOP`.
        """
        chosen = of_first_rank(self._chosen(spike, progress, began) if self.rank.is_first else None)
        if isinstance(chosen, str):
            raise UserError(
                f"{spike.quantity} {spike.value:.4f} in step {progress.step} (usual {spike.usual:.4f}, limit "
                f"{spike.limit:.4f}), after {chosen} rewinds",
                where="faults.loss_spike_max_rewinds",
                rule="a run goes back at most faults.loss_spike_max_rewinds times",
                fix="lower optimizer.lr or optimizer.clip_grad, or check the data; rewinds.json lists the samples",
                code=ExitCode.STOP,
            )
        if chosen is not None:
            entry, records = chosen
            raise Rewind(entry, _ranges(records), _note(records[-1]))

    def _chosen(
        self, spike: StepSpike, progress: Progress, began: int
    ) -> tuple[Entry, list[dict[str, Any]]] | str | None:
        faults = self.recipe.faults
        batch = self.recipe.train.global_batch_size
        records = self._read()
        if len(records) >= faults.loss_spike_max_rewinds:
            return str(len(records))
        old = [entry for entry in self.store.entries() if entry.step <= progress.step - faults.loss_spike_rewind_steps]
        if not old:
            return None
        first = max(0, began - (faults.loss_spike_rewind_steps - 1) * batch)
        record = {"step": progress.step, "to_step": old[-1].step, "samples": [first, began + batch], **asdict(spike)}
        records.append({**record, "deleted": False})
        self._write(records)
        self._delete(records)
        return old[-1], records

    def _delete(self, records: list[dict[str, Any]]) -> None:
        to_step = int(records[-1]["to_step"])
        for step in self.store.withdraw(to_step):
            logger.warning("the checkpoint of step %d is deleted: the run goes back to step %d", step, to_step)
        records[-1]["deleted"] = True
        self._write(records)

    def _write(self, records: list[dict[str, Any]]) -> None:
        write_atomic(self.files.rewinds, json.dumps(records, indent=1) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        try:
            records = read_json(self.files.rewinds, root=self.files.path, most=RECORD)
            _ranges(records)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"cannot be read: {error}",
                where=str(self.files.rewinds),
                rule="it lists the samples that the run skips after going back from a spike",
                fix="restore it from a backup; without it, the run would train on these samples again",
                code=ExitCode.STOP,
            ) from error
        return list(records)


def merged(one: Ranges, other: Ranges) -> tuple[tuple[int, int], ...]:
    """The samples of both, as few ranges in order."""
    ranges: list[tuple[int, int]] = []
    for first, end in sorted({(first, end) for first, end in (*one, *other)}):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((first, end))
    return tuple(ranges)


def _note(record: dict[str, Any]) -> Note:
    details = {name: value for name, value in record.items() if name != "deleted"}
    return Note(step=int(record["to_step"]), event="rewound", details=details, alarm=True)


def _ranges(records: list[dict[str, Any]]) -> Ranges:
    return tuple((int(record["samples"][0]), int(record["samples"][1])) for record in records)
