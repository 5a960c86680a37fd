"""The section `search`: a hyperparameter search with Optuna over keys of the recipe.

Names are Optuna's: of samplers, pruners and their arguments, and of the limits of a study.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from llmrecipes.recipe.sections.section import (
    EXECUTION,
    JsonObject,
    NonNegFloat,
    NonNegInt,
    PosFloat,
    PosInt,
    Probability,
    Section,
    Variant,
    type_or,
)

PlainPrunerType = Literal[
    "MedianPruner", "NopPruner", "PercentilePruner", "SuccessiveHalvingPruner", "HyperbandPruner", "WilcoxonPruner"
]
_Percentage = Annotated[float, Field(gt=0, lt=100)]
Objective = Literal["valid_loss", "valid_bits_per_byte", "train_seconds", "num_parameters"]


class Dimension(Section):
    """A key to search: a range with `low` and `high`, or a list of `choices`."""

    key: str
    """Dotted recipe key, such as `optimizer.lr`."""
    low: float | None = None
    """Smallest value; the range contains integers only if the key takes only integers."""
    high: float | None = None
    """Largest value, included."""
    log: bool = False
    """Sample on a logarithmic scale."""
    step: PosFloat | None = None
    """Distance between values, counted from `low`."""
    choices: Annotated[tuple[JsonValue, ...], Field(min_length=1, strict=False)] | None = None
    """Values to choose from, instead of a range."""
    when: dict[str, Annotated[tuple[JsonValue, ...], Field(min_length=1, strict=False)]] = Field({})
    """Search this key only if other keys have one of these values, such as `{model.gated_linear_unit: [true]}`;
    otherwise it keeps the recipe's value."""


class Sampler(Variant):
    """How values are sampled."""

    seed: NonNegInt | None = None
    """Seed; every process of the study draws a different sequence. Unset: a new one each time."""


class _Learning(Sampler):
    n_startup_trials: PosInt | None = None
    """Random trials before the sampler learns from results; unset: Optuna's default."""


class ParzenEstimator(_Learning):
    """Tree-structured Parzen estimator."""

    type: Literal["TPESampler"] = "TPESampler"
    multivariate: bool = True
    """Model all keys jointly rather than independently."""
    n_ei_candidates: PosInt | None = None
    """Candidates per choice; unset: Optuna's default."""


class GaussianProcess(_Learning):
    """Gaussian process."""

    type: Literal["GPSampler"]


class CmaEs(_Learning):
    """CMA-ES."""

    type: Literal["CmaEsSampler"]
    popsize: PosInt | None = None
    """Trials per generation; unset: Optuna's default."""
    with_margin: bool = False
    """Keep a minimum probability for every integer or stepped value."""


class RandomPoints(Sampler):
    """Random values."""

    type: Literal["RandomSampler"]


class GridPoints(Sampler):
    """A grid, in random order."""

    type: Literal["GridSampler"]


class QuasiRandomPoints(Sampler):
    """Quasi-Monte Carlo."""

    type: Literal["QMCSampler"]
    qmc_type: Literal["sobol", "halton"] = "sobol"
    """Kind of sequence."""
    scramble: bool = False
    """Randomise the sequence."""


class Pruner(Variant):
    """When to end an unpromising trial."""


class _ByStep(Pruner):
    n_startup_trials: NonNegInt = 5
    """Completed trials before any is pruned."""
    n_warmup_steps: NonNegInt | None = None
    """First evaluation after which a trial may be pruned; unset: a quarter of them."""
    interval_steps: PosInt = 1
    """Evaluations between checks."""
    n_min_trials: PosInt = 1
    """Minimum number of trials with a value at the same evaluation."""


class _ByRung(Pruner):
    min_resource: PosInt | None = None
    """First evaluation after which a trial may be pruned; unset: a quarter of them."""
    reduction_factor: Annotated[int, Field(ge=2)] = 4
    """Keep one of this many trials at each decision."""
    bootstrap_count: NonNegInt = 0
    """Trials that must reach a decision before any is pruned there."""


class _Halving(_ByRung):
    min_early_stopping_rate: NonNegInt = 0
    """How much later the first decision is made."""


class _BySign(Pruner):
    p_threshold: Probability = 0.1
    """p-value below which a trial is pruned."""
    n_startup_steps: NonNegInt = 2
    """Evaluations before the first test."""


class Median(_ByStep):
    """Compare with the median."""

    type: Literal["MedianPruner"] = "MedianPruner"


class NoPruning(Pruner):
    """End no trial."""

    type: Literal["NopPruner"]


class Percentile(_ByStep):
    """Compare with a percentile."""

    type: Literal["PercentilePruner"]
    percentile: _Percentage
    """Percentage of trials to keep."""


class SuccessiveHalving(_Halving):
    """Successive halving."""

    type: Literal["SuccessiveHalvingPruner"]


