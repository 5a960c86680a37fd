"""The process of a dry run, which builds each rank, runs a step and plans a save.

Its patches of megatron-core for tensors without data hold for a whole process.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmrecipes.console import duration, setup_logging
from llmrecipes.dryrun.dry_run_spec import (
    PARTS,
    DryRunSpec,
    Moment,
    RankReport,
    Resume,
    Save,
    Share,
    Traffic,
    report_name,
)
from llmrecipes.dryrun.recorder import Passes, Recorder, Storages, recording
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Batch, Engine, MetaBackend, Progress
from llmrecipes.parent import end_with_parent
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.kernels import keeps_scores, own_layers
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.memory import of_stage
from llmrecipes.plan.peak import most_activations, peak
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.rules.preference_rules import rows_of_a_pair
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.adversarial import passes as passes_of
from llmrecipes.redact import guard_streams

MOST_MOMENTS = 300
REPORT_SECONDS = 5.0


def dry_run(spec: DryRunSpec, rank: int, log: Callable[[str], None] = lambda line: None) -> RankReport:
    """Run one rank of the world.

    Args:
        log: receives a line of progress every few seconds.
    """
    plan = derive(spec.recipe, spec.world_size, spec.cluster)
    engines = cast(MetaBackend, backend(spec.recipe))
    started = time.monotonic()
    kernels = plan.device
    if plan.device == "cuda" and own_layers(spec.recipe, plan.device):
        kernels = "cuda, local"
    elif plan.device == "cuda" and keeps_scores(spec.recipe, plan.shape, plan.device):
        kernels = "cuda, unfused"
    platform = engines.meta_platform(rank, spec.world_size, kernels, spec.skew)
    storages = Storages()
    recorder = Recorder(storages, _chosen(plan))
    with engines.join(spec.recipe, platform):
        with recording(recorder):
            engine = engines.construct_meta(plan, platform)
        storages.hold(engine.model_states())
        engine.watch_states(storages.label)
        built = time.monotonic()
        log(f"model and optimizer built in {duration(built - started)}")
        with recording(recorder):
            for _ in range(engine.first_steps):
                engine.train_step(batches(plan))
        recorder.clear()
        passes = Passes(engine.modules, storages, _progress(plan, len(engine.modules), log))
        first = storages.now
        with recording(recorder), passes.watched():
            engine.train_step(batches(plan))
        operations = storages.now - first
        traffic = _traffic(recorder, spec)
        waits = dict(recorder.waits)
        timeline = storages.timeline(first)
        fullest, memory = max(timeline, key=lambda moment: moment[1].total())
        save = plan_save(engine)
        recorder.clear()
        with recording(recorder):
            sizes = engine.rehearse_load()
        resume = Resume(held_bytes=max(sizes), read_bytes=sum(sizes), traffic=_traffic(recorder, spec))
        with recording(recorder):
            engine.close()
    return RankReport(
        recipe=spec.recipe.name,
        world_size=spec.world_size,
        rank=rank,
        stage=_stage(plan, rank),
        memory={name: memory[name] for name in PARTS},
        planned=_planned(plan, _stage(plan, rank)),
        most_activations=max(parts["activations"] for _, parts in timeline),
        planned_most_activations=most_activations(*_of_step(plan, _stage(plan, rank))),
        modules=tuple(
            Share(module=module, part=part, bytes=size)
            for (module, part), size in storages.modules_at(fullest).most_common()
            if size
        ),
        timeline=tuple(_thinned(timeline)),
        traffic=traffic,
        waits=waits,
        passes=tuple(passes.order),
        operations=operations,
        save=save,
        resume=resume,
        build_seconds=built - started,
        seconds=time.monotonic() - started,
    )


def _chosen(plan: Plan) -> float:
    """Share of a layer's experts that a token chooses."""
    model = plan.recipe.model
    return model.moe_router_topk / model.num_moe_experts if model.num_moe_experts else 1.0


