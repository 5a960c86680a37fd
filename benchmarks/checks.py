"""Runs that provoke the checks of `llmrecipes diagnose`, and healthy ones: `python -m benchmarks.checks [NAME ...]`.

Real trainings of small models on this machine. Where a recipe cannot make the fault, the ranks have one: a slow loader,
a slow rank, a disk that takes seconds, memory that is never freed. What needs a GPU (throttling, idle GPUs) has records
in tests/unit/test_diagnosis.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.former import FORMER
from llmrecipes.console import setup_logging
from llmrecipes.diagnosis.checks import Checks
from llmrecipes.diagnosis.finding import RunFacts
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.load import load
from llmrecipes.rundir import Run
from llmrecipes.train.rank import rank_main
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow import train
from llmrecipes.workflow.diagnose import diagnose
from llmrecipes.workflow.run import Paths, TrainOptions

FAULT = "CHECKS_FAULT"
BASE = (
    "model.hidden_size=96", "train.train_iters=160", "scheduler.lr_decay_iters=160", "scheduler.lr_warmup_iters=16",
    "train.eval_interval=40", "checkpoint.save_interval=80", "tracking.mlflow=false", "tracking.tensorboard=false",
)  # fmt: skip
TEXT = "data.sources=[{type: text, path: %s/*.txt}]"
SMALL = ("data.split=[60,40,0]", "model.vocab_size=512")


@dataclass(frozen=True)
class Case:
    """A run, and the rules that it must make speak; none: it is healthy."""

    recipe: str
    changes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    fault: str = ""
    ranks: int | None = 1
    base: tuple[str, ...] = BASE

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the recipe; gpt-tiny is as it was when the limits of the rules were found."""
        return (*(FORMER if self.recipe == "gpt-tiny" else ()), *self.base, *self.changes)


SHALLOW = ("model.num_layers=2", "model.seq_length=128")
WHOLE = tuple(
    f"layout.{name}"
    for name in ("tensor_model_parallel_size=1", "pipeline_model_parallel_size=1", "sequence_parallel=false")
)
EXPERTS = (*SHALLOW, "model.moe_ffn_hidden_size=128", "layout.expert_model_parallel_size=1")
CHAT = ("train.train_iters=100", "train.eval_interval=25", *BASE[-2:])
HEALTHY = {
    "gpt-tiny": Case("gpt-tiny"),
    "lower rate": Case("gpt-tiny", ("train.seed=2", "optimizer.lr=3e-3")),
    "constant rate": Case("gpt-tiny", ("scheduler.lr_decay_style=constant", "optimizer.lr=3e-3")),
    "WSD": Case("gpt-tiny", ("scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=40")),
    "bf16": Case("gpt-tiny", ("train.precision=bf16",)),
    "fp16": Case("gpt-tiny", ("train.precision=fp16",)),
    "two ranks": Case("gpt-tiny", ranks=2),
    "gpt-tiny-3d on a rank": Case("gpt-tiny-3d", (*SHALLOW, *WHOLE)),
    "moe-tiny": Case("moe-tiny", EXPERTS),
    "sft-tiny": Case("sft-tiny", base=CHAT),
}
PROVOKED = {
    "rate x 100": Case(
        "gpt-tiny", ("optimizer.lr=1.0",), ("divergence", "learning_rate_high", "exploding_gradients", "loss_spike")
    ),
    "rate / 100": Case("gpt-tiny", ("optimizer.lr=1e-4",), ("learning_rate_low",)),
    "rate of almost 0": Case(
        "gpt-tiny",
        ("optimizer.lr=1e-9", "optimizer.weight_decay=0", "scheduler.lr_decay_style=constant",
         "scheduler.lr_decay_iters=null", "train.train_iters=260", "train.eval_interval=100"),
        ("plateau", "underfitting"),
    ),
    "frozen layer": Case(
        "gpt-tiny",
        ("train.train_iters=60", "tracking.layers_interval=10", "train.log_interval=5",
         "optimizer.groups=[{pattern: decoder.layers.1.mlp.*, lr_mult: 0}]"),
        ("frozen_layer",),
    ),
    "small text, many epochs": Case(
        "gpt-tiny", ("optimizer.lr=3e-3", "train.eval_interval=20", TEXT % "@small", *SMALL), ("overfitting",)
    ),
    "a third are copies": Case(
        "gpt-tiny", ("train.train_iters=20", TEXT % "@copies", *SMALL), ("duplicate_data",)
    ),
    "router without balance": Case(
        "moe-tiny", (*EXPERTS, "model.moe_aux_loss_coeff=0", "model.moe_z_loss_coeff=null"), ("dead_experts",)
    ),
    "fp16, rate x 100": Case(
        "gpt-tiny", ("train.precision=fp16", "optimizer.lr=1.0", "train.loss_scale_window=5", "train.hysteresis=1"),
        ("fp16_scale_collapse",),
    ),
    "slow loader": Case("gpt-tiny", ("train.train_iters=120",), ("loader_bound",), "loader"),
    "slow rank": Case("gpt-tiny", ("train.train_iters=60",), ("straggler",), "rank", 2),
    "a rank 30 % slower": Case(
        "gpt-tiny", ("faults.straggler_threshold=0.5", "train.log_interval=10"), ("slow_rank",), "slower", 2
    ),
    "slow disk": Case(
        "gpt-tiny", ("train.train_iters=60", "checkpoint.save_interval=20"), ("slow_storage",), "disk"
    ),
    "leak": Case("gpt-tiny", ("train.train_iters=260",), ("memory_creep",), "leak"),
}  # fmt: skip


