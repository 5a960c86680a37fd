"""What the process that copies into MLflow is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrecipes.tracking.mirror import MirrorConfig

LOCK = ".mlflow.lock"


@dataclass(frozen=True, kw_only=True)
class MlflowConfig(MirrorConfig):
    """What the mirror of MLflow needs to know.

    Attributes:
        uri: MLflow store.
        artifact_root: place for artifacts of a new experiment; None lets the server choose.
        kept_database: copy of the SQLite database in the run directory, restored at the start and renewed at the end of
            an attempt; None if the database is where it stays.
        experiment: MLflow experiment.
        params: parameters, already text.
    """

    uri: str
    artifact_root: str | None
    experiment: str
    kept_database: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    lock: str = LOCK
