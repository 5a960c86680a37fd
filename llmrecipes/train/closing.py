"""What a finished run says: what was learnt, and a sample of it."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path

from llmrecipes.console import console
from llmrecipes.data.prepared import Prepared
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.generate import Sampling, generate
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.loop import Loop
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.yardsticks import Yardstick, cheap, counting, table

PROMPTS = {"stdlib": "def "}
DATA = Path("data")
"""Where `llmrecipes generate` looks for prepared data unless it is told."""
SAMPLE_TOKENS = 120
LEARNT_BY_HEART = 0.05
"""Mean loss in nats per token below which a batch counts as learnt by heart."""


def close(spec: RunSpec, prepared: Prepared, loop: Loop) -> None:
    """Say what the run came to. Called on the first rank.

    Raises:
        UserError: an overfitting run did not learn its batch.
    """
    if spec.overfit_batch:
        console().print(overfit_verdict(loop.losses, loop.recipe.model.hidden_dropout), markup=False)
        return
    if loop.valid_loss is not None:
        for line in learnt(prepared, loop, loop.valid_loss):
            console().print(line, markup=False)
    if spec.sample and loop.world.holds_whole_model:
        _sample(spec, prepared, loop)
    console().print(f"\nagain: {generate_command(spec)}", markup=False)


def learnt(prepared: Prepared, loop: Loop, loss: float) -> list[str]:
    """The model's bits per byte in a table of yardsticks.

    N-grams are only counted on a CPU: elsewhere, devices would wait for it.

    Args:
        prepared: the run's data.
        loop: the finished run.
        loss: on the validation split, in nats per token.
    """
    bits = loop.feed.bits_per_byte
    others = cheap(loop.recipe, prepared, bits)
    notes: list[str] = []
    if loop.engine.platform.name == "cpu":
        try:
            others += counting(loop.recipe, prepared, bits)
        except (UserError, OSError) as error:  # the run is finished and saved; this is no reason to fail it
            notes = [f"note: no n-grams were counted: {error}"]
    else:
        notes = ["n-gram models are compared on CPU runs only"]
    head = "\nheld-out text, in bits per byte (8 as it is; less is better):"
    return [head, *table(Yardstick(f"this model (loss {loss:.4f})", bits(loss)), others), *notes]


def sample_prompt(recipe: Recipe) -> str:
    """What the sample continues: text of the kind that the first source has."""
    return PROMPTS.get(recipe.data.sources[0].type, "The ")


def generate_command(spec: RunSpec) -> str:
    """The command that continues the same prompt again, quoted for a shell."""
    words = ["llmrecipes", "generate", str(spec.run_dir), "--prompt", sample_prompt(spec.recipe)]
    if spec.data_dir != DATA:
        words += ["--data-dir", str(spec.data_dir)]
    return shlex.join(words)


def overfit_verdict(losses: list[float], dropout: float) -> str:
    """One line if the batch was learnt by heart.

    Args:
        losses: training loss of every step.
        dropout: `model.hidden_dropout`, which keeps the loss from falling to zero.

    Raises:
        UserError: it was not; with the likeliest cause.
    """
    final = statistics.fmean(losses[-5:])
    if final < LEARNT_BY_HEART:
        return f"learnt by heart: loss {losses[0]:.3f} -> {final:.4f} in {len(losses)} steps"
    if max(losses[-5:]) > losses[0]:
        cause = "the loss rose: optimizer.lr is too high, or a gradient has the wrong sign"
    elif losses[0] - final < 0.02 * losses[0]:
        cause = "the loss hardly moved: optimizer.lr is too low, or no gradient reaches the weights (try --anomaly)"
    elif dropout > 0:
        cause = f"dropout ({dropout:g}) keeps it from zero: model.hidden_dropout=0 model.attention_dropout=0"
    else:
        cause = "it was still falling: more train.train_iters, or a higher optimizer.lr"
    raise UserError(
        f"one batch was not learnt by heart: loss {losses[0]:.3f} -> {final:.4f} in {len(losses)} steps",
        rule=f"a model that can learn brings one batch below {LEARNT_BY_HEART} nats per token",
        fix=cause,
        code=ExitCode.STOP,
    )


def _sample(spec: RunSpec, prepared: Prepared, loop: Loop) -> None:
    tokenizer = prepared.tokenizer()
    prompt = sample_prompt(spec.recipe)
    ids = generate(
        loop.engine.modules[0],
        tokenizer.encode(prompt),
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(seed=spec.recipe.train.seed),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )
    console().print(f"\nsample:\n{prompt}{tokenizer.decode(list(ids))}", markup=False)
