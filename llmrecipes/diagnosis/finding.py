"""What a check says about a run, and what checks read: records as metrics.jsonl has them, and facts of the recipe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, log
from operator import sub
from typing import Any, Literal, Protocol

from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.untrusted import number

Record = Mapping[str, Any]
"""A line of metrics.jsonl: a step (`loss`), an evaluation (`valid_loss`) or a note (`event`)."""
Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
PAGE = "docs/guide/debugging.md"
ONE_BATCH = ".overfit"
"""End of the name of a recipe that overfits one batch."""


@dataclass(frozen=True, kw_only=True)
class RunFinding:
    """Something that looks wrong.

    Attributes:
        rule: its name, also that of the note and of the section in `PAGE`.
        severity: `error` the run is failing or its result is in doubt; `warning` it wastes time or learns badly.
        first_step, last_step: where it was seen; None: not at a step.
        count: how often.
        text: a sentence with the numbers of `evidence`.
        advice: what to do.
        link: the section of the documentation.
    """

    rule: str
    severity: Severity
    title: str
    first_step: int | None
    last_step: int | None
    count: int
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: str
    link: str

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Sighting:
    """What a check saw at one step; `step` None: not at a step."""

    rule: str
    step: int | None
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the checks need of a recipe; the defaults judge nothing that depends on it."""

    steps: int = 0
    warmup: int = 0
    lr: float | None = None
    clip: float = 0.0
    vocabulary: int = 0
    adapters: bool = False
    one_batch: bool = False
    micro_batch_tokens: int = 0
    pipeline_stages: int = 0
    experts: bool = False
    straggler: float = inf
    """Own time of a rank, over that of its peers, from which it is an alarm of the training."""
    usual_lr: float | None = None
    """Learning rate that models of this size usually take; None: not known for this optimizer or kind of run."""
    recipe: Recipe | None = None
    """The recipe, for advice that it follows already."""

    @property
    def rate_is_high(self) -> str:
        """That the learning rate is far above the usual one; empty if it is not."""
        if self.lr is None or self.usual_lr is None or self.lr < HIGH_RATE * self.usual_lr:
            return ""
        times = f"{self.lr / self.usual_lr:,.0f} times"
        return f"optimizer.lr {self.lr:g} is {times} the usual one for a model of this size ({self.usual_lr:.2g})"

    @classmethod
    def of(cls, recipe: Recipe) -> RunFacts:
        """The facts of a recipe, as it trains: that of `--overfit-batch` has its own name."""
        train, scheduler = recipe.train, recipe.scheduler
        return cls(
            steps=train.train_iters,
            warmup=scheduler.lr_warmup_iters,
            lr=recipe.optimizer.lr,
            clip=recipe.optimizer.clip_grad,
            vocabulary=recipe.model.vocab_size,
            adapters=recipe.lora is not None,
            one_batch=recipe.name.endswith(ONE_BATCH),
            micro_batch_tokens=recipe.layout.micro_batch_size * recipe.model.seq_length,
            pipeline_stages=max(stage.layout.pipeline_model_parallel_size for stage in stage_recipes(recipe)),
            experts=recipe.model.num_moe_experts is not None,
            straggler=1 / limit if (limit := recipe.faults.straggler_threshold) else inf,
            usual_lr=usual_lr(recipe),
            recipe=recipe,
        )


HIGH_RATE = 20.0
"""Times the usual learning rate, from which it is named as the cause: small models bear ten times as much."""


def usual_lr(recipe: Recipe) -> float | None:
    """Peak learning rate of AdamW by the number of parameters without embeddings (arXiv 2001.08361, equation D.1).

    None for other optimizers, adapters, and µP, whose rate is that of a narrow model.
    """
    model = recipe.model
    if recipe.optimizer.optimizer != "adam" or recipe.lora is not None or model.use_mup:
        return None
    parameters = 12 * model.num_layers * model.hidden_size**2
    return max(1e-5, 0.003239 - 0.0001395 * log(parameters))


class Check(Protocol):
    """A check: takes every record in order, in constant time and memory."""

    def add(self, record: Record) -> Iterable[Sighting]:
        """What this record shows."""
        ...


def value(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a record; None if there is none."""
    raw = record.get(key)
    return raw if type(raw) is float and isfinite(raw) else number(raw)


@dataclass(frozen=True)
class Spread:
    """A quantity over ranks or nodes, and the rank or node that has the most."""

    least: float
    median: float
    most: float
    where: str


def spread(record: Record, group: Literal["ranks", "nodes"], name: str) -> Spread | None:
    """A quantity of all ranks or nodes, as `tracking.spread` makes it; None if the record does not have it."""
    of_group = record.get(group)
    of_name = of_group.get(name) if isinstance(of_group, Mapping) else None
    if not isinstance(of_name, Mapping):
        return None
    least, median, most = (value(of_name, key) for key in ("min", "median", "max"))
    if least is None or median is None or most is None:
        return None
    return Spread(least, median, most, str(of_name.get(f"max_{group[:-1]}")))


def steps_only(record: Record) -> bool:
    """Whether a record is a step whose update was made."""
    return "loss" in record and not record.get("skipped")


class Lasting:
    """Whether something held in most of the last steps: a single step never counts."""

    def __init__(self, window: int, share: float) -> None:
        self._seen: deque[bool] = deque(maxlen=window)
        self._least = share * window
        self._held = 0

    def add(self, holds: bool) -> bool:
        """Add a step; returns whether it holds in the required share of a full window."""
        if len(self._seen) == self._seen.maxlen:
            self._held -= self._seen[0]
        self._seen.append(holds)
        self._held += holds
        return len(self._seen) == self._seen.maxlen and self._held >= self._least

    @property
    def full(self) -> bool:
        """Whether as many steps as the window has were seen."""
        return len(self._seen) == self._seen.maxlen


TO_STANDARD_DEVIATION = 1.4826 / 2**0.5
"""From the median absolute difference of two draws of a normal distribution to its standard deviation."""


def noise(values: Iterable[float]) -> float:
    """Robust standard deviation of values around a slow trend, from the differences of neighbours; 0 for one value."""
    known = [*values]
    differences = [*map(abs, map(sub, known[1:], known))]
    return TO_STANDARD_DEVIATION * median_of(differences or [0.0])


def median_of(values: Iterable[float]) -> float:
    """Median of at least one value; the module statistics takes twice as long for the few of a window."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
