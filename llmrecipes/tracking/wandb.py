"""W&B: the sink, which starts this module as a process, and the mirror, which copies metrics.jsonl in that process.

The mirror uses W&B's own library.
"""

from __future__ import annotations

import json
import os
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llmrecipes.io import write_atomic
from llmrecipes.redact import redacted
from llmrecipes.tracking.events import METRIC_NOTES, RunStart, expert_metrics, note_metrics, source_metrics
from llmrecipes.tracking.histograms import edges, lowest
from llmrecipes.tracking.mirror import Mirror, MirrorConfig, numbers, serve
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.spread import spread_metrics
from llmrecipes.untrusted import RECORD, read_json

if TYPE_CHECKING:
    from wandb import Run


FILE = "wandb.json"
STARTS_WITHIN_SECONDS = 20.0
FINISHES_WITHIN_SECONDS = 25.0
"""Less than the training process waits for this one, so that the end is reported."""
KINDS = ("loss", "valid_loss", "event")


@dataclass(frozen=True, kw_only=True)
class WandbConfig(MirrorConfig):
    """Configuration of the W&B mirror.

    Attributes:
        project, entity: those of the run in W&B; the default entity is that of the API key.
        save_dir: directory for W&B's own files, in `wandb/`.
        recipe: becomes the run's config.
        pid: process whose memory and CPU time W&B samples.
    """

    project: str
    entity: str | None
    save_dir: str
    pid: int
    recipe: dict[str, Any] = field(default_factory=dict)
    lock: str = ".wandb.lock"


