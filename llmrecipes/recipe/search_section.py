"""The section `search`: a hyperparameter search with Optuna over keys of the recipe.

Names are Optuna's: of samplers, pruners and their arguments, and of the limits of a study.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from llmrecipes.recipe.section import (
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

PlainPruner = Literal[
    "NopPruner", "MedianPruner", "PercentilePruner", "SuccessiveHalvingPruner", "HyperbandPruner", "WilcoxonPruner"
]
PrunerType = Literal[PlainPruner, "PatientPruner"]
_BY_STEP = ("n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials")
PRUNER_KEYS: dict[PrunerType, tuple[str, ...]] = {
    "NopPruner": (),
    "MedianPruner": _BY_STEP,
    "PercentilePruner": ("percentile", *_BY_STEP),
    "SuccessiveHalvingPruner": ("min_resource", "reduction_factor", "min_early_stopping_rate", "bootstrap_count"),
    "HyperbandPruner": ("min_resource", "reduction_factor", "bootstrap_count"),
    "WilcoxonPruner": ("p_threshold", "n_startup_steps"),
    "PatientPruner": ("patience", "min_delta", "wrapped_pruner"),
}
"""Keys of `search.pruner` that have an effect on each pruner."""

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
    otherwise it keeps the recipe's value. The other keys may be searched themselves, by earlier items."""


class Sampler(Variant):
    """How values are sampled."""

    seed: NonNegInt | None = None
    """Seed of the sampler; every process that works on the study draws a different sequence. Unset: a new seed each
    time."""


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
    """CMA-ES, an evolution strategy."""

    type: Literal["CmaEsSampler"]
    popsize: PosInt | None = None
    """Trials per generation; unset: Optuna's default."""
    with_margin: bool = False
    """Keep a minimum probability for every integer or stepped value."""


class RandomPoints(Sampler):
    """Random values."""

    type: Literal["RandomSampler"]


class GridPoints(Sampler):
    """All points of a grid, in random order."""

    type: Literal["GridSampler"]


class QuasiRandomPoints(Sampler):
    """Quasi-Monte Carlo: a sequence that covers the space evenly."""

    type: Literal["QMCSampler"]
    qmc_type: Literal["sobol", "halton"] = "sobol"
    """Kind of sequence."""
    scramble: bool = False
    """Randomise the sequence."""


class Pruner(Section):
    """When to end an unpromising trial (`optuna.pruners`); steps are the trial's evaluations, counted from 1."""

    type: PrunerType = "MedianPruner"
    """Pruner: compare with the median, a percentile, successive halving, Hyperband, or a signed-rank test against the
    best trial (Wilcoxon), or wait for improvements (`PatientPruner`). `NopPruner` ends no trial."""
    n_startup_trials: NonNegInt | None = None
    """Median, percentile: completed trials before any is pruned; unset: 5."""
    n_warmup_steps: NonNegInt | None = None
    """Median, percentile: first evaluation after which a trial may be pruned; unset: a quarter of them."""
    interval_steps: PosInt | None = None
    """Median, percentile: evaluations between checks; unset: 1."""
    n_min_trials: PosInt | None = None
    """Median, percentile: minimum number of trials with a value at the same evaluation; unset: 1."""
    percentile: Annotated[float, Field(gt=0, lt=100)] | None = None
    """Percentile: percentage of trials to keep; required for `PercentilePruner`."""
    min_resource: PosInt | None = None
    """Successive halving, Hyperband: first evaluation after which a trial may be pruned; unset: a quarter of them."""
    reduction_factor: Annotated[int, Field(ge=2)] | None = None
    """Successive halving, Hyperband: keep one of this many trials at each decision; unset: 4, or 3 for Hyperband."""
    min_early_stopping_rate: NonNegInt | None = None
    """Successive halving: how much later the first decision is made; unset: 0."""
    bootstrap_count: NonNegInt | None = None
    """Successive halving, Hyperband: trials that must reach a decision before any is pruned there; unset: 0."""
    p_threshold: Probability | None = None
    """Wilcoxon: p-value below which a trial is pruned; unset: 0.1."""
    n_startup_steps: NonNegInt | None = None
    """Wilcoxon: evaluations before the first test; unset: 2."""
    patience: NonNegInt | None = None
    """Patient: evaluations without improvement before a trial is pruned; required for `PatientPruner`."""
    min_delta: NonNegFloat | None = None
    """Patient: smallest improvement that counts; unset: 0."""
    wrapped_pruner: PlainPruner | None = None
    """Patient: a second pruner, which must agree; set its keys beside this one. Unset: none."""


class SourceStudy(Section):
    """An earlier study."""

    study_name: str
    """`search.study_name` of the earlier study."""
    storage: str | None = None
    """`search.storage` of the earlier study, or the path of its journal file; unset: the storage of this search."""


class Search(Section):
    """A hyperparameter search (Optuna) for `llmrecipes search`; training ignores it."""

    space: Annotated[tuple[Dimension, ...], Field(min_length=1, strict=False)]
    """Keys to search. All others keep the recipe's values."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1, strict=False)] = ("valid_loss",)
    """Quantities to minimise, taken at the last evaluation of a trial. With several, the result is the set of best
    trade-offs."""
    trial_tokens: PosInt | None = None
    """Training tokens per trial; unset: those of the recipe. Steps, evaluations and the schedule are scaled to it, so
    that trials with different batches are compared after the same number of tokens."""
    seeds_per_point: PosInt = 1
    """Training runs per point, with `train.seed` and the seeds after it. The value of a trial is their mean; only the
    first can be pruned."""
    sampler: Annotated[
        ParzenEstimator | GaussianProcess | CmaEs | RandomPoints | GridPoints | QuasiRandomPoints,
        Field(discriminator="type"),
        type_or("TPESampler"),
    ] = ParzenEstimator()
    """How values are sampled (`optuna.samplers`)."""
    pruner: Pruner | None = None
    study_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")] | None = None
    """Name of the study; unset: the recipe's name."""
    storage: str | None = None
    """Storage of the study: `sqlite:///FILE` for one machine, `postgresql://USER@HOST/DATABASE` for a cluster (the
    password comes from `PGPASSWORD` or `~/.pgpass`), or the path of a journal file on a shared file system; unset: a
    journal file in the folder of the study."""
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
