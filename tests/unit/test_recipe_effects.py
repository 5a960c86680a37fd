"""Every key of the schema changes something: the plan, megatron-core's configuration, the data, or the loop."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from pydantic import create_model
from rich.console import Console

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.checkpoint.saver import SaveReport, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.data.folder.prepared import fingerprint, index_folder, open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.read import curriculum
from llmrecipes.engine import backends
from llmrecipes.engine.base import Progress, World
from llmrecipes.engine.core.model import config as engine_config
from llmrecipes.engine.core.model.attention import masks
from llmrecipes.engine.core.model.config import transformer_config
from llmrecipes.engine.core.update import learning_rate
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.deepspeed.configuration import deepspeed_config
from llmrecipes.engine.megatron.data_parallel import data_parallel_config
from llmrecipes.engine.megatron.optimizer import keys_of_kind, optimizer_config
from llmrecipes.engine.meters import GradientFault
from llmrecipes.engine.parts.gradient_check import GradientCheck
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import StepSpike
from llmrecipes.faults.signals import StopRequest
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import Plan, default_world_size, derive
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived import layer_pattern
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.engines import ENGINES, EngineEntry
from llmrecipes.recipe.reading.keys import ITEM, keys
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.sections.plugins import resolve
from llmrecipes.rundir import Run
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking import run_tracker
from llmrecipes.tracking.events import NoTracker
from llmrecipes.train import evaluations, loaders, worker
from llmrecipes.train.guard import require_right_gradients
from llmrecipes.train.loaders import DataLoaders
from llmrecipes.train.local_checkpoints import open_local
from llmrecipes.train.loop import Loop
from llmrecipes.train.observers import telemetry
from llmrecipes.train.observers.copies import Copies
from llmrecipes.train.observers.exports import Exports
from llmrecipes.train.observers.garbage import GarbageCollection
from llmrecipes.train.observers.hangs import limits as watch_limits
from llmrecipes.train.observers.task_scores import TaskEvaluations
from llmrecipes.train.observers.telemetry import Telemetry
from llmrecipes.train.resume import Start, initial_weights
from llmrecipes.train.rewind import Rewind, Rewinds
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.stopping import after_evaluation
from llmrecipes.workflow import train as workflow
from llmrecipes.workflow.start import Machine, PreparedStart
from llmrecipes.workflow.teacher import located, named_model
from tests.fused_adam import install
from tests.helpers import (
    MODEL,
    ROOMY,
    TRAIN,
    TRANSFORMER_ENGINES,
    RandomTokens,
    built,
    engine_of,
    random_batches,
    steps,
    tiny,
)
from tests.observing import observer
from tests.unit.search_seen import BASE as SEARCH
from tests.unit.search_seen import seen as search

pytestmark = pytest.mark.usefixtures("world")

See = Callable[[Recipe, Path, pytest.MonkeyPatch], Any]

NODE = Cluster((DetectedGpu("any", 1 << 50, 1 << 50, None),) * 8, 8, 1 << 50, 1 << 50, 0)
TWO_NODES = replace(NODE, gpus=NODE.gpus[:1]).times(2)


# -- what can be seen of a recipe ------------------------------------------------------------------------------------


def planned(recipe: Recipe) -> Plan:
    return derive(recipe, smallest_world(recipe.layout), NODE)


def plan(recipe: Recipe, *_: Any) -> dict[str, Any]:
    return derive_run(recipe, smallest_world(recipe.layout), NODE).as_dict()


def config(recipe: Recipe, *_: Any) -> dict[str, Any]:
    found = transformer_config(planned(recipe), on_gpu=False, transformer_engine=False)
    return {each.name: getattr(found, each.name) for each in fields(found)}


def config_on_gpu(recipe: Recipe, _: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With TransformerEngine's layers, of which megatron-core looks for some functions."""
    for name in TRANSFORMER_ENGINES:
        monkeypatch.setattr(f"megatron.core.{name}", recorder, raising=False)
    bf16 = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "bf16"})})
    found = transformer_config(planned(bf16), on_gpu=True, transformer_engine=True)
    return {each.name: getattr(found, each.name) for each in fields(found)}


def config_on_cpu(recipe: Recipe, *_: Any) -> dict[str, Any]:
    return asdict(transformer_config(derive(recipe, 1, ROOMY), on_gpu=False, transformer_engine=False))


def model(recipe: Recipe, *_: Any) -> Any:
    """What a model computes, from the weights it starts with."""
    made = built(recipe)
    torch.manual_seed(0)
    ids = torch.arange(recipe.model.seq_length)[None] % 97
    return made.module.train()(ids, ids, None, labels=ids, loss_mask=torch.ones_like(ids).float()).tolist()


def adapted(recipe: Recipe, *_: Any) -> Any:
    """What a model with adapters computes after some training: at first they add nothing."""
    made = built(recipe)
    with torch.no_grad():
        for name, parameter in made.module.named_parameters():
            if name.endswith("_lora.b.weight"):
                parameter.fill_(0.1)
    torch.manual_seed(0)
    ids = torch.arange(recipe.model.seq_length)[None] % 97
    return made.module.train()(ids, ids, None, labels=ids, loss_mask=torch.ones_like(ids).float()).tolist()


def first_loss(recipe: Recipe, *_: Any) -> float:
    """The loss of a step."""
    return engine_of(recipe).train_step(random_batches(recipe)).loss


def compared(recipe: Recipe, *_: Any) -> float:
    """The loss of the third step on random pairs, after which the weights are no longer those of the reference."""
    engine, batches = engine_of(recipe), random_batches(recipe)
    return [engine.train_step(batches).loss for _ in range(3)][-1]


def zeros_after_a_step(recipe: Recipe, *_: Any) -> int:
    """Zeros of a matrix that had some in its first row."""
    engine = engine_of(recipe)
    weight = engine.modules[0].decoder.layers[0].mlp.linear_fc1.weight
    weight.data[0] = 0
    engine.train_step(random_batches(recipe))
    return int((weight == 0).sum())