class WandbRun:
    """The W&B run of a run directory, however often that is resumed.

    wandb.json in the run directory has the id of the W&B run, written before its first use, the last step of each kind
    that was sent, because W&B cannot delete points, and the rows of its history, which W&B calls steps.
    """

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self._file = Path(config.run_dir) / FILE
        self._sent: dict[str, int] = {}
        self._known = self._identity(config)
        self._earlier: dict[str, int] = dict(self._known["sent"])
        self.resumes = bool(self._known["rows"])
        """Whether an earlier attempt has sent something."""
        interval = config.system_metrics_interval
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,  # the tags have our commit; that of the working directory may differ
            x_save_requirements=False,  # env.json has the versions
            x_disable_stats=interval is None,
            x_stats_sampling_interval=interval or 15.0,
            x_stats_pid=config.pid,
            init_timeout=STARTS_WITHIN_SECONDS,
            finish_timeout=FINISHES_WITHIN_SECONDS,
            finish_timeout_raises=True,
        )
        # Raises for a full or read-only file system, for which W&B only logs a warning.
        Path(config.save_dir, "wandb").mkdir(parents=True, exist_ok=True)
        self.run: Run = wandb.init(
            project=config.project,
            entity=config.entity,
            dir=config.save_dir,
            id=self._known["id"],
            name=config.run_name,
            resume="allow",
            config={"recipe": config.recipe, **config.tags},
            allow_val_change=True,  # a resumed run may change some keys of its recipe
            settings=settings,
        )
        # A server says at which row of its history a resumed run goes on; offline, each start would begin at row 0.
        self._known["rows"] = max(self._known["rows"], self.run.starting_step)
        # Points carry their step: W&B's own only increases, so repeated evaluations of a resumed run would be lost.
        self.run.define_metric("*", step_metric="step")
        for name in config.artifacts:
            self.run.save(str(Path(config.run_dir) / name), base_path=config.run_dir, policy="now")

    def has(self, values: dict[str, Any]) -> bool:
        """Whether an earlier attempt at this run has sent this point. Notes overwrite each other, and may be resent."""
        kind = _kind(values)
        points = kind != "event" or values["event"] in METRIC_NOTES
        return points and values["step"] <= self._earlier.get(kind, -1)

    def log(self, values: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl to W&B; only the last note of each kind is kept."""
        if values.get("event") in METRIC_NOTES:
            self._log({"step": values["step"], **note_metrics(values["details"])})
        elif "event" in values:
            self.run.summary[f"note/{values['event']}"] = {"step": values["step"], **(values.get("details") or {})}
        else:
            points = (
                expert_metrics(values.get("experts", ()))
                | spread_metrics(values)
                | source_metrics(values)
                | numbers(values)
            )
            self._log({"step": values["step"], **points, **histograms(values.get("histograms") or {})})
        self._sent[_kind(values)] = values["step"]

    def _log(self, row: dict[str, Any]) -> None:
        self.run.log(row, step=self._known["rows"])
        self._known["rows"] += 1

    def remember(self) -> None:
        """Record what was sent, for the next attempt at this run."""
        if self._sent:
            self._known["sent"] |= self._sent
            self._sent = {}
            self._save(self._known)

    def finish(self, status: str) -> None:
        """Set the final status. A run that was stopped and can be resumed is `preempted` in W&B."""
        if status == "KILLED":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)

    def _identity(self, config: WandbConfig) -> dict[str, Any]:
        """Contents of wandb.json for this project; with a new id for a new run or project."""
        try:
            known = read_json(self._file, root=self._file.parent, most=RECORD)
            if known["project"] == config.project and known["entity"] == config.entity and known["id"]:
                sent = {kind: int(known["sent"].get(kind, -1)) for kind in KINDS}
                return {**known, "id": str(known["id"]), "sent": sent, "rows": max(0, int(known.get("rows", 0)))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        known = {"project": config.project, "entity": config.entity, "id": uuid.uuid4().hex[:16], "sent": {}, "rows": 0}
        self._save(known)
        return known

    def _save(self, known: dict[str, Any]) -> None:
        write_atomic(self._file, json.dumps(known, indent=2) + "\n")


def histograms(measures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """W&B's histograms by name, of `StepMetrics.histograms`: `histograms/gradient/mlp_fc1` …"""
    import numpy as np
    import wandb

    by_name = {}
    for measure, kinds in measures.items():
        for kind, bins in kinds.items():
            limits, counts = edges(bins)
            drawn = np.array(counts), np.array([lowest(bins, limits), *limits])
            by_name[f"histograms/{measure}/{kind}"] = wandb.Histogram(np_histogram=drawn)
    return by_name


class WandbMirror(Mirror[WandbConfig, WandbRun]):
    """Sends metrics, and the last note of each kind. W&B samples system metrics itself."""

    def _connect(self) -> tuple[WandbRun, str | None]:
        connected = WandbRun(self._config)
        if connected.run.offline:
            append = "--append " if connected.resumes else ""
            folder = shlex.quote(str(Path(connected.run.dir).parent))
            return connected, f"    W&B  offline; later: wandb sync {append}{folder}"
        return connected, f"    W&B  {connected.run.url}"

    def _send(self, run: WandbRun) -> None:
        for end, values in self._points(self._offset):
            if not run.has(values):
                run.log(values)
            self._offset = end
        run.remember()

    def _sample(self, run: WandbRun) -> None:
        """Nothing to do."""

    def _finish(self, run: WandbRun, status: str) -> None:
        run.finish(status)


def _kind(values: dict[str, Any]) -> str:
    return next(kind for kind in KINDS if kind in values)


def main() -> None:
    """Entry of the process."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # send nothing to W&B but the run
    serve(lambda values: WandbConfig(**values), lambda config, ending, out: WandbMirror(config, "W&B", ending, out))


class WandbSink(MirrorSink):
    """Mirrors the run into W&B.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: WandbConfig, show: Callable[[str], None]) -> None:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        super().__init__("llmrecipes.tracking.wandb", "W&B", "wandb.log", config, environment, show=show)

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(wandb_config(start), start.messages.put)


def wandb_config(start: RunStart) -> WandbConfig:
    """Configuration of the mirror, without the API key: W&B's library reads that from the environment or ~/.netrc."""
    recipe = start.recipe
    settings = start.recipe.tracking
    return WandbConfig(
        run_dir=str(start.run_dir.resolve()),
        run_name=settings.wandb_exp_name or start.run_dir.name,
        log_interval=recipe.train.log_interval,
        resumed_step=start.resumed_step,
        total_steps=start.total_steps,
        system_metrics_interval=settings.system_metrics_interval,
        tags=dict(start.tags),
        artifacts=list(start.documents),
        project=settings.wandb_project or recipe.name,
        entity=settings.wandb_entity,
        save_dir=str(Path(settings.wandb_save_dir or start.run_dir).resolve()),
        pid=os.getpid(),
        recipe=redacted(recipe.model_dump(mode="json")),
    )


if __name__ == "__main__":
    main()
