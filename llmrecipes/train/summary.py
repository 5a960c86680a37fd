"""What a run prints: its header and progress; at its end held-out loss beside baselines, and a text sample."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.checkpoint.store import LEAST_KEPT, best
from llmrecipes.commandline import command_line
from llmrecipes.console import console, number
from llmrecipes.data.folder.data_manifest import stem
from llmrecipes.data.folder.prepared import (
    Prepared,
    bytes_per_token,
    deflate_bits_per_byte,
    drawn_samples,
    gzip_bits_per_byte,
    held_out_text,
)
from llmrecipes.data.read.dataset import build
from llmrecipes.data.read.ngram import MAX_VOCAB, Ids, KneserNey
from llmrecipes.data.steps.split import Split
from llmrecipes.data.tokens.templates import question
from llmrecipes.engine.base import Engine, Implementation, Progress, World
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.files import checkout
from llmrecipes.hardware.process import process_seconds
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.parameters import count_frozen
from llmrecipes.plan.plan_table import degrees
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from llmrecipes.recipe.load import executed
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import source_names
from llmrecipes.recipe.variants.proxy import with_zero
from llmrecipes.redact import redact
from llmrecipes.tracking.events import DECONTAMINATED, STARTED, DatasetUse, Note, NoTracker, Tracker
from llmrecipes.tracking.jsonl import parse
from llmrecipes.tracking.run_environment import capture
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.train.joined import Joined
from llmrecipes.train.loop import Loop
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.stopping import explained, stop_reason
from llmrecipes.untrusted import lines

PROMPTS = {"stdlib": "def ", "docstrings": "What does shutil.movefile(src, dst) do?"}
SAMPLE_TOKENS = 120
OVERFIT_LOSS = 0.05
"""Mean loss in nats per token below which a batch counts as overfitted."""


def print_summary(spec: RunSpec, prepared: Prepared, loop: Loop) -> None:
    """Print the summary. Called on the first rank.

    Raises:
        UserError: a run with `overfit_batch` did not overfit its batch.
    """
    say = partial(console().print, markup=False)
    if spec.overfit_batch:
        say(overfit_verdict(loop.losses, loop.plan.recipe.model.hidden_dropout))
        return
    if loop.valid_loss is not None and spec.recipe.dpo is not None:
        say(f"\nheld-out pairs: loss {loop.valid_loss:.4f} a pair")
    elif loop.valid_loss is not None and spec.recipe.data.chat is not None:
        perplexity = math.exp(loop.valid_loss)
        say(f"\nheld-out answers: loss {loop.valid_loss:.4f} nats per token, perplexity {perplexity:.2f}")
    elif loop.valid_loss is not None:
        for line in learnt(prepared, loop, loop.valid_loss):
            say(line)
    for line in [*held_out_lines(spec, loop.monitored), *decisions(spec.run.metrics)]:
        say(line, soft_wrap=True)
    if spec.sample and loop.world.holds_whole_model:
        _sample(spec, prepared, loop)
    say(f"\nagain: {generate_command(spec)}")
    say(f"report: {report_command(spec)}")


def held_out_lines(spec: RunSpec, now: Monitored) -> list[str]:
    """Why the run ended before its last step, and how its best checkpoint is exported."""
    train, lines = spec.recipe.train, []
    reason = stop_reason(now, train)
    if reason is not None and now.step < train.train_iters:
        lines.append(f"\nended at step {now.step:,} of {train.train_iters:,}: {explained(reason, now, train)}")
    if spec.recipe.checkpoint.keep_best and (entry := best(spec.run.store().entries())) is not None:
        export = command_line("export", f"{spec.run_dir}@best", data_dir=spec.data_dir)
        lines.append(f"best: step {entry.step:,}, held-out loss {entry.held_out_loss:.4f}: {export}")
    return lines


DECISIONS = ("hardware_suspect", "results_differ", "gradients_wrong", "spike_skipped", "rewound", "hang")
"""Events that a run has answered by itself."""


def decisions(metrics: Path) -> list[str]:
    """A line about what the run has answered by itself, in all its starts, if there was anything."""
    try:
        records = [parse(line) for line in lines(metrics, root=metrics.parent) if b'"event"' in line]
    except OSError:
        return []
    steps: dict[str, list[int]] = {}
    for record in records:
        if record and record.get("event") in DECISIONS:
            steps.setdefault(str(record["event"]), []).append(int(record["step"]))
    named = "; ".join(f"{name} at step {', '.join(map(str, at[:8]))}" for name, at in steps.items())
    return [f"\nfaults: {named} (details in {metrics})"] if named else []


def learnt(prepared: Prepared, loop: Loop, loss: float) -> list[str]:
    """The model's bits per byte in a table of baselines.

    N-grams are only counted on a CPU: elsewhere, devices would wait for it.

    Args:
        prepared: the run's data.
        loop: the finished run.
        loss: on the validation split, in nats per token.
    """
    bits = loop.loaders.bits_per_byte
    if bits is None:
        return []
    others = cheap(loop.plan.recipe, prepared, bits)
    notes: list[str] = []
    if loop.plan.span is not None:
        notes = ["n-gram models are compared for runs without stages only"]
    elif loop.engine.platform.name == "cpu":
        try:
            done = None if stop_reason(loop.monitored, loop.plan.recipe.train) is None else loop.monitored.step
            others += counting(loop.plan.recipe, prepared, bits, done)
        except (UserError, OSError) as error:  # the run is finished and saved; this is no reason to fail it
            notes = [f"note: no n-grams were counted: {error}"]
    else:
        notes = ["n-gram models are compared on CPU runs only"]
    head = "\nheld-out text, bits per byte (8 = uncompressed, lower is better):"
    return [head, *table(Baseline(f"this model (loss {loss:.4f})", bits(loss)), others), *notes]


def sample_prompt(recipe: Recipe) -> str:
    """Prompt of the sample, chosen by the type of the first source."""
    return PROMPTS.get(recipe.data.sources[0].type, "Hello!" if recipe.data.chat else "The ")


def generate_command(spec: RunSpec) -> str:
    """The command that continues the same prompt again, quoted for a shell."""
    prompt = sample_prompt(spec.recipe)
    is_chat = spec.recipe.data.chat is not None
    return command_line("generate", spec.run_dir, options={"prompt": prompt, "chat": is_chat}, data_dir=spec.data_dir)


def report_command(spec: RunSpec) -> str:
    """The command that opens the page of the run, quoted for a shell."""
    return command_line("report", spec.run_dir, options={"open": True}, data_dir=spec.data_dir)


def overfit_verdict(losses: list[float], dropout: float) -> str:
    """One line if the batch was overfitted.

    Args:
        losses: training loss of every step.
        dropout: `model.hidden_dropout`, which keeps the loss from falling to zero.

    Raises:
        UserError: it was not; with the most likely cause.
    """
    final = statistics.fmean(losses[-5:])
    if final < OVERFIT_LOSS:
        return f"overfitted: loss {losses[0]:.3f} -> {final:.4f} in {len(losses)} steps"
    if max(losses[-5:]) > losses[0]:
        cause = "the loss rose: optimizer.lr is too high, or a gradient has the wrong sign"
    elif losses[0] - final < 0.02 * losses[0]:
        cause = "the loss hardly moved: optimizer.lr is too low, or no gradient reaches the weights (try --anomaly)"
    elif dropout > 0:
        cause = f"dropout ({dropout:g}) keeps the loss above zero: model.hidden_dropout=0 model.attention_dropout=0"
    else:
        cause = "the loss was still falling: more train.train_iters, or a higher optimizer.lr"
    raise UserError(
        where="--overfit-batch",
        what=f"one batch was not overfitted: loss {losses[0]:.3f} -> {final:.4f} in {len(losses)} steps",
        rule=f"training on a single batch reaches a loss below {OVERFIT_LOSS} nats per token",
        fix=cause,
        code=ExitCode.STOP,
    )


def _sample(spec: RunSpec, prepared: Prepared, loop: Loop) -> None:
    tokenizer = prepared.tokenizer()
    prompt = sample_prompt(spec.recipe)
    ids = tokenizer.prompt(prompt)
    end = tokenizer.eod
    if spec.recipe.data.chat is not None:
        chat = question(prepared, prompt)
        prompt, ids, end = chat.text, chat.ids, chat.end
    written = loop.engine.generate(
        ids,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(seed=spec.recipe.train.seed),
        vocab_size=tokenizer.vocab_size,
        eod=end,
    )
    console().print(f"\nsample:\n{prompt}{tokenizer.decode(list(written))}", markup=False)


COUNTED_TOKENS = 1 << 22
"""Training tokens whose n-grams are counted, at most: two seconds and 300 MB on one core."""
SCORED_TOKENS = 1 << 18
"""Held-out tokens that an n-gram model predicts, at most."""
COMPRESSED_BYTES = 1 << 20
"""Held-out text that is compressed window by window, at most."""
GZIP_WINDOW = 1 << 15


@dataclass(frozen=True)
class Baseline:
    """Something that predicts or compresses the held-out text."""

    name: str
    bits_per_byte: float


def cheap(recipe: Recipe, prepared: Prepared, bits_per_byte: Callable[[float], float]) -> list[Baseline]:
    """What costs nothing at any size: a uniform distribution, and gzip of at most `COMPRESSED_BYTES`.

    Args:
        recipe: gives the model's window.
        prepared: its prepared data, with a validation split.
        bits_per_byte: turns a loss in nats per token into bits per byte.
    """
    length = recipe.model.seq_length
    window = round(length * bytes_per_token(prepared, "valid", length))
    guess = bits_per_byte(math.log(prepared.manifest.tokenizer.vocab_size))
    baselines = [Baseline("uniform distribution over tokens", guess)]
    if window < GZIP_WINDOW:
        text = held_out_text(prepared, "valid", COMPRESSED_BYTES)
        name = f"gzip -9 in pieces of the model's window, {window:,} bytes"
        baselines.append(Baseline(name, deflate_bits_per_byte(text, window)))
    whole = gzip_bits_per_byte(prepared, "valid")
    return [*baselines, Baseline("gzip -9 of the whole text (window 32 KiB)", whole)]


def counting(
    recipe: Recipe, prepared: Prepared, bits_per_byte: Callable[[float], float], done: int | None = None
) -> list[Baseline]:
    """N-gram models of the sequences that the finished run was trained on, on those that it was evaluated on.

    Reads at most `COUNTED_TOKENS`, the first ones, and says so.

    Args:
        recipe, prepared, bits_per_byte: as `cheap`.
        done: steps of a run that has ended before its last one.

    Raises:
        UserError: the vocabulary is too large or the sequence too short for trigrams; or, as OSError, the data
            can no longer be read.
    """
    vocab = prepared.manifest.tokenizer.vocab_size
    if vocab > MAX_VOCAB[3] or recipe.model.seq_length < 2:
        raise UserError(
            f"{vocab:,} token ids, sequences of {recipe.model.seq_length}",
            rule=f"trigrams are counted for at most {MAX_VOCAB[3]:,} ids, in sequences of at least 2 tokens",
        )
    trained = drawn_samples(recipe, "train") if done is None else batch_schedule(recipe).samples(done)
    seen = _first_samples(recipe, prepared, "train", min(COUNTED_TOKENS, trained * recipe.model.seq_length))
    held_out = _first_samples(recipe, prepared, "valid", SCORED_TOKENS)
    length = recipe.model.seq_length
    every = "the same" if len(seen) == trained else "the first"
    tokens = f"{every} {len(seen) * length:,} training tokens"
    names = {1: f"unigrams of {tokens}", 3: f"trigrams of {tokens}"}
    return [
        Baseline(name, bits_per_byte(float(-np.log(KneserNey(seen, vocab, order).probabilities(held_out)).mean())))
        for order, name in names.items()
    ]


def table(model: Baseline, others: list[Baseline]) -> Iterator[str]:
    """Lines from the worst to the best, the model marked: what is above it, it has learnt to do better."""
    for row in sorted([model, *others], key=lambda row: -row.bits_per_byte):
        yield f"{'>' if row is model else ' '} {row.bits_per_byte:6.3f}  {row.name}"


def _first_samples(recipe: Recipe, prepared: Prepared, split: Split, tokens: int) -> Ids:
    """[samples, seq_length + 1]: the run's first samples of a split, in their order, of at most so many tokens."""
    dataset = build(recipe, prepared, split)
    if dataset is None:
        raise ValueError(f"no {split} split")
    samples = min(drawn_samples(recipe, split), max(1, tokens // recipe.model.seq_length))
    rows = np.empty((samples, recipe.model.seq_length + 1), np.int64)
    for row in range(samples):
        sample = dataset[row]
        rows[row, :-1], rows[row, -1] = sample["tokens"], sample["labels"][-1]
    return rows


def describe(joined: Joined, plan: Plan, implementation: Implementation, progress: Progress) -> None:
    """Print what is about to run; `plan` is the stage's."""
    cluster = joined.cluster
    prepared = joined.prepared
    recipe = plan.recipe
    device = cluster.gpus[0].name if cluster.gpus else f"CPU, {cluster.cpu_cores:g} cores"
    train = recipe.train
    counts = prepared.manifest.counts("train")
    talks = prepared.manifest.chat
    tokens = counts.tokens
    data = f"{number(tokens)} training tokens, {plan.total_tokens / max(tokens, 1):.2f} epochs"
    if talks is not None:
        chat_tokens = sum(source.tokens for source in talks.sources)
        answers = sum(source.answer_tokens for source in talks.sources) / max(chat_tokens, 1)
        what = "conversations" if recipe.dpo is None else "pairs"
        data = f"{counts.documents:,} {what}, {number(tokens)} tokens, {answers:.0%} of them answers"
    layers = f"{implementation.name} layers ({implementation.reason})"
    rows = {
        "run": str(joined.spec.run_dir),
        "model": f"{number(plan.num_parameters.total)} parameters, {layers}",
        **_adapters(plan),
        "device": f"{plan.layout.world_size} × {device}, {train.precision}, about {gib(plan.memory.total)} a rank",
        "batch": f"{train.global_batch_size} × {recipe.model.seq_length} = {number(plan.tokens_per_step)} tokens, "
        f"micro-batch {recipe.layout.micro_batch_size} × {plan.num_microbatches} × "
        + with_zero(f"{plan.layout.data_parallel_size} data-parallel", recipe.layout.zero),
        "data": data,
        "steps": f"{progress.step} done, {train.train_iters - progress.step} to go",
    }
    if (span := plan.span) is not None:
        rows["stage"] = f"{span.name}, steps {span.first_step + 1} to {span.last_step}, {degrees(plan)}"
    if joined.network is not None:
        rows["network"] = joined.network
    if recipe.checkpoint.most_recent_k < LEAST_KEPT:
        rows["saves"] = (
            f"the newest {LEAST_KEPT} checkpoints are kept, not {recipe.checkpoint.most_recent_k}: one may be corrupt"
        )
    for name, text in [*rows.items(), *(("warning", text) for text in plan.warnings)]:
        console().print(f"{name:>7}  {text}", markup=False)


USES: dict[Split, str] = {"train": "training", "valid": "validation"}
DIGITS = 32
"""Of a digest; MLflow takes 36."""


def datasets_of(recipe: Recipe, prepared: Prepared) -> Iterator[DatasetUse]:
    """What a run reads: a dataset for each source and use, whose digest is that of its tokens."""
    manifest, names = prepared.manifest, source_names(recipe.data.sources)
    for place, (source, record) in enumerate(zip(recipe.data.sources, manifest.sources, strict=True)):
        for split, use in USES.items():
            counts = record.splits[split].model_dump()
            if counts["documents"]:
                if split == "train":
                    counts["weight"] = prepared.weights[place]
                sums = "".join(manifest.files[f"{stem(place, split)}.{kind}"].sha256 for kind in ("bin", "idx"))
                digest = hashlib.sha256(sums.encode()).hexdigest()[:DIGITS]
                yield DatasetUse(names[place], digest, use, redact(source.location), source.type, counts)


@contextmanager
def open_tracker(joined: Joined, engine: Engine, world: World, progress: Progress) -> Iterator[Tracker]:
    """The tracker of a stage from `progress` on: a real one on rank 0, a `NoTracker` elsewhere."""
    if not world.is_first:
        yield NoTracker()
        return
    spec = joined.spec
    made = engine.implementation
    layers = {"transformer_impl": made.name, "transformer_impl_reason": made.reason}
    plan_values = {**joined.plan.as_dict(), **layers, "predicted": spec.predicted, "chosen": spec.chosen}
    predicted = {} if spec.predicted is None else {"predicted": json.dumps(spec.predicted)}
    with RunTracker.open(
        spec.recipe,
        plan=plan_values,
        environment=capture(checkout()),
        run_dir=spec.run_dir,
        runs_dir=spec.runs_dir,
        resumed_step=progress.step,
        total_steps=spec.recipe.train.train_iters,
        tags={"layout": f"dp{world.data_parallel_size}", **predicted, **spec.tags},
        datasets=list(datasets_of(spec.recipe, joined.prepared)),
        console=console(),
    ) as tracker:
        # What the steps cannot tell, because those that are computed again have been dropped.
        started = {
            "ranks": world.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_seconds": round(process_seconds(), 3),
            "executed": executed(engine.recipe),
            **{f"reached_{key}": value for key, value in tracker.reached.items()},
            **({"energy": used} if (used := tracker.energy.values()) else {}),
        }
        train = spec.recipe.train
        is_ended = progress.step >= train.train_iters or spec.run.status().get("ended_by") == train.stop_rules
        if not is_ended:  # a finished run that is started again stays as it is
            tracker.note(Note(step=progress.step, event=STARTED, details=started))
        if progress.step == 0 and (dropped := joined.prepared.manifest.decontaminated) is not None:
            tracker.note(Note(step=0, event=DECONTAMINATED, details=decontaminated_metrics(dropped)))
        if spec.restart:
            tracker.note(Note(step=progress.step, event="restarted", details={"restart": spec.restart, **spec.tags}))
        yield tracker


def decontaminated_metrics(dropped: dict[str, int]) -> dict[str, float]:
    """Metrics by name, of characters that MLflow takes, and the sum."""
    names = {f"{DECONTAMINATED}/{re.sub(r'[^A-Za-z0-9_. -]', '_', file)}": float(n) for file, n in dropped.items()}
    return {f"{DECONTAMINATED}/documents": float(sum(dropped.values())), **names}


def _adapters(plan: Plan) -> dict[str, str]:
    lora = plan.recipe.lora
    added = plan.num_adapter_parameters
    if plan.recipe.train.freeze:
        frozen = count_frozen(plan.recipe)[0]
        total = plan.num_parameters.total
        return {"trained": f"{number(total - frozen)} parameters, {1 - frozen / total:.2%} of the model"}
    if lora is None:
        return {}
    share = f"{added / plan.num_parameters.total:.2%}"
    return {"trained": f"{number(added)} parameters in adapters of rank {lora.rank}, {share} of the model"}