def located_teacher(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a start takes the teacher from."""
    monkeypatch.chdir(folder)
    for name in ("a", "b"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    reference = named_model(recipe)
    return "" if reference is None else located(reference, folder).name


def implementation(recipe: Recipe, *_: Any) -> tuple[str, str]:
    made = built(recipe)
    return made.implementation, made.reason


def optimizer(recipe: Recipe, *_: Any) -> dict[str, Any]:
    engine = engine_of(recipe)
    try:
        part = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0]
        return {
            **vars(part.config),
            **{f"ddp.{name}": value for name, value in vars(engine.chunks[0].ddp_config).items()},
        }
    finally:
        engine.close()


def kind(recipe: Recipe, *_: Any) -> tuple[Any, ...]:
    """What megatron-core is given for an optimizer, and the update of one it has in this version."""
    given = keys_of_kind(recipe.optimizer)
    engine = engine_of(recipe)
    steps(engine, 2)
    found = [value.double().abs().sum().item() for name, value in engine.named_tensors() if not name.endswith(".grad")]
    engine.close()
    return (found, given.get("muon_tp_mode"))


def clipped(recipe: Recipe, *_: Any) -> list[float]:
    """Weights after a step."""
    engine = engine_of(recipe)
    steps(engine, 1)
    found = [value.double().abs().sum().item() for name, value in engine.named_tensors() if not name.endswith(".grad")]
    engine.close()
    return found


def moments(recipe: Recipe, _: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """megatron-core looks for TransformerEngine's Adam."""
    install(monkeypatch)
    return vars(optimizer_config(recipe))


def gradients(recipe: Recipe, *_: Any) -> dict[str, Any]:
    return vars(data_parallel_config(planned(recipe)))


def groups(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    (folder / "nccl.yaml").write_text("tp: {max_ctas: 16}")
    monkeypatch.setattr("megatron.core.parallel_state.initialize_model_parallel", recorder)
    with pytest.raises(Recorded) as found, model_parallel(1, recipe.layout):
        pass
    return dict(found.value.args[1])


def garbage(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Whether Python collects by itself, and collections in 200 steps."""
    seen: list[None] = []
    with observer(GarbageCollection, recipe, folder, plan=planned(recipe)) as collection:
        collection.begin()
        monkeypatch.setattr("gc.collect", lambda: seen.append(None))
        enabled = gc.isenabled()
        for step in range(1, 201):
            done: Any = SimpleNamespace(progress=Progress(step=step))
            collection.after_step(done)
    return enabled, len(seen)


def schedule(recipe: Recipe, *_: Any) -> list[float]:
    return [learning_rate(recipe, step) for step in range(1, recipe.train.train_iters + 1)]


def of_stages(recipe: Recipe, *_: Any) -> list[Any]:
    """Weights of the sources and learning rates of each stage."""
    every = [(span_of(each), each) for each in stage_recipes(recipe)]
    return [
        (span.weights, [learning_rate(each, step) for step in range(span.first_step + 1, span.last_step + 1)])
        for span, each in every
        if span is not None
    ]


def on_two_ranks(recipe: Recipe, *_: Any) -> dict[str, Any]:
    return derive_run(recipe, 2, ROOMY).as_dict()


def features_of_stages(recipe: Recipe, *_: Any) -> list[Any]:
    return [stage.features for stage in derive_run(recipe, smallest_world(recipe.layout), NODE).stages]


def tokens(recipe: Recipe, *_: Any) -> str:
    return fingerprint(recipe)


def batch_mask(recipe: Recipe, *_: Any) -> bool:
    return masks(recipe, torch.device("cpu"))(torch.zeros(1, 4)) is None


def order(recipe: Recipe, folder: Path, _: pytest.MonkeyPatch) -> str:
    return index_folder(recipe, open_prepared(recipe, folder / "data")).name


def held_out_names(recipe: Recipe, folder: Path, _: pytest.MonkeyPatch) -> list[str]:
    prepared = open_prepared(recipe, folder / "data")
    return [*loaders.open_loaders(recipe, prepared, World(0, 1, 0, 1, True), pin_memory=False).valid_sources]


ON_FILES = (order, held_out_names)
"""What is seen of prepared data."""


def by_source(recipe: Recipe, *_: Any) -> dict[str, Any]:
    engine: Any = engine_of(recipe)
    numbered = ({**batch, "source": torch.zeros(len(batch["tokens"])).long()} for batch in random_batches(recipe))
    engine.train_step(numbered)
    fields: dict[str, Any] = engine.parts.fields(Progress())
    engine.close()
    return fields


def curriculum_order(recipe: Recipe, *_: Any) -> list[int]:
    section = recipe.data.curriculum
    if section is None:
        return []
    scores, tokens = np.random.default_rng(0).random(64), int(400 * section.share)
    return curriculum.ordered(np.full(64, 9), scores, 1, tokens, 1, section).tolist()


def curriculum_losses(recipe: Recipe, *_: Any) -> str:
    """The folder that is read, which is not there."""
    if recipe.data.curriculum is None:
        return ""
    prepared: Any = None
    try:
        curriculum.order_by_difficulty({}, prepared, recipe.data.curriculum, Path())
    except UserError as error:
        return error.where
    return "nothing is read"


class Recorded(Exception):
    """Ends what is observed where it builds the thing that is asked for."""


def recorder(*arguments: Any, **options: Any) -> Any:
    raise Recorded(arguments, options)


def loader(recipe: Recipe, _: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loaders, "build", lambda *_: RandomTokens(recipe))
    monkeypatch.setattr("llmrecipes.data.read.batches.DataLoader", recorder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    here: Any = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1)
    prepared: Any = None
    with pytest.raises(Recorded) as found:
        next(loaders.open_loaders(recipe, prepared, here, pin_memory=True).train(0))
    options = found.value.args[1]
    return {name: options[name] for name in ("num_workers", "prefetch_factor", "pin_memory")}


def tracking(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Everything that metrics are sent to, and what it is told."""
    found: dict[str, Any] = {}
    for name, declared in run_tracker.opened_by(recipe).items():
        if name != "status.json":  # which has the time
            sink = resolve(declared.target)
            monkeypatch.setattr(sink, "__init__", lambda _, *a, name=name, **told: found.update({name: (a, told)}))
    monkeypatch.setattr(run_tracker, "require_packages_of_tracking", lambda _: None)
    monkeypatch.setattr("llmrecipes.tracking.mlflow.sink.flatten", lambda _: {})  # its parameters have every key
    for name in ("to_yaml", "recipe_hash"):
        monkeypatch.setattr(run_tracker, name, lambda _: "")
    monkeypatch.setattr("llmrecipes.recipe.schema.Recipe.model_dump", lambda *_, **__: {})
    plain: dict[str, Any] = {"plan": {}, "environment": {}, "resumed_step": 0, "total_steps": 9}
    console = Console(file=io.StringIO())
    run_tracker.RunTracker.open(recipe, run_dir=folder / "r", runs_dir=folder, console=console, **plain)
    # Objects to print to are others each time.
    return {
        name: repr([each for each in (*a, *told.items()) if "object at" not in repr(each)])
        for name, (a, told) in found.items()
    }


def metered(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the process that reads a node is told."""
    told: list[dict[str, Any]] = []

    def monitored(_: Path, **options: Any) -> Any:
        told.append(options)
        return nullcontext()

    monkeypatch.setattr(telemetry, "monitored", monitored)
    monkeypatch.setattr(telemetry, "node_names", lambda *_: ["n0"])
    platform = SimpleNamespace(name="cpu", device="cpu")
    made = observer(Telemetry, recipe, folder, plan=planned(recipe), engine=SimpleNamespace(platform=platform))
    with made as measuring:
        measuring.begin()
        return told


def factors(recipe: Recipe, folder: Path, _: pytest.MonkeyPatch) -> Any:
    (folder / "r" / "logs").mkdir(parents=True, exist_ok=True)
    spec = RunSpec(recipe=recipe, data_dir=folder, run_dir=folder / "r", runs_dir=folder)
    return PreparedStart.of(spec, derive_run(recipe, 1, ROOMY), Machine(ROOMY, 1)).spec.costs


def saver(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("llmrecipes.train.stage.AsyncSaver", recorder)
    for name in ("checkpoint.saver.saver_group", "checkpoint.saver.claim"):
        monkeypatch.setattr(f"llmrecipes.{name}", lambda *_: None)
    monkeypatch.setattr("llmrecipes.train.local_checkpoints.choose", lambda *_, **__: Start(None))
    engine = SimpleNamespace(recipe=recipe, close=lambda: None, checkpoint_format=lambda: None)
    backend = SimpleNamespace(
        platform=lambda _: SimpleNamespace(name="cpu"),
        connect=lambda *_: nullcontext(SimpleNamespace(size=1, is_first=True)),
        lay_out=lambda *_: nullcontext(SimpleNamespace(size=1, is_first=True)),
        build=lambda *_: engine,
    )
    for name in ("worker", "stage"):
        monkeypatch.setattr(f"llmrecipes.train.{name}.backend", lambda _: backend)
    for name in ("data.folder.prepared.open_prepared", "train.stage.open_loaders"):
        monkeypatch.setattr(f"llmrecipes.{name}", lambda *_, **__: None)
    with pytest.raises(Recorded) as found:
        worker.run(RunSpec(recipe=recipe, data_dir=folder, run_dir=folder / "r", runs_dir=folder))
    told = found.value.args[1]
    assert callable(told.pop("saved"))  # of the observers of this start, which are others each time
    return told


def given(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The folder whose weights a new run starts from."""
    monkeypatch.setattr(
        "llmrecipes.hf.weights.open_weights", lambda path, _: SimpleNamespace(path=str(path), close=lambda: None)
    )
    with initial_weights(RunSpec(recipe=recipe, data_dir=folder, run_dir=folder, runs_dir=folder)) as found:
        return None if found is None else str(vars(found)["path"])


def backend_of(recipe: Recipe, *_: Any) -> str:
    return type(backends.backend(recipe)).__name__


def deepspeed(recipe: Recipe, *_: Any) -> dict[str, Any]:
    return deepspeed_config(derive(recipe, 2, TWO_NODES))


def ranks_of_a_start(recipe: Recipe, *_: Any) -> int:
    return default_world_size(recipe, ROOMY)


def left_out(recipe: Recipe, *_: Any) -> list[int]:
    watch = telemetry.straggler_watch(derive(recipe, 4, NODE))
    assert watch is not None
    for _report in range(3):
        watch.add(np.array([1.0, 1.0, 1.0, 5.0]))
    return watch.slow_for(recipe.faults.straggler_exclude_reports or 10)


def grace(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(workflow, "run_ranks", recorder)
    (folder / "r" / "logs").mkdir(parents=True, exist_ok=True)
    with pytest.raises(Recorded) as found:
        spec = RunSpec(recipe=recipe, data_dir=folder, run_dir=folder / "r", runs_dir=folder)
        workflow.start(PreparedStart.of(spec, derive_run(recipe, 1, ROOMY), Machine(ROOMY, 1)), separate_process=True)
    return float(found.value.args[1]["grace"].seconds)


@dataclass
class Ran:
    """What a loop did, by step."""

    saved: list[int] = field(default_factory=list)
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)

    def save(self, _state: object, info: Any) -> None:
        self.saved.append(info.step)

    def poll(self) -> list[Any]:
        return []

    wait = poll

    def step(self, metrics: Any) -> None:
        self.trained.append((metrics.step, metrics.consumed_samples))

    def eval(self, metrics: Any) -> None:
        self.evaluated.append((metrics.step, metrics.valid_loss))

    def note(self, _note: object) -> None: ...


def loop(recipe: Recipe, *_: Any) -> dict[str, Any]:
    engine, ran = engine_of(recipe), Ran()
    batches: Any = random_batches
    fed = DataLoaders(train=lambda _: batches(recipe), valid=lambda: batches(recipe), bits_per_byte=lambda loss: loss)
    here: Any = SimpleNamespace(size=1, rank=0, is_first=True, data_parallel_size=1)
    sink: Any = ran
    Loop(
        engine.plan, engine, here, fed, sink, sink, StopRequest(), recipe_hash="", peak_flops=None,
    ).run(Progress())  # fmt: skip
    engine.close()
    return asdict(ran)


def updated_groups(recipe: Recipe, *_: Any) -> list[tuple[float, float, int]]:
    engine: Any = engine_of(recipe)
    groups = [
        (group["max_lr"], group["wd_mult"], sum(each.numel() for each in group["params"]))
        for group in engine.optimizer.param_groups
    ]
    engine.close()
    return groups


def watched_set(recipe: Recipe, *_: Any) -> float | None:
    losses = {"near": 1.0, "other": 2.0}
    return after_evaluation(Monitored(), 1, losses, recipe.train).loss


def sampled(recipe: Recipe) -> Iterator[int]:
    """Steps whose record has norms of layers."""
    engine: Any = engine_of(recipe)
    batches = random_batches(recipe)
    for step in range(1, 6):
        engine.parts.start(step)
        engine.train_step(batches)
        if "layers" in engine.parts.fields(Progress(step=step - 1)):
            yield step
    engine.close()


def local(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str] | None:
    """When and where a run saves on its nodes."""
    monkeypatch.chdir(folder)
    run = Run(folder / "r")
    run.path.mkdir(exist_ok=True)
    opened = open_local(derive(recipe, 1, ROOMY), run, saver_group())
    return None if opened is None else (opened.interval, opened.folder.parent.name)


def at_start(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run is evaluated before its first step."""
    monkeypatch.setattr("llmrecipes.train.agreement.dist.broadcast_object_list", lambda *_, **__: None)
    first: Any = SimpleNamespace(is_first=True)
    return evaluations.evaluation_due(0, recipe, folder / "metrics.jsonl", first, Monitored())


def exporting(recipe: Recipe, folder: Path, *_: Any) -> set[int] | None:
    """Saved steps that are exported."""
    if recipe.checkpoint.also_export is None:
        return None
    store = CheckpointStore(folder)
    with observer(Exports, recipe, folder) as exports:
        exports.joined = SimpleNamespace(store=store)  # type: ignore[assignment]
        for step in (1000, 2000):
            exports.saved(step)
    return store.held


def copying(recipe: Recipe, folder: Path, *_: Any) -> bool:
    """Whether checkpoints are copied to a store."""
    spec: Any = SimpleNamespace(recipe=recipe)
    return Copies.wanted(spec)


def full_disk(recipe: Recipe, *_: Any) -> list[int]:
    """Steps that a run tries to save on a disk that stays full."""
    engine, ran = engine_of(recipe), Ran()
    reports: list[SaveReport] = []

    def save(state: object, info: Any) -> None:
        ran.save(state, info)
        reports.append(SaveReport(info.step, 0.0, None, "full"))

    def poll() -> list[SaveReport]:
        ended = reports.copy()
        reports.clear()
        return ended

    failed: Any = SimpleNamespace(save=save, poll=poll, wait=poll)
    batches: Any = random_batches
    fed = DataLoaders(train=lambda _: batches(recipe), valid=None, bits_per_byte=lambda loss: loss)
    here: Any = SimpleNamespace(size=1, rank=0, is_first=True, data_parallel_size=1)
    sink: Any = ran
    loop = Loop(
        engine.plan, engine, here, fed, sink, failed, StopRequest(), recipe_hash="", peak_flops=None,
    )  # fmt: skip
    code = ExitCode.DONE
    try:
        loop.run(Progress())
    except UserError as ended:
        code = ended.code
    assert code == ExitCode.STOP
    engine.close()
    return ran.saved


def faulty(recipe: Recipe, *_: Any) -> dict[str, Any]:
    """What a loop does when the loss of its ninth step is infinite once, and that of its eleventh high."""
    engine: Any = engine_of(recipe)
    ran, attempt, calls, rejected = Ran(), engine._attempt, [0], list[bool]()
    compared: list[int] = []

    def broken(batches: Any, stop: Any, accept: Any) -> Any:
        calls[0] += 1
        high = 50.0 if calls[0] == 12 else 0.0
        result = attempt(batches, stop, accept and (lambda loss, norm: accept(loss + high, norm)))
        rejected.append(result.rejected)
        return replace(result, loss=math.inf) if calls[0] == 9 else result

    engine._attempt = broken
    engine.replica_fault = lambda: compared.append(engine.scheduler.num_steps)
    engine.result_fault = lambda: compared.append(-engine.scheduler.num_steps)
    batches: Any = random_batches
    fed = DataLoaders(train=lambda _: batches(recipe), valid=None, bits_per_byte=lambda loss: loss)
    here: Any = SimpleNamespace(size=1, rank=0, is_first=True, data_parallel_rank=0, data_parallel_size=1)
    sink: Any = ran
    code = ExitCode.DONE
    try:
        Loop(
            engine.plan, engine, here, fed, sink, sink, StopRequest(), recipe_hash="", peak_flops=None,
        ).run(Progress())  # fmt: skip
    except UserError as ended:
        code = ended.code
    engine.close()
    return {"code": code, "rejected": rejected, "compared": compared, **asdict(ran)}


def wrong_gradients(recipe: Recipe, *_: Any) -> tuple[bool, int]:
    """Whether gradients are compared, and the code with which a run ends whose copies have different ones."""
    engine: Any = engine_of(recipe)
    check = engine.parts.the(GradientCheck)
    due, code = check.due, ExitCode.DONE
    check._fault = GradientFault(1.0, 1.0, False, (), ("a (1 to 2)",))
    try:
        require_right_gradients(1, engine, NoTracker())
    except UserError as ended:
        code = ended.code
    engine.close()
    return due, code


def rewound(recipe: Recipe, folder: Path, *_: Any) -> list[Any]:
    """Where a run goes back to from two spikes, and the code with which it stops."""
    here: Any = SimpleNamespace(is_first=True)
    store: Any = SimpleNamespace(
        entries=lambda: [SimpleNamespace(step=step) for step in (0, 190, 195)], withdraw=lambda _: []
    )
    run = RunFiles(folder / str(recipe.faults.loss_spike_max_rewinds) / str(recipe.faults.loss_spike_rewind_steps))
    run.path.mkdir(parents=True, exist_ok=True)
    run.rewinds.unlink(missing_ok=True)
    found: list[Any] = []
    for step in (200, 201):
        try:
            spike = StepSpike("loss", 9.0, 1.0, 2.0)
            Rewinds(recipe, run, store, here).require(spike, Progress(step=step), step * 8)
        except Rewind as back:
            found += [back.entry.step, back.skipped]
        except UserError as ended:
            found.append(ended.code)
    return found


def harness_asked(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[Any] = []
    monkeypatch.setattr("llmrecipes.evaluation.tasks.load_tasks", lambda names, **_: names)
    monkeypatch.setattr("llmrecipes.evaluation.harness.run_tasks", lambda _, *given, **how: asked.append((given, how)))
    engine: Any = SimpleNamespace(params_synced=nullcontext, scorer=lambda: SimpleNamespace(positions=8))
    with observer(TaskEvaluations, recipe, folder, engine=engine) as each:
        each.run(1)
        return asked, [step for step in range(1, 13) if each.due(step)]


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Another value of a key, what shows it, what the recipe has besides, and what has to change with the key."""

    value: Any
    see: See
    base: Mapping[str, Any] = field(default_factory=dict)
    along: Mapping[str, Any] = field(default_factory=dict)


LOCAL = {"checkpoint.non_persistent_save_interval": 3, "checkpoint.non_persistent_local_ckpt_dir": "one"}
SWIGLU = {"model.activation_func": "silu", "model.gated_linear_unit": True}
ROPE = {"model.position_embedding_type": "rope"}
SCALED = {**ROPE, "model.rope_scaling": True}
YARN = {
    "model.position_embedding_type": "yarn", "model.yarn_rotary_scaling_factor": 4.0,
    "model.yarn_original_max_position_embeddings": 16, "model.rotary_base": 100.0,
}  # fmt: skip
MOE = {"model.num_moe_experts": 4, "model.add_bias_linear": False}
SIGMOID = {**MOE, "model.moe_router_score_function": "sigmoid"}
GROUPS = {**MOE, "model.num_moe_experts": 8, "model.moe_router_num_groups": 4, "model.moe_router_group_topk": 1}
MLA = {
    **ROPE, "model.multi_latent_attention": True, "model.kv_lora_rank": 32, "model.qk_head_dim": 16,
    "model.qk_pos_emb_head_dim": 16, "model.v_head_dim": 16, "model.add_bias_linear": False,
}  # fmt: skip
MLA_YARN = {**MLA, "model.rope_type": "yarn"}
MUP = {"model.use_mup": True}
FLEX = {**MOE, "model.moe_token_dispatcher_type": "flex", "layout.expert_model_parallel_size": 2}
HIERARCHY = {
    "layout.context_parallel_size": 4, "layout.cp_comm_type": "a2a+p2p",
    "layout.hierarchical_context_parallel_sizes": [4, 1],
}  # fmt: skip
OVERLAP = {"layout.overlap_grad_reduce": True, "layout.overlap_param_gather": True}
CHUNKS = {"layout.virtual_pipeline_model_parallel_size": 2}
LORA = {"lora.rank": 4}
DISTILL = {"distill.teacher": "a"}
LAYERS = {**DISTILL, "distill.layers": [[2, 2]]}
ATTACK = {"train.adversarial": {"type": "pgd", "epsilon": 0.5, "alpha": 0.3, "steps": 2}}
DPO = {"dpo": {}, "data.sources.N.type": "docstrings", "data.chat": {"preference": {}, "packing": False}}
MTP = {**ROPE, "model.mtp_num_layers": 1}
TP = {"layout.tensor_model_parallel_size": 2}
PP = {"layout.pipeline_model_parallel_size": 2, "model.num_layers": 8, "train.global_batch_size": 8}
EMBEDDING, LOSS = (f"layout.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
SEVEN = {**PP, "model.num_layers": 7}
FULL = {
    "layout.recompute_granularity": "full", "layout.recompute_method": "uniform", "layout.recompute_num_layers": 1,
}  # fmt: skip
FP16 = {"train.precision": "fp16"}
BF16 = {"train.precision": "bf16"}
FP8 = {**BF16, "train.fp8": "e4m3"}
GRAPHS = {**BF16, "layout.cuda_graph_impl": "transformer_engine"}
STAGE = {"stages.N.name": "s"}
LISTS = ("groups", "stages", "steps", "valid_sources")
"""Keys that are lists of sections, of which a case has one."""
GROUPED = {
    "optimizer.groups.N.pattern": "embedding.*", "optimizer.groups.N.lr_mult": 0.5, "optimizer.groups.N.wd_mult": 0.5,
}  # fmt: skip
MONITORED = {
    "train.target_loss": 1.0, "train.monitor": "near",
    "data.valid_sources": [{"type": "text", "path": label, "label": label} for label in ("near", "other")],
}  # fmt: skip
TASKS = {"train.eval_tasks": {"tasks": ["arc_easy"], "interval": 4}}
WSD = {"scheduler.lr_decay_style": "WSD", "scheduler.lr_wsd_decay_iters": 4}
HUB = {"data.sources.N.type": "hub", "data.sources.N.path": "allenai/c4"}
LABEL = {"data.sources.N.label_key": "a", "data.sources.N.label_value": "de"}
FILES = {"data.sources.N.type": "jsonl", "data.sources.N.path": "a"}
HELD_OUT = {
    f"data.valid_sources.N.{key}": value for key, value in {"type": "jsonl", "path": "a", "label": "code"}.items()
}
HELD_OUT_LABEL = HELD_OUT | {"data.valid_sources.N.label_key": "a", "data.valid_sources.N.label_value": "de"}
HELD_OUT_HUB = HELD_OUT | {"data.valid_sources.N.type": "hub"}
FIM = {"data.sources.N.fim_rate": 0.5}
CURRICULUM = {"data.curriculum": {"score": "length"}}
LOSSES = {"data.curriculum": {"score": "loss", "scores": "a"}}
CHAT = {"data.sources.N.type": "docstrings", "data.chat": {}}
TOKENIZER = {"data.tokenizer.type": "huggingface", "data.tokenizer.path": "gpt2"}
NEAR = {"data.steps.N.type": "near_duplicates"}
CLASSIFIER = {
    "data.steps.N.type": "classifier",
    "data.steps.N.model": "a.bin",
    "data.steps.N.labels": ["good"],
}
WANDB = {"tracking.wandb": True}

UNSHARDED = {"layout.use_distributed_optimizer": False}
QK_CLIP = {"optimizer.qk_clip_threshold": 0.01}
MUON = {**UNSHARDED, "optimizer.optimizer": "muon"}
PRECISE = {"train.precision": "bf16", "optimizer.use_precision_aware_optimizer": True}
TP_OVERLAP = {
    "train.precision": "bf16", "layout.tensor_model_parallel_size": 2, "layout.sequence_parallel": True,
}  # fmt: skip
EP_OVERLAP = {**MOE, "train.precision": "bf16", "layout.expert_model_parallel_size": 2}
ZERO1, ZERO2, ZERO3 = ({"layout.engine": "deepspeed", "layout.zero.stage": stage} for stage in (1, 2, 3))
NVME = {**ZERO3, "layout.zero.offload_optimizer": "nvme", "layout.zero.nvme_path": "/nvme"}

PERCENTILE = {**SEARCH, "search.pruner": {"type": "PercentilePruner", "percentile": 25.0}}
HALVING = {**SEARCH, "search.pruner": {"type": "SuccessiveHalvingPruner"}}
WILCOXON = {**SEARCH, "train.eval_interval": 1, "search.pruner": {"type": "WilcoxonPruner"}}
PATIENT = {**SEARCH, "search.pruner": {"type": "PatientPruner", "patience": 2}}
CMA = {
    **SEARCH, "search.sampler": {"type": "CmaEsSampler", "seed": 1},
    "search.space": [*SEARCH["search.space"], {"key": "optimizer.weight_decay", "low": 0.0, "high": 1.0}],
}  # fmt: skip
QMC = {**SEARCH, "search.sampler": {"type": "QMCSampler", "seed": 1}}
EARLIER = {**SEARCH, "search.source_studies": [{"study_name": "s"}]}

CASES: dict[str, Case] = {
    "layout.engine": Case("plain", backend_of),
    "model.num_layers": Case(3, config),
    "model.hybrid_layer_pattern": Case("*-|*-", plan),
    "model.hidden_size": Case(128, config),
    "model.num_attention_heads": Case(2, config),
    "model.seq_length": Case(32, model),
    "model.vocab_size": Case(1000, plan),
    "model.ffn_hidden_size": Case(96, config),
    "model.num_query_groups": Case(2, config),
    "model.kv_channels": Case(32, config),
    "model.max_position_embeddings": Case(128, plan),
    "model.position_embedding_type": Case("rope", model),
    "model.rotary_base": Case(500.0, model, ROPE),
    "model.rotary_percent": Case(0.5, model, ROPE),
    "model.rope_scaling": Case(True, model, ROPE),
    "model.rope_scaling_factor": Case(2.0, model, SCALED),
    "model.rotary_seq_len_interpolation_factor": Case(4.0, model, ROPE),
    "model.yarn_rotary_scaling_factor": Case(8.0, model, YARN),
    "model.yarn_original_max_position_embeddings": Case(64, model, YARN),
    "model.yarn_beta_fast": Case(1.0, model, YARN),
    "model.yarn_beta_slow": Case(0.01, model, YARN),
    "model.yarn_mscale": Case(2.0, model, YARN),
    "model.yarn_mscale_all_dim": Case(2.0, model, YARN),
    "model.yarn_correction_range_round_to_int": Case(False, model, YARN),
    "model.normalization": Case("RMSNorm", config),
    "model.layernorm_epsilon": Case(1e-3, config),
    "model.activation_func": Case("silu", config),
    "model.gated_linear_unit": Case(True, config),
    "model.add_bias_linear": Case(False, config),
    "model.add_qkv_bias": Case(True, config, {"model.add_bias_linear": False}),
    "model.qk_layernorm": Case(True, config),
    "model.share_embeddings_and_output_weights": Case(False, plan),
    "model.attention_dropout": Case(0.5, config),
    "model.hidden_dropout": Case(0.5, config),
    "model.layer_drop": Case(0.9, first_loss),
    "model.init_method": Case("xavier_uniform", model),
    "model.init_method_std": Case(0.1, model),
    "model.use_mup": Case(True, config),
    "model.mup_base_hidden_size": Case(16, model, MUP),
    "model.mup_embedding_mult": Case(3.0, model, MUP),
    "model.mup_output_mult": Case(3.0, model, MUP),
    "model.mup_base_head_dim": Case(4.0, config, MUP),
    "model.mup_attn_scale_power": Case(0.5, config, MUP),
    "model.num_moe_experts": Case(8, config, MOE),
    "model.moe_router_topk": Case(3, config, MOE),
    "model.moe_ffn_hidden_size": Case(96, config, MOE),
    "model.moe_shared_expert_intermediate_size": Case(96, config, MOE),
    "model.no_rope_freq": Case([0, 1], config, ROPE),
    "model.activation_func_clamp_value": Case(7.0, config, {"model.gated_linear_unit": True}),
    "model.glu_linear_offset": Case(1.0, config, {"model.gated_linear_unit": True}),
    "model.softmax_type": Case("learnable", config_on_cpu),
    "model.window_size": Case([3, 0], config),
    "model.window_attn_skip_freq": Case(2, config, {"model.window_size": [3, 0]}),
    "model.moe_layer_freq": Case([0, 1], config, MOE),
    "model.moe_router_load_balancing_type": Case("seq_aux_loss", config, MOE),
    "model.moe_aux_loss_coeff": Case(0.1, config, MOE),
    "model.moe_z_loss_coeff": Case(0.1, config, MOE),
    "model.moe_router_enable_expert_bias": Case(True, config, SIGMOID),
    "model.moe_router_bias_update_rate": Case(0.1, config, {**SIGMOID, "model.moe_router_enable_expert_bias": True}),
    "model.moe_router_score_function": Case("sigmoid", config, MOE),
    "model.moe_router_pre_softmax": Case(True, config, MOE),
    "model.moe_router_topk_scaling_factor": Case(2.0, config, MOE),
    "model.moe_router_num_groups": Case(2, config, GROUPS),
    "model.moe_router_group_topk": Case(2, config, GROUPS),
    "model.moe_router_dtype": Case("fp64", config, MOE),
    "model.moe_input_jitter_eps": Case(0.1, config, MOE),
    "model.moe_expert_capacity_factor": Case(2.0, config, MOE),
    "model.moe_pad_expert_input_to_capacity": Case(True, config, {**MOE, "model.moe_expert_capacity_factor": 2.0}),
    "model.moe_token_drop_policy": Case("position", config, {**MOE, "model.moe_expert_capacity_factor": 2.0}),
    "model.moe_token_dispatcher_type": Case("allgather", config, MOE),
    "model.multi_latent_attention": Case(True, config, ROPE),
    "model.q_lora_rank": Case(32, config, MLA),
    "model.kv_lora_rank": Case(64, config, MLA),
    "model.qk_head_dim": Case(32, config, MLA),
    "model.qk_pos_emb_head_dim": Case(32, config, MLA),
    "model.v_head_dim": Case(32, config, MLA),
    "model.rope_type": Case("yarn", config, MLA),
    "model.rotary_scaling_factor": Case(8.0, config, MLA_YARN),
    "model.original_max_position_embeddings": Case(64, config, MLA_YARN),
    "model.beta_fast": Case(16.0, config, MLA_YARN),
    "model.beta_slow": Case(2.0, config, MLA_YARN),
    "model.mscale": Case(2.0, config, MLA_YARN),
    "model.mscale_all_dim": Case(1.0, config, MLA_YARN),
    "model.mtp_num_layers": Case(2, config, MTP),
    "model.mtp_loss_scaling_factor": Case(0.5, config, MTP),
    "model.make_vocab_size_divisible_by": Case(999, plan),
    "model.transformer_impl": Case("local", implementation),
    "layout.tensor_model_parallel_size": Case(2, config),
    "layout.pipeline_model_parallel_size": Case(4, config, PP),
    "layout.virtual_pipeline_model_parallel_size": Case(2, config, PP),
    "layout.context_parallel_size": Case(2, config),
    "layout.expert_model_parallel_size": Case(2, config, MOE),
    "layout.expert_tensor_parallel_size": Case(
        1, config, {**MOE, **TP, "layout.sequence_parallel": True, "layout.expert_model_parallel_size": 2}
    ),
    "layout.sequence_parallel": Case(True, config, TP),
    "layout.num_layers_in_first_pipeline_stage": Case(2, config, PP),
    "layout.num_layers_in_last_pipeline_stage": Case(2, config, PP),
    # One of them has to be counted, or 7 layers would not divide over 2 stages.
    "layout.account_for_embedding_in_pipeline_split": Case(True, config, {**SEVEN, LOSS: True}, {LOSS: False}),
    "layout.account_for_loss_in_pipeline_split": Case(True, config, {**SEVEN, EMBEDDING: True}, {EMBEDDING: False}),
    "layout.pipeline_model_parallel_layout": Case("Et*5|t*3L", config, PP),
    "layout.use_distributed_optimizer": Case(False, optimizer),
    "layout.overlap_grad_reduce": Case(True, optimizer),
    "layout.overlap_param_gather": Case(True, optimizer, {"layout.overlap_grad_reduce": True}),
    "train.grad_reduce_in_fp32": Case(False, optimizer, {"train.precision": "bf16"}),
    "lora.rank": Case(8, plan, LORA),
    "lora.alpha": Case(32.0, adapted, LORA),
    "lora.dropout": Case(0.5, adapted, LORA),
    "lora.target_modules": Case(["linear_qkv"], plan, LORA),
    "distill.teacher": Case("b", located_teacher, DISTILL),
    "distill.model": Case({"num_layers": 3}, plan, DISTILL),
    "distill.alpha": Case(0.9, first_loss, DISTILL),
    "distill.loss": Case("mse", first_loss, DISTILL),
    "distill.temperature": Case(2.0, first_loss, DISTILL),
    "distill.top_k": Case(3, first_loss, DISTILL),
    "distill.logits": Case("there", plan, {**DISTILL, "distill.top_k": 3}),
    "distill.layers": Case([[1, 2]], first_loss, DISTILL),
    "distill.layers_loss": Case("cosine", first_loss, LAYERS),
    "distill.layers_weight": Case(0.5, first_loss, LAYERS),
    "dpo.beta": Case(0.5, compared, DPO),
    "dpo.loss_type": Case("ipo", compared, DPO),
    "dpo.label_smoothing": Case(0.2, compared, {**DPO, "dpo": {"loss_type": "robust"}}),
    "dpo.reference": Case("b", located_teacher, {**DPO, "dpo": {"reference": "a"}}),
    "dpo.reference_free": Case(True, compared, DPO),
    "dpo.reference_log_probs": Case("there", plan, DPO),
    "qat.scheme": Case("int8", first_loss, {"qat.scheme": "int4", "qat.group_size": 16}, {"qat.group_size": None}),
    "qat.group_size": Case(8, first_loss, {"qat.scheme": "int4", "qat.group_size": 16}),
    "qat.start_step": Case(1, first_loss, {"qat.scheme": "int8"}),
    "layout.zero.stage": Case(3, deepspeed, ZERO1),
    "layout.zero.offload_optimizer": Case("cpu", deepspeed, ZERO2),
    "layout.zero.offload_param": Case("cpu", deepspeed, ZERO3),
    "layout.zero.nvme_path": Case("/scratch", deepspeed, NVME),
    "layout.zero.reduce_bucket_size": Case(1000, deepspeed, ZERO1),
    "layout.zero.allgather_bucket_size": Case(1000, deepspeed, ZERO2),
    "layout.zero.overlap_comm": Case(True, deepspeed, ZERO2),
    "layout.zero.sub_group_size": Case(1000, deepspeed, ZERO3),
    "layout.zero.stage3_prefetch_bucket_size": Case(1000, deepspeed, ZERO3),
    "layout.zero.stage3_param_persistence_threshold": Case(1000, deepspeed, ZERO3),
    "layout.zero.stage3_max_live_parameters": Case(1000, deepspeed, ZERO3),
    "layout.zero.stage3_max_reuse_distance": Case(1000, deepspeed, ZERO3),
    "layout.zero.zero_hpz_partition_size": Case(2, deepspeed, ZERO3),
    "train.zero_quantized_weights": Case(True, deepspeed, ZERO3),
    "train.zero_quantized_gradients": Case(
        True, deepspeed, {**ZERO3, "train.precision": "fp16", "train.grad_reduce_in_fp32": False}
    ),
    "model.extra": Case({"softmax_scale": 0.5}, model),
    "layout.zero.extra": Case({"comms_logger": {"enabled": True}}, deepspeed, ZERO2),
    "layout.bias_activation_fusion": Case(True, config, SWIGLU),
    "layout.bias_dropout_fusion": Case(True, config),
    "layout.apply_rope_fusion": Case(False, config_on_gpu, ROPE),
    "layout.cross_entropy_loss_fusion": Case(True, config),
    "layout.gradient_accumulation_fusion": Case(False, config_on_gpu),
    "layout.attention_backend": Case("flash", config_on_gpu),
    "layout.cp_comm_type": Case("all_gather", config_on_gpu, {"layout.context_parallel_size": 2}),
    "layout.hierarchical_context_parallel_sizes": Case([2, 2], groups, HIERARCHY),
    "layout.ddp_bucket_size": Case(1000, optimizer, {"layout.overlap_grad_reduce": True}),
    "layout.ddp_pad_buckets_for_high_nccl_busbw": Case(True, optimizer),
    "layout.align_param_gather": Case(False, gradients, {**PP, **OVERLAP, **CHUNKS}),
    "train.reduce_scatter_with_fp32_accumulation": Case(
        True, gradients, {"train.precision": "bf16", "train.grad_reduce_in_fp32": False}
    ),
    "layout.moe_permute_fusion": Case(False, config_on_gpu, MOE),
    "layout.moe_router_fusion": Case(False, config_on_gpu, MOE),
    "layout.moe_shared_expert_overlap": Case(True, config, {**MOE, "model.moe_shared_expert_intermediate_size": 64}),
    "layout.moe_flex_dispatcher_backend": Case("hybridep", config_on_gpu, FLEX),
    "layout.manual_gc": Case(True, garbage),
    "layout.manual_gc_interval": Case(2, garbage, {"layout.manual_gc": True}),
    "layout.deterministic_mode": Case(True, config),
    "layout.high_priority_stream_groups": Case(["ep"], groups),
    "layout.nccl_communicator_config_path": Case("nccl.yaml", groups),
    "layout.tp_comm_overlap": Case(True, config_on_gpu, TP_OVERLAP),
    "layout.tp_comm_overlap_ag": Case(False, config_on_gpu, {**TP_OVERLAP, "layout.tp_comm_overlap": True}),
    "layout.tp_comm_overlap_rs": Case(False, config_on_gpu, {**TP_OVERLAP, "layout.tp_comm_overlap": True}),
    "layout.tp_comm_bulk_dgrad": Case(False, config_on_gpu, {**TP_OVERLAP, "layout.tp_comm_overlap": True}),
    "layout.tp_comm_bulk_wgrad": Case(False, config_on_gpu, {**TP_OVERLAP, "layout.tp_comm_overlap": True}),
    "layout.overlap_moe_expert_parallel_comm": Case(True, config_on_gpu, EP_OVERLAP),
    "layout.delay_wgrad_compute": Case(
        True, config_on_gpu, {**EP_OVERLAP, "layout.overlap_moe_expert_parallel_comm": True}
    ),
    "train.fp8": Case("e4m3", config_on_gpu, BF16),
    "train.fp8_recipe": Case("tensorwise", config_on_gpu, FP8),
    "train.first_last_layers_bf16": Case(True, config_on_gpu, FP8),
    "train.num_layers_at_start_in_bf16": Case(2, config_on_gpu, {**FP8, "train.first_last_layers_bf16": True}),
    "train.num_layers_at_end_in_bf16": Case(2, config_on_gpu, {**FP8, "train.first_last_layers_bf16": True}),
    "layout.cuda_graph_impl": Case("transformer_engine", config_on_gpu, BF16),
    "layout.cuda_graph_modules": Case(["attn"], config_on_gpu, GRAPHS),
    "layout.cuda_graph_warmup_steps": Case(5, config_on_gpu, GRAPHS),
    "train.train_iters": Case(4, loop),
    "layout.micro_batch_size": Case(4, plan),
    "train.global_batch_size": Case(4, loop),
    "train.rampup_batch_size": Case([4, 2, 16], loop),
    "train.step_batch_size_schedule": Case("0:4 1K:8", loop),
    "train.pretrained": Case("./model", given),
    "train.precision": Case("bf16", config),
    "train.seed": Case(7, model),
    "train.eval_interval": Case(3, loop),
    "train.eval_iters": Case(1, loop),
    "train.eval_at_start": Case(True, at_start),
    "train.eval_tasks.tasks": Case(["hellaswag"], harness_asked, TASKS),
    "train.eval_tasks.interval": Case(5, harness_asked, TASKS),
    "train.eval_tasks.limit": Case(10, harness_asked, TASKS),
    "train.eval_tasks.num_fewshot": Case(3, harness_asked, TASKS),
    "train.monitor": Case("other", watched_set, MONITORED),
    "train.early_stop.patience": Case(3, loop, {"train.early_stop": {"patience": 1, "min_delta": 99.0}}),
    "train.early_stop.min_delta": Case(99.0, loop, {"train.early_stop": {"patience": 1}}),
    "train.target_loss": Case(99.0, loop),
    "train.log_interval": Case(5, tracking),
    "train.label_smoothing": Case(0.5, model),
    "train.z_loss_coeff": Case(0.5, model),
    "train.adversarial.type": Case("freelb", first_loss, ATTACK),
    "train.adversarial.epsilon": Case(0.1, first_loss, ATTACK),
    "train.adversarial.alpha": Case(0.1, first_loss, ATTACK),
    "train.adversarial.steps": Case(3, first_loss, ATTACK),
    "train.adversarial.norm": Case("linf", first_loss, ATTACK),
    "train.keep_zeros": Case(True, zeros_after_a_step),
    "train.freeze": Case(["embedding.*"], plan),
    "layout.recompute_granularity": Case("selective", config_on_cpu, {"model.attention_dropout": 0.1}),
    "layout.recompute_modules": Case(["layernorm"], config_on_cpu, {"layout.recompute_granularity": "selective"}),
    "layout.recompute_method": Case("block", config, FULL),
    "layout.recompute_num_layers": Case(2, config, FULL),
    "layout.torch_compile": Case(True, config),
    "layout.loss_chunk_tokens": Case(64, plan),
    "train.initial_loss_scale": Case(16.0, optimizer, FP16),
    "train.min_loss_scale": Case(2.0, optimizer, FP16),
    "train.loss_scale_window": Case(7, optimizer, FP16),
    "train.hysteresis": Case(1, optimizer, FP16),
    "train.elastic": Case([2, 4], ranks_of_a_start),
    "train.exit_grace_seconds": Case(1.0, grace),
    "optimizer.lr": Case(1e-2, schedule),
    "optimizer.min_lr": Case(1e-4, schedule),
    "optimizer.weight_decay": Case(0.0, optimizer),
    "optimizer.optimizer": Case("sgd", kind, UNSHARDED),
    "optimizer.sgd_momentum": Case(0.5, kind, {**UNSHARDED, "optimizer.optimizer": "sgd"}),
    "optimizer.qk_clip": Case(True, clipped, along=QK_CLIP),
    "optimizer.qk_clip_alpha": Case(0.25, clipped, {**QK_CLIP, "optimizer.qk_clip": True}),
    "optimizer.qk_clip_threshold": Case(0.02, clipped, {**QK_CLIP, "optimizer.qk_clip": True}),
    "optimizer.muon_momentum": Case(0.5, kind, MUON),
    "optimizer.muon_nesterov": Case(True, kind, MUON),
    "optimizer.muon_num_ns_steps": Case(6, kind, {**MUON, "optimizer.muon_coefficient_type": "simple"}),
    "optimizer.muon_coefficient_type": Case("polar_express", kind, MUON),
    "optimizer.muon_scale_mode": Case("unit_rms_norm", kind, MUON),
    "optimizer.muon_extra_scale_factor": Case(0.2, kind, MUON),
    "optimizer.muon_split_qkv": Case(False, kind, MUON),
    "optimizer.muon_fp32_matmul_prec": Case("highest", kind, MUON),
    "optimizer.muon_tp_mode": Case("distributed", kind, MUON),
    "optimizer.adam_beta1": Case(0.5, optimizer),
    "optimizer.adam_beta2": Case(0.5, optimizer),
    "optimizer.adam_eps": Case(1e-4, optimizer),
    "optimizer.clip_grad": Case(0.5, optimizer),
    "optimizer.ema_decay": Case(0.5, plan),
    "optimizer.use_precision_aware_optimizer": Case(True, moments, {"train.precision": "bf16"}),
    "optimizer.exp_avg_dtype": Case("bf16", moments, PRECISE),
    "optimizer.exp_avg_sq_dtype": Case("bf16", moments, PRECISE),
    "optimizer.groups.N.pattern": Case("decoder.*", updated_groups, GROUPED),
    "optimizer.groups.N.lr_mult": Case(0.0, updated_groups, GROUPED),
    "optimizer.groups.N.wd_mult": Case(0.0, updated_groups, GROUPED),
    "scheduler.lr_decay_style": Case("linear", schedule),
    "scheduler.lr_warmup_iters": Case(3, schedule),
    "scheduler.lr_warmup_init": Case(1e-4, schedule, {"scheduler.lr_warmup_iters": 4}),
    "scheduler.lr_warmup_style": Case(
        "exponential", schedule, {"scheduler.lr_warmup_iters": 4, "scheduler.lr_warmup_init": 1e-5}
    ),
    "scheduler.lr_polynomial_power": Case(3.0, schedule, {"scheduler.lr_decay_style": "polynomial"}),
    "scheduler.lr_decay_iters": Case(6, schedule),
    "scheduler.lr_wsd_decay_iters": Case(6, schedule, WSD),
    "scheduler.lr_wsd_decay_style": Case("linear", schedule, WSD),
    "data.sources.N.type": Case("parquet", tokens, FILES),
    "data.sources.N.path": Case("b", tokens, FILES),
    "data.sources.N.name": Case("en", tokens, HUB),
    "data.sources.N.split": Case("validation", tokens, HUB),
    "data.sources.N.revision": Case("0" * 40, tokens, HUB),
    "data.sources.N.text_key": Case("body", tokens, FILES),
    "data.sources.N.weight": Case(3.0, order),
    "data.sources.N.label": Case("web", held_out_names, {"data.multiple_validation_sets": True}),
    "data.sources.N.max_tokens": Case(1000, tokens),
    "data.sources.N.fim_rate": Case(0.5, tokens),
    "data.sources.N.label_key": Case("language", tokens, FILES | LABEL),
    "data.sources.N.label_value": Case("en", tokens, FILES | LABEL),
    "data.fim.spm_rate": Case(0.1, tokens, FIM),
    "data.fim.seed": Case(1, tokens, FIM),
    "data.fim.prefix_token": Case("<p>", tokens, FIM),
    "data.fim.middle_token": Case("<m>", tokens, FIM),
    "data.fim.suffix_token": Case("<s>", tokens, FIM),
    "data.curriculum.score": Case("compression_ratio", tokens, CURRICULUM),
    "data.curriculum.scores": Case("b", curriculum_losses, LOSSES),
    "data.curriculum.order": Case("descending", curriculum_order, CURRICULUM),
    "data.curriculum.windows": Case(2, curriculum_order, CURRICULUM),
    "data.curriculum.share": Case(0.5, curriculum_order, CURRICULUM),
    "data.multiple_validation_sets": Case(True, held_out_names),
    "data.valid_sources.N.fim_rate": Case(0.5, tokens, HELD_OUT),
    "data.valid_sources.N.label_key": Case("language", tokens, HELD_OUT_LABEL),
    "data.valid_sources.N.label_value": Case("en", tokens, HELD_OUT_LABEL),
    "data.valid_sources.N.type": Case("parquet", tokens, HELD_OUT),
    "data.valid_sources.N.path": Case("b", tokens, HELD_OUT),
    "data.valid_sources.N.name": Case("en", tokens, HELD_OUT_HUB),
    "data.valid_sources.N.split": Case("test", tokens, HELD_OUT_HUB),
    "data.valid_sources.N.revision": Case("0" * 40, tokens, HELD_OUT_HUB),
    "data.valid_sources.N.text_key": Case("body", tokens, HELD_OUT),
    "data.valid_sources.N.max_tokens": Case(1000, tokens, HELD_OUT),
    "data.valid_sources.N.label": Case("prose", tokens, HELD_OUT),
    "data.chat.messages_key": Case("talk", tokens, CHAT),
    "data.chat.prompt_key": Case("question", tokens, CHAT),
    "data.chat.completion_key": Case("answer", tokens, CHAT),
    "data.chat.template": Case("llama3", tokens, CHAT),
    "data.chat.chat_template": Case("a.jinja", tokens, CHAT),
    "data.chat.max_length": Case(32, tokens, CHAT),
    "data.chat.overlong": Case("drop", tokens, CHAT),
    "data.chat.packing": Case(False, batch_mask, CHAT),
    "data.chat.preference.chosen_key": Case("good", tokens, DPO),
    "data.chat.preference.rejected_key": Case("bad", tokens, DPO),
    "data.tokenizer.type": Case("huggingface", tokens, along={"data.tokenizer.path": "gpt2"}),
    "data.tokenizer.path": Case("gpt3", tokens, TOKENIZER),
    "data.tokenizer.revision": Case("0" * 40, tokens, TOKENIZER),
    "data.tokenizer.pattern": Case("llama3", tokens),
    "data.tokenizer.add_bos_token": Case(False, tokens, TOKENIZER),
    "data.min_characters": Case(9, tokens),
    "data.max_unreadable": Case(0.1, tokens),
    "data.max_characters": Case(9, tokens),
    "data.steps.N.type": Case("repetition", tokens, {"data.steps.N.type": "unicode"}),
    "data.steps.N.main_content": Case(False, tokens, {"data.steps.N.type": "html"}),
    "data.steps.N.unescape_html": Case(True, tokens, {"data.steps.N.type": "unicode"}),
    "data.steps.N.min_characters": Case(9, tokens, {"data.steps.N.type": "length", "data.steps.N.max_characters": 10}),
    "data.steps.N.max_characters": Case(9, tokens, {"data.steps.N.type": "length", "data.steps.N.min_characters": 1}),
    "data.steps.N.languages": Case(["de"], tokens, {"data.steps.N.type": "language", "data.steps.N.languages": ["en"]}),
    "data.steps.N.min_probability": Case(
        0.9, tokens, {"data.steps.N.type": "language", "data.steps.N.languages": ["en"]}
    ),
    "data.steps.N.paths": Case(["b"], tokens, {"data.steps.N.type": "decontaminate", "data.steps.N.paths": ["a"]}),
    "data.steps.N.tasks": Case(["b"], tokens, {"data.steps.N.type": "decontaminate", "data.steps.N.tasks": ["a"]}),
    "data.steps.N.ngram_words": Case(8, tokens, {"data.steps.N.type": "decontaminate", "data.steps.N.paths": ["a"]}),
    "data.steps.N.min_words": Case(9, tokens, {"data.steps.N.type": "gopher"}),
    "data.steps.N.max_words": Case(9999, tokens, {"data.steps.N.type": "gopher"}),
    "data.steps.N.terminal_punctuation": Case(False, tokens, {"data.steps.N.type": "c4"}),
    "data.steps.N.min_sentences": Case(3, tokens, {"data.steps.N.type": "c4"}),
    "data.steps.N.max_line_length": Case(500, tokens, {"data.steps.N.type": "code"}),
    "data.steps.N.max_mean_line_length": Case(80, tokens, {"data.steps.N.type": "code"}),
    "data.steps.N.model": Case("b.bin", tokens, CLASSIFIER),
    "data.steps.N.labels": Case(["bad"], tokens, CLASSIFIER),
    "data.steps.N.span_sentences": Case(3, tokens, {"data.steps.N.type": "duplicates"}),
    "data.steps.N.max_repeated_spans": Case(
        0.2, tokens, {"data.steps.N.type": "duplicates", "data.steps.N.span_sentences": 3}
    ),
    "data.steps.N.cut_spans": Case(True, tokens, {"data.steps.N.type": "duplicates", "data.steps.N.span_sentences": 3}),
    "data.steps.N.noise_rate": Case(0.2, tokens, {"data.steps.N.type": "noise"}),
    "data.steps.N.replacement": Case("unigram", tokens, {"data.steps.N.type": "noise"}),
    "data.steps.N.seed": Case(5, tokens, {"data.steps.N.type": "noise"}),
    "data.steps.N.temperature": Case(5.0, order, {"data.steps.N.type": "balance"}),
    "data.steps.N.max_epochs": Case(1.5, order, {"data.steps.N.type": "balance", "data.sources.N.weight": 1e6}),
    "data.steps.N.threshold": Case(0.7, tokens, NEAR),
    "data.steps.N.permutations": Case(64, tokens, NEAR),
    "data.steps.N.shingle_words": Case(3, tokens, NEAR),
    "data.split": Case([80.0, 10.0, 10.0], tokens),
    "data.num_workers": Case(3, loader),
    "data.prefetch_factor": Case(7, loader),
    "data.pin_memory": Case(False, loader),
    "checkpoint.save_interval": Case(3, loop),
    "checkpoint.async_save": Case(False, saver),
    "checkpoint.most_recent_k": Case(5, saver),
    "checkpoint.keep_interval": Case(2000, saver),
    "checkpoint.keep_best": Case(True, saver),
    "checkpoint.also_export": Case("hf", exporting),
    "checkpoint.also_export_interval": Case(2000, exporting, {"checkpoint.also_export": "hf"}),
    "checkpoint.copy_to": Case("s3://runs", copying),
    "checkpoint.max_failed_saves": Case(1, full_disk, {"checkpoint.save_interval": 2}),
    "checkpoint.non_persistent_save_interval": Case(5, local, LOCAL),
    "checkpoint.non_persistent_local_ckpt_dir": Case("other", local, LOCAL),
    "faults.rerun_mode": Case("disabled", faulty),
    "faults.rank_heartbeat_timeout": Case(1.0, lambda recipe, *_: watch_limits(recipe)),
    "faults.initial_rank_heartbeat_timeout": Case(1.0, lambda recipe, *_: watch_limits(recipe)),
    "faults.check_weight_hash_across_dp_replicas_interval": Case(3, faulty),
    "faults.check_results_across_dp_replicas_interval": Case(3, faulty),
    "faults.gradient_check_action": Case("alarm", wrong_gradients),
    "faults.straggler_threshold": Case(0.5, lambda recipe, *_: vars(telemetry.straggler_watch(planned(recipe)))),
    "faults.straggler_exclude_reports": Case(3, left_out),
    "faults.loss_spike_action": Case("skip", faulty, along={"faults.loss_spike_window": 8}),
    "faults.loss_spike_window": Case(8, faulty, {"faults.loss_spike_action": "skip"}),
    "faults.loss_spike_sigmas": Case(1e9, faulty, {"faults.loss_spike_action": "skip", "faults.loss_spike_window": 8}),
    "faults.loss_spike_rewind_steps": Case(7, rewound, {"faults.loss_spike_action": "rewind"}),
    "faults.loss_spike_max_rewinds": Case(1, rewound, {"faults.loss_spike_action": "rewind"}),
    "tracking.mlflow": Case(True, tracking),
    "tracking.experiment": Case("e", tracking, {"tracking.mlflow": True}),
    "tracking.tensorboard": Case(True, tracking),
    "tracking.wandb": Case(True, tracking),
    "tracking.wandb_project": Case("p", tracking, WANDB),
    "tracking.wandb_exp_name": Case("n", tracking, WANDB),
    "tracking.wandb_entity": Case("e", tracking, WANDB),
    "tracking.wandb_save_dir": Case("d", tracking, WANDB),
    "tracking.alarms": Case(False, tracking),
    "tracking.alarms_webhook": Case("LLMRECIPES_ALARM_CHAT", tracking),
    "tracking.alarms_command": Case(None, tracking),
    "tracking.alarms_interval": Case(60.0, tracking),
    "tracking.prometheus": Case(True, tracking),
    "tracking.prometheus_port": Case(9465, tracking, {"tracking.prometheus": True}),
    "tracking.energy_model": Case("codecarbon", metered),
    "tracking.kg_co2_per_kwh": Case(0.35, factors),
    "tracking.system_metrics_interval": Case(None, tracking, WANDB),
    "tracking.loss_by_source": Case(True, by_source),
    "tracking.layers_interval": Case(2, lambda recipe, *_: [*sampled(recipe)]),
    "search.space.N.key": Case("optimizer.min_lr", search, SEARCH),
    "search.space.N.low": Case(1e-3, search, SEARCH),
    "search.space.N.high": Case(0.1, search, SEARCH),
    "search.space.N.log": Case(True, search, SEARCH),
    "search.space.N.step": Case(0.0099, search, SEARCH),
    "search.space.N.choices": Case([1e-3], search, SEARCH, {"search.space.N.low": None, "search.space.N.high": None}),
    "search.space.N.when": Case({"train.seed": [0]}, search, SEARCH),
    "search.objectives": Case(["valid_bits_per_byte"], search, SEARCH),
    "search.trial_tokens": Case(4096, search, SEARCH),
    "search.seeds_per_point": Case(2, search, SEARCH),
    "search.sampler.type": Case("RandomSampler", search, SEARCH),
    "search.sampler.seed": Case(2, search, SEARCH),
    "search.sampler.n_startup_trials": Case(1, search, SEARCH),
    "search.sampler.multivariate": Case(False, search, SEARCH),
    "search.sampler.n_ei_candidates": Case(2, search, SEARCH),
    "search.sampler.popsize": Case(3, search, CMA),
    "search.sampler.with_margin": Case(True, search, CMA),
    "search.sampler.qmc_type": Case("halton", search, QMC),
    "search.sampler.scramble": Case(True, search, QMC),
    "search.pruner.type": Case("NopPruner", search, SEARCH, {"search.pruner": {}}),
    "search.pruner.n_startup_trials": Case(1, search, PERCENTILE),
    "search.pruner.n_warmup_steps": Case(1, search, PERCENTILE),
    "search.pruner.interval_steps": Case(2, search, PERCENTILE),
    "search.pruner.n_min_trials": Case(2, search, PERCENTILE),
    "search.pruner.percentile": Case(50.0, search, PERCENTILE),
    "search.pruner.min_resource": Case(3, search, HALVING),
    "search.pruner.reduction_factor": Case(2, search, HALVING),
    "search.pruner.min_early_stopping_rate": Case(1, search, HALVING),
    "search.pruner.bootstrap_count": Case(1, search, HALVING, {"search.pruner.min_resource": 1}),
    "search.pruner.p_threshold": Case(0.2, search, WILCOXON),
    "search.pruner.n_startup_steps": Case(1, search, WILCOXON),
    "search.pruner.patience": Case(1, search, PATIENT),
    "search.pruner.min_delta": Case(0.5, search, PATIENT),
    "search.pruner.wrapped_pruner": Case("MedianPruner", search, PATIENT),
    "search.study_name": Case("other", search, SEARCH),
    "search.storage": Case("sqlite:///s.db", search, SEARCH),
    "search.enqueue_recipe": Case(False, search, SEARCH),
    "search.enqueue_trials": Case([{"optimizer.lr": 2e-3}], search, SEARCH),
    "search.source_studies": Case([{"study_name": "s"}], search, SEARCH),
    "search.source_studies.N.study_name": Case("t", search, EARLIER),
    "search.source_studies.N.storage": Case("nowhere.log", search, EARLIER),
    "search.n_trials": Case(10, search, SEARCH),
    "search.timeout": Case(1.0, search, SEARCH),
    "search.max_gpu_hours": Case(1.0, search, SEARCH),
    "search.max_tokens": Case(10**6, search, SEARCH),
    "search.target": Case(2.0, search, SEARCH),
    "search.patience": Case(2, search, SEARCH),
    "search.min_improvement": Case(0.5, search, SEARCH),
    "search.max_retry": Case(1, search, SEARCH),
    "search.heartbeat_interval": Case(1, search, SEARCH),
    "search.grace_period": Case(90, search, SEARCH),
    "search.keep_checkpoints": Case("none", search, SEARCH),
    "stages.N.name": Case("t", plan, STAGE),
    "stages.N.train_iters": Case(6, plan, {**STAGE, "stages.N.train_iters": 12}, {"train.train_iters": 6}),
    "stages.N.tokens": Case(6 * 8 * 64, plan, {**STAGE, "stages.N.tokens": 12 * 8 * 64}, {"train.train_iters": 6}),
    "stages.N.model": Case({"seq_length": 32}, plan, STAGE),
    "stages.N.train": Case({"global_batch_size": 4}, plan, STAGE),
    "stages.N.layout": Case({"manual_gc": True}, features_of_stages, STAGE),
    "stages.N.optimizer": Case({"lr": 1e-4}, of_stages, STAGE),
    "stages.N.scheduler": Case({"lr_warmup_iters": 3}, of_stages, STAGE),
    "stages.N.data.weights": Case([2.0], of_stages, STAGE),
}
"""One line for each key. A new key gets one here, or it has no effect that anybody has seen."""

NAMES = {
    "name": "names the run's folder",
    "description": "documentation alone",
    "data.sources": "its items have lines of their own",
    "data.steps": "its items have lines of their own",
    "data.valid_sources": "its items have lines of their own",
    "data.valid_sources.N.weight": "refused",
    "layout.name": "sets other keys: test_recipe_layouts.py",
    "layouts": "sets other keys: test_recipe_layouts.py",
    "stages": "its items have lines of their own",
    "optimizer.groups": "its items have lines of their own",
    "search.space": "its items have lines of their own",
}
"""Keys without a line, and why."""


def made(*changes: Mapping[str, Any]) -> Recipe:
    """The tiny recipe with dotted keys set, those of N in its one source."""
    values: dict[str, Any] = {
        "model": dict(MODEL), "train": dict(TRAIN), "layout": {"micro_batch_size": 2}, "optimizer": {"lr": 1e-3},
        "tracking": {"mlflow": False, "tensorboard": False},
        "data": {"sources": [{"type": "stdlib"}]},
    }  # fmt: skip
    for name, value in {name: value for change in changes for name, value in change.items()}.items():
        *sections, key = name.split(".")
        inside: Any = values
        for section in sections:
            inside = inside[0] if section == ITEM else inside.setdefault(section, [{}] if section in LISTS else {})
        inside[key] = copy.deepcopy(value)  # a longer key may change it
    layer_pattern.take(values)  # as where a file is read
    return Recipe.model_validate({"name": "tiny", **values})


@pytest.fixture(autouse=True)
def second_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "plain", EngineEntry("tests.engines.plain:PlainBackend"))


def test_every_key_has_its_line() -> None:
    known = {name for name, key in keys().items() if not key.section}
    assert known - set(NAMES) == set(CASES)
    assert set(NAMES) <= known


_seen: dict[tuple[See, str], Any] = {}


def seen_before(see: See, recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is seen of a recipe without the key, which many keys share: once, where `see` replaces nothing."""
    if Parameter.VAR_POSITIONAL not in {parameter.kind for parameter in signature(see).parameters.values()}:
        return see(recipe, folder, monkeypatch)
    key = see, recipe.model_dump_json()
    if key not in _seen:
        _seen[key] = see(recipe, folder, monkeypatch)
    return _seen[key]


@pytest.mark.parametrize("name", CASES)
def test_every_key_changes_something(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    before, after = made(case.base), made(case.base, case.along, {name: case.value})
    if case.see in ON_FILES:
        before, after = (_on_two_sources(each, tmp_path) for each in (before, after))
    else:
        assert check(before) == check(after) == []
    with monkeypatch.context() as patch:
        first = seen_before(case.see, before, tmp_path, patch)
    with monkeypatch.context() as patch:
        second = case.see(after, tmp_path, patch)
    assert first != second


@pytest.mark.parametrize("see", {case.see: None for case in CASES.values() if case.see not in ON_FILES})
def test_the_same_recipe_looks_the_same(see: See, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as it looked long before, in another folder."""
    recipe = made(ZERO1 if see is deepspeed else SEARCH if see is search else {})
    with monkeypatch.context() as patch:
        first = seen_before(see, recipe, tmp_path, patch)
    with monkeypatch.context() as patch:
        second = see(recipe, tmp_path, patch)
    assert first == second


def test_a_new_key_of_megatrons_name_reaches_it() -> None:
    section = create_model("WithNewKey", __base__=Model, attention_softmax_in_fp32=(bool, True))
    for value in (False, True):
        longer = section.model_validate({**made().model.model_dump(), "attention_softmax_in_fp32": value})
        recipe = made().model_copy(update={"model": longer})
        assert config(recipe)["attention_softmax_in_fp32"] is value


def test_the_exceptions_are_keys_of_both() -> None:
    ours = {name for section in ("model", "layout", "train") for name in type(getattr(made(), section)).model_fields}
    theirs = {each.name for each in fields(MLATransformerConfig)}
    exceptions = engine_config.TRANSLATED | engine_config.NOT_PASSED
    assert not engine_config.TRANSLATED & engine_config.NOT_PASSED
    assert exceptions <= ours & theirs


def _on_two_sources(recipe: Recipe, folder: Path) -> Recipe:
    sources = []
    (given,) = recipe.data.sources
    for name, kept in (("one", {"weight": given.weight, "label": given.label}), ("two", {})):
        (folder / name).mkdir(exist_ok=True)
        for number in range(20 if name == "one" else 30):
            (folder / name / f"{number}.txt").write_text(f"{name} {number} " + "some words of a text " * 40)
        sources.append({"type": "text", "path": str(folder / name), **kept})
    steps = [step.model_dump(mode="json") for step in recipe.data.steps]
    sets = recipe.data.multiple_validation_sets
    data = {"sources": sources, "split": [60.0, 30.0, 10.0], "steps": steps, "multiple_validation_sets": sets}
    both = tiny(data=data)
    prepare(both, folder / "data", workers=1)
    return both
