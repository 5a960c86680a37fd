"""lm-evaluation-harness with our engine as its model (arXiv 2405.14782)."""

from __future__ import annotations

import io
import math
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.utils
import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM

from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.evaluation.lead import Interrupted, RankZeroScorer
from llmrecipes.evaluation.perplexity import windows
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.evaluation.sandbox import sandboxed_templates
from llmrecipes.evaluation.tasks import Tasks

SEED = 1234
"""Of few-shot examples: the harness's default."""
BOOTSTRAP = 1000
"""Resamples for the standard error of metrics that are not a mean; the harness takes 100,000, in separate processes."""
ANSWER = 256
"""Most tokens of an answer where the task does not say: the harness's default for models of transformers."""


class HarnessModel(TemplateLM):
    """The harness's interface of a model, on the first rank; see `RankZeroScorer`.

    Contexts lose tokens on the left where they do not fit, as with the harness's models. Texts begin with BOS where
    transformers puts it there; an empty context is BOS, or else the end-of-document token. Both as in `HFLM`.

    Args:
        lead: the model.
    """

    def __init__(self, lead: RankZeroScorer) -> None:
        super().__init__()
        self._lead = lead

    @property
    def eot_token_id(self) -> int:
        """Id that ends a document."""
        return self._lead.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Id that stands for an empty context."""
        empty = self._lead.tokenizer.empty
        return self.eot_token_id if empty is None else empty

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """Ids of a text, with BOS unless that is switched off or the text begins with its name."""
        tokenizer = self._lead.tokenizer
        ids = tokenizer.encode(string)
        if add_special_tokens is None:
            name = tokenizer.backend.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(name)
        return [*tokenizer.prefix, *ids, *tokenizer.suffix] if add_special_tokens else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The harness's, which encodes both together, and so has no token left to score where they end in one token:
        there, and where the context is nothing but spaces, each is encoded by itself.
        """
        before, after = super()._encode_pair(context, continuation)
        if after and before:
            return before, after
        apart = self.tok_encode(continuation, add_special_tokens=False)
        return self.tok_encode(context) or [self.prefix_token_id], apart

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = self._lead.positions
        rows = []
        for (context, continuation), before, after in requests:
            if len(after) > longest:
                raise UserError(
                    f"an answer has {len(after)} tokens: {continuation[:60]!r} after {context[-60:]!r}",
                    where="--task",
                    rule=f"a scored answer must fit into the model's {longest} positions",
                    fix="use a task with shorter answers, or a model with more positions",
                )
            rows.append(([*before, *after][-(longest + 1) :], len(after)))
        return [(math.fsum(row.logprobs), row.greedy) for row in self._lead.score(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows that do not share scored tokens."""
        del disable_tqdm
        longest = self._lead.positions
        parts = list[int]()

        def rows() -> Iterator[tuple[list[int], int]]:
            for number, request in enumerate(requests):
                for row in windows([self.prefix_token_id, *self.tok_encode(request.args[0])], longest, longest):
                    parts.append(number)
                    yield row
                self._lead.count(1)

        self._lead.begin(len(requests))
        totals = [0.0] * len(requests)
        for count, row in enumerate(self._lead.score(rows())):
            totals[parts[count]] += math.fsum(row.logprobs)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts up to a stop text."""
        del disable_tqdm
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(number)
        for numbers in groups.values():
            texts |= self._generate(numbers, [requests[n].args[0] for n in numbers], requests[numbers[0]].args[1])
        return [texts[number] for number in range(len(requests))]

    def _generate(self, numbers: list[int], contexts: list[str], options: dict[str, Any]) -> dict[int, str]:
        stops = options.get("until") or []
        until = [stops] if isinstance(stops, str) else list(stops)
        longest = self._lead.positions
        # Half of the positions at least are for the context.
        limit = min(int(options.get("max_gen_toks") or options.get("max_new_tokens") or ANSWER), longest // 2)
        temperature = float(options.get("temperature") or 0.0)
        drawn = bool(options.get("do_sample", temperature > 0)) and temperature > 0
        sampling = Sampling(
            temperature if drawn else 0.0, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0), SEED
        )
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-(longest - limit) :] for text in contexts]
        written = self._lead.extend(prompts, [limit] * len(prompts), sampling, [text for text in until if text])
        return {
            number: _before(self._lead.tokenizer.decode(new), until)
            for number, new in zip(numbers, written, strict=True)
        }


def _before(text: str, until: Sequence[str]) -> str:
    """A text up to the first of some stop texts."""
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text


def run_tasks(
    lead: RankZeroScorer, tasks: Tasks, *, limit: int | None, num_fewshot: int | None
) -> list[EvaluationResult]:
    """Results of the harness's tasks, and of their groups; on the first rank, inside `RankZeroScorer.run`.

    Random states of Python, NumPy and torch are the same afterwards, so that a training is not affected.

    Args:
        lead: the model.
        tasks: loaded before.
        limit: documents of each task; None for all.
        num_fewshot: examples in the context; None: as each task says.

    Raises:
        UserError: a task that cannot be computed.
    """
    with _undisturbed():
        try:
            output = lm_eval.evaluator.simple_evaluate(
                model=HarnessModel(lead),
                tasks=list(tasks.built),
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
                fewshot_random_seed=SEED,
                task_manager=tasks.manager,
                confirm_run_unsafe_code=False,
            )
        except (UserError, Interrupted):
            raise
        except (  # a task's mistake, or its data's
            ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, SyntaxError,
            RecursionError, re.error, TemplateError,
        ) as error:  # fmt: skip
            raise UserError(
                f"a task failed: {type(error).__name__}: {error}", where=", ".join(tasks.names), fix="fix the task"
            ) from error
    samples, versions = output.get("n-samples", {}), output.get("versions", {})
    shots = output.get("n-shot", {})
    results = {**output["results"], **output.get("groups", {})}
    return [
        EvaluationResult(name, metrics_of(values), _settings(name, samples, versions, shots))
        for name, values in results.items()
    ]


def metrics_of(values: dict[str, Any]) -> dict[str, float]:
    """The harness's numbers: `acc,none` is acc, and `exact_match,strict-match` is exact_match.strict-match."""
    metrics = {}
    for key, value in values.items():
        name, _, how = key.partition(",")
        if how and isinstance(value, int | float) and not isinstance(value, bool):
            metrics[name if how == "none" else f"{name}.{how}"] = float(value)
    return metrics


def _settings(name: str, samples: dict[str, Any], versions: dict[str, Any], shots: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"harness": lm_eval.__version__}
    if name in samples:
        settings["documents"] = samples[name]["effective"]
    if name in versions:
        settings["version"] = versions[name]
    if name in shots:
        settings["num_fewshot"] = shots[name]
    return settings


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block that leaves random states, environment and terminal as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    before = os.environ.get("DISABLE_MULTIPROC")
    changed: list[tuple[Any, str, Any]] = [
        (lm_eval.api.task, "tqdm", partial(lm_eval.api.task.tqdm, disable=True)),
        (lm_eval.evaluator, "add_env_info", lambda _results: None),  # starts pip, and asks for the CPU's name
        (lm_eval.evaluator, "get_git_commit_hash", lambda: None),  # of the working directory
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    os.environ["DISABLE_MULTIPROC"] = "1"  # no processes forked from one that holds a GPU
    quiet = io.StringIO()
    try:
        with sandboxed_templates(), redirect_stdout(quiet), redirect_stderr(quiet):
            yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)