def batches(plan: Plan) -> Iterator[Batch]:
    """Micro-batches in host memory; their tokens do not matter."""
    size = plan.recipe.layout.micro_batch_size
    length = plan.recipe.model.seq_length
    tokens = torch.zeros(size, length, dtype=torch.long)
    positions = torch.arange(length).expand(size, -1).contiguous()
    if plan.recipe.dpo is not None and rows_of_a_pair(plan.recipe) == 1:
        positions[:, length // 2 :] = torch.arange(length - length // 2)
    distill = plan.recipe.distill
    said = dict[str, torch.Tensor]()
    if distill is not None and distill.logits is not None:
        shape = size, length, distill.top_k or 0
        said = {"teacher_ids": torch.zeros(shape, dtype=torch.int32), "teacher_logits": torch.zeros(shape)}
    while True:
        yield {
            "tokens": tokens,
            "labels": tokens,
            "loss_mask": torch.ones(size, length),
            "position_ids": positions,
            **said,
        }


def _progress(plan: Plan, chunks: int, log: Callable[[str], None]) -> Callable[[int], None]:
    """Called with the passes that have begun; logs every few seconds."""
    started = reported = time.monotonic()
    passes = 2 * plan.num_microbatches * chunks * passes_of(plan.recipe.train)

    def begun(count: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > REPORT_SECONDS:
            reported = now
            left = (now - started) / count * (passes - count)
            log(f"pass {count:,} of {passes:,}, about {duration(left)} left")

    return begun


def _of_step(plan: Plan, stage: int) -> tuple[Recipe, Shape, Layout, int, int, str]:
    return plan.recipe, plan.shape, plan.layout, plan.num_microbatches, stage, plan.device


def _planned(plan: Plan, stage: int) -> dict[str, int]:
    memory = of_stage(*_of_step(plan, stage))
    moment = peak(*_of_step(plan, stage))
    # The comparison with a teacher keeps its gradient only after it has held the most.
    kept = moment.kept_logits if plan.recipe.distill is None else 0
    states = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    if memory.update:  # the peak is the update, in which nothing of a pass is left
        update = moment.total + memory.update
        return {**states, "activations": 0, "communication": memory.buffers, "temporary": update + memory.teacher}
    return {
        **states,
        "activations": moment.activations + kept,
        "communication": moment.outputs + memory.buffers,
        "temporary": moment.logits - kept + moment.gradients + memory.teacher + memory.movements,
    }


def _stage(plan: Plan, rank: int) -> int:
    return rank // (plan.layout.world_size // plan.layout.pipeline_model_parallel_size)


def _traffic(recorder: Recorder, spec: DryRunSpec) -> tuple[Traffic, ...]:
    ranks_per_node = len(spec.cluster.gpus) // spec.cluster.nodes or -(-spec.world_size // spec.cluster.nodes)
    return tuple(
        Traffic(
            group="world" if name == "default_pg" else name,
            op=op,
            calls=calls,
            bytes=recorder.sent[ranks, name, op],
            ranks=len(ranks),
            node_local=len({rank // ranks_per_node for rank in ranks}) == 1,
        )
        for (ranks, name, op), calls in sorted(recorder.collectives.items(), key=lambda item: item[0][1:])
    )


def _thinned(timeline: Sequence[tuple[int, Counter[str]]]) -> Iterator[Moment]:
    """At most `MOST_MOMENTS`, each the highest of its neighbours."""
    stride = -(-len(timeline) // MOST_MOMENTS)
    for start in range(0, len(timeline), stride):
        when, parts = max(timeline[start : start + stride], key=lambda moment: moment[1].total())
        yield Moment(when=when, parts={name: parts[name] for name in PARTS})


_META = torch.device("meta")
_FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full"}


def plan_save(engine: Engine) -> Save:
    """Take the engine's state and plan its files, as a saver does; nothing is written but small plain values.

    Args:
        engine: after a step.
    """
    memory = _HostWithoutData()
    gc.freeze()  # megatron-core collects garbage for each bucket, and the operations so far have left many objects
    try:
        with tempfile.TemporaryDirectory() as folder, memory:
            files = engine.checkpoint_format()
            with engine.params_synced():
                taken = files.snapshot(engine.state(Progress()))
            prepared = files.prepare(taken, Path(folder) / "checkpoint", 0)
            written = files.planned_bytes(prepared)
    finally:
        gc.unfreeze()
    return Save(held_bytes=memory.host.peak(), written_bytes=written)


class _HostWithoutData(TorchDispatchMode):
    """Host tensors that are made in the block have no data either; they are tracked as the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        self.host.now += 1
        name = func._schema.name.partition("::")[2]
        device = options.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        if name in _FACTORIES and (device is None or to_host) and 0 not in args[0]:  # storages are copied in empty ones
            return self._made(func(*args, **{**options, "device": _META, "pin_memory": None}))
        if name == "_to_copy" and to_host and args[0].is_meta:
            return self._made(func(*args, **{**options, "device": _META}))
        if name == "copy_" and not args[0].is_meta and args[1].is_meta:
            return args[0]
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **options)

    def _made(self, result: Any) -> Any:
        for tensor in tree_leaves(result):
            self.host.seen(tensor)
        return result


def main() -> None:
    """Run the ranks of a spec one after another: `python -m llmrecipes.dryrun.simulation <spec.json> <parent>`.

    Each report is written beside the spec as `rank-<n>.json` when it is ready.
    """
    guard_streams()
    end_with_parent(int(sys.argv[2]))
    setup_logging()
    # Every call of a library passes through the recorder, which is blamed for their warnings.
    warnings.filterwarnings("ignore", module=r"llmrecipes\.dryrun\.recorder")
    path = Path(sys.argv[1])
    spec = DryRunSpec.model_validate_json(path.read_text("utf-8"))
    began = time.monotonic()
    ranks = len(spec.ranks)
    for number, rank in enumerate(spec.ranks, start=1):
        which = f"rank {rank}" + (f" ({number} of {len(spec.ranks)})" if len(spec.ranks) > 1 else "")
        report = dry_run(spec, rank, partial(_say, which))
        (path.parent / report_name(rank)).write_text(report.model_dump_json() + "\n", "utf-8")
        if number < ranks:
            taken = time.monotonic() - began
            left = f"about {duration(taken / number * (ranks - number))} left for the other ranks"
            _say(which, f"done, {duration(taken / number)} per rank, {left}")


def _say(which: str, line: str) -> None:
    print(f"{which}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