class Hyperband(_ByRung):
    """Hyperband."""

    type: Literal["HyperbandPruner"]
    reduction_factor: Annotated[int, Field(ge=2)] = 3


class Wilcoxon(_BySign):
    """A signed-rank test against the best trial."""

    type: Literal["WilcoxonPruner"]


PlainPruner = Median | NoPruning | Percentile | SuccessiveHalving | Hyperband | Wilcoxon


class Patient(_ByStep, _Halving, _BySign):
    """Wait for improvements."""

    type: Literal["PatientPruner"]
    patience: NonNegInt
    """Evaluations without improvement before a trial is pruned."""
    min_delta: NonNegFloat = 0.0
    """Smallest improvement that counts."""
    wrapped_pruner: PlainPrunerType | None = None
    """A second pruner, which must agree; set its keys beside this one. Unset: none."""
    percentile: _Percentage | None = None
    """For `PercentilePruner`: percentage of trials to keep."""

    @property
    def wrapped(self) -> dict[str, Any]:
        """The type and the keys of the second pruner."""
        keys = self.model_fields_set - {"type", "patience", "min_delta", "wrapped_pruner"}
        return {"type": self.wrapped_pruner, **{key: getattr(self, key) for key in keys}}


class SourceStudy(Section):
    """An earlier study."""

    study_name: str
    """`search.study_name` of the earlier study."""
    storage: str | None = None
    """`search.storage` of the earlier study, or the path of its journal file; unset: the storage of this search."""


class Search(Section):
    """A hyperparameter search (Optuna) for `llmrecipes search`; training ignores it."""

    half = EXECUTION

    space: Annotated[tuple[Dimension, ...], Field(min_length=1, strict=False)]
    """Keys to search. All others keep the recipe's values."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1, strict=False)] = ("valid_loss",)
    """Quantities to minimise, at the last evaluation of a trial. With several, the result is the best trade-offs."""
    trial_tokens: PosInt | None = None
    """Training tokens per trial, to which steps, evaluations and the schedule are scaled; unset: those of the
    recipe."""
    seeds_per_point: PosInt = 1
    """Training runs per point, with `train.seed` and the seeds after it, whose mean is the value of a trial; only
    the first can be pruned."""
    sampler: Annotated[
        ParzenEstimator | GaussianProcess | CmaEs | RandomPoints | GridPoints | QuasiRandomPoints,
        Field(discriminator="type"),
        type_or("TPESampler"),
    ] = ParzenEstimator()
    """How values are sampled (`optuna.samplers`)."""
    pruner: Annotated[PlainPruner | Patient, Field(discriminator="type"), type_or("MedianPruner")] | None = None
    """When to end an unpromising trial (`optuna.pruners`); steps are the trial's evaluations, counted from 1."""
    study_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")] | None = None
    """Name of the study; unset: the recipe's name."""
    storage: str | None = None
    """Storage of the study: the path of a journal file on a shared file system, `sqlite:///FILE` for one machine, or
    `postgresql://USER@HOST/DATABASE` (password from `PGPASSWORD` or `~/.pgpass`); unset: a journal file in the
    folder of the study."""
    enqueue_recipe: bool = True
    """Try the recipe's own values first, if the space contains them."""
    enqueue_trials: Annotated[tuple[JsonObject, ...], Field(strict=False)] = ()
    """Known points to try first, each a mapping of keys to values; missing keys are sampled."""
    source_studies: Annotated[tuple[SourceStudy, ...], Field(strict=False)] = ()
    """Earlier studies of the same space, from whose trials the sampler learns."""
    n_trials: PosInt | None = None
    """Stop after this many trials; those that cannot run according to the plan do not count."""
    timeout: PosFloat | None = None
    """Start no trial after this many seconds; a resumed search starts counting again."""
    max_gpu_hours: PosFloat | None = None
    """Start no trial once all trials together have used this many rank-hours, on GPUs or not."""
    max_tokens: PosInt | None = None
    """Start no trial that would bring the training tokens of all trials together above this."""
    target: float | None = None
    """Stop when the first objective reaches this value."""
    patience: PosInt | None = None
    """Stop when this many trials in a row have not improved the best value by more than `min_improvement`."""
    min_improvement: NonNegFloat = 0.0
    """Smallest improvement of the best value that counts for `patience`."""
    max_retry: NonNegInt = 3
    """How often to resume a trial whose job or search process was lost."""
    heartbeat_interval: PosInt = 60
    """Seconds between heartbeats of a running trial."""
    grace_period: PosInt | None = None
    """Seconds without a heartbeat until another process takes over a trial; unset: twice `heartbeat_interval`."""
    keep_checkpoints: Literal["none", "best", "all"] = "best"
    """Which checkpoints of ended trials to keep."""