def texts(folder: Path) -> None:
    """Two folders of short texts: few of them, and many of which a third are copies."""
    source = Path(os.__file__).read_text("utf-8")
    pieces = [source[start : start + 700] for start in range(0, 42_000, 700)]
    for name, chosen in (("small", pieces[:20]), ("copies", pieces + pieces[:30])):
        (folder / name).mkdir()
        for number, text in enumerate(chosen):
            (folder / name / f"{number:03d}.txt").write_text(text, "utf-8")


def install(fault: str, rank: int) -> None:
    """Give this rank a fault."""
    from llmrecipes.engine.core.checkpoint.format import ShardedFormat
    from llmrecipes.engine.megatron.engine import MegatronEngine
    from llmrecipes.train.loaders import ReadAhead

    step, write, ahead = MegatronEngine.train_step, ShardedFormat.write, ReadAhead.__init__
    kept: list[bytearray] = []

    def slow_loader(self: Any, batches: Iterator[Any], *others: Any) -> None:
        def late() -> Iterator[Any]:
            for batch in batches:
                time.sleep(0.05)
                yield batch

        ahead(self, late(), *others)

    def slow_step(engine: Any, batches: Any, **options: Any) -> Any:
        if rank == 1:
            time.sleep(0.5)
        return step(engine, batches, **options)

    def slower_step(engine: Any, batches: Any, **options: Any) -> Any:
        began = time.process_time()
        loss = step(engine, batches, **options)
        if rank == 1:
            time.sleep(0.3 * (time.process_time() - began))  # it waits for others without using the processor
        return loss

    def leaking_step(engine: Any, batches: Any, **options: Any) -> Any:
        kept.append(bytearray(b"x" * (4 << 20)))
        return step(engine, batches, **options)

    def slow_write(*arguments: Any, **options: Any) -> Any:
        time.sleep(20.0)
        return write(*arguments, **options)

    if fault == "loader":
        ReadAhead.__init__ = slow_loader  # type: ignore[assignment]
    elif fault == "disk":
        ShardedFormat.write = slow_write  # type: ignore[method-assign]
    elif fault:
        faulty: Any = {"rank": slow_step, "slower": slower_step, "leak": leaking_step}[fault]
        MegatronEngine.train_step = faulty  # type: ignore[method-assign]


def rank() -> None:
    """A rank with the fault that the environment names."""

    def run(spec: RunSpec) -> Any:
        from llmrecipes.train.worker import run as ordinary

        import_megatron()
        install(os.environ[FAULT], int(os.environ["RANK"]))
        return ordinary(spec)

    rank_main(RunSpec, run)


def start(options: dict[str, Any]) -> int:
    """Train one case, with ranks that have its fault."""
    ordinary = train.run_ranks

    def run_ranks(module: str, arguments: Sequence[str], **others: Any) -> int:
        return ordinary("benchmarks.checks" if os.environ[FAULT] else module, arguments, **others)

    train.run_ranks = run_ranks
    try:
        return train.train(
            load(options["recipe"], options["changes"]).recipe,
            Paths(Path(options["runs"]), Path(options["data"])),
            TrainOptions(
                nproc=options["ranks"], run_id=options["id"], separate_process=True, run=RunOptions(sample=False)
            ),
            print,
        )
    except UserError as error:
        print(f"error: {error}")
        return int(error.code)


def made(name: str, case: Case, folder: Path, data: Path) -> tuple[int, list[str], int]:
    """Train a case; returns the exit code, the rules that spoke, and the steps."""
    identifier = "-".join("".join(c if c.isalnum() else " " for c in name).split())
    options = {
        "recipe": case.recipe, "changes": [change.replace("@", f"{folder}/") for change in case.overrides],
        "runs": str(folder / "runs"), "data": str(data), "ranks": case.ranks, "id": identifier,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.checks", "--start", json.dumps(options)]
    with (folder / f"{identifier}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, FAULT: case.fault}).returncode
    diagnosis = diagnose(Run(folder / "runs" / case.recipe / identifier), data)
    return code, [finding.rule for finding in diagnosis.findings], diagnosis.steps


def overhead(run: Run) -> float:
    """Processor seconds of all checks for a record of a run."""
    lines = [json.loads(line) for line in run.metrics.open()]
    checks, began = Checks(RunFacts.of(run.recipe())), time.process_time()
    for line in lines:
        checks.add(line)
    return (time.process_time() - began) / max(1, len(lines))


def main() -> None:
    """Make the runs and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases; default: all")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=None, help="keep runs and logs in this folder")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.start:
        setup_logging()
        sys.exit(start(json.loads(chosen.start)))
    folder = chosen.out or Path(tempfile.mkdtemp(prefix="checks-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "small").exists():
        texts(folder)
    wrong, cost = 0, []
    for name, case in {**HEALTHY, **PROVOKED}.items():
        if chosen.names and name not in chosen.names:
            continue
        code, rules, steps = made(name, case, folder.resolve(), chosen.data.resolve())
        lacking = [rule for rule in case.rules if rule not in rules]
        verdict = "ok" if (not lacking if case.rules else not rules) and steps else "WRONG"
        wrong += verdict != "ok"
        expected = ", ".join(case.rules) or "nothing"
        spoke = ", ".join(rules) or "silent"
        print(f"{verdict:6} {name:26} {steps:4} steps, exit {code:3}  expected {expected}; {spoke}", flush=True)
    for path in sorted((folder / "runs").glob("*/*")):
        cost.append(overhead(Run(path)))
    print(f"checks take {1e6 * sum(cost) / len(cost):.0f} µs a record; {wrong} wrong; runs in {folder}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if FAULT in os.environ and "RANK" in os.environ:
        rank()
    else:
        main()
