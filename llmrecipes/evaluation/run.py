"""Everything that a request asks for, on one model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from llmrecipes.data.prepared import Prepared
from llmrecipes.data.tokenizer import TextTokenizer
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.evaluation.checks import bias, memorisation, repetition
from llmrecipes.evaluation.lead import RankZeroScorer
from llmrecipes.evaluation.perplexity import perplexity
from llmrecipes.evaluation.request import DATA, EvaluationRequest, EvaluationResult
from llmrecipes.evaluation.tasks import Tasks, load_tasks
from llmrecipes.evaluation.texts import Texts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepare:
    """What a request needs besides the model, read and checked before it is loaded; on the first rank.

    Attributes:
        request: what is asked for.
        prepared: the run's data; None for a model without a run.
        tokenizer: of the model.
        window: tokens that perplexity reads at once.
        texts: data of perplexity.
        tasks: of the harness; None if there are none.
    """

    request: EvaluationRequest
    prepared: Prepared | None
    tokenizer: TextTokenizer
    window: int
    texts: tuple[Texts, ...]
    tasks: Tasks | None

    @classmethod
    def of(
        cls,
        request: EvaluationRequest,
        prepared: Prepared | None,
        tokenizer: TextTokenizer,
        window: int,
        positions: int,
    ) -> Prepare:
        """Read and check.

        Args:
            request: what is asked for.
            prepared: the run's data; None for a model without a run.
            tokenizer: of the model.
            window: tokens that perplexity reads at once, if the request does not say.
            positions: tokens that the model can read at once.

        Raises:
            UserError: a task or data that is missing, or a length that the model does not have.
        """
        texts = tuple(Texts.parse(name, text_key=request.text_key, limit=request.limit) for name in request.data)
        window = request.window or window
        if window > positions:
            rule = f"1 to {positions}, the model's positions"
            raise UserError(f"{window}", where="--window", rule=rule, fix=f"--window {positions}")
        if (request.stride or 1) > window:
            rule = f"1 to {window}, the tokens of a window"
            raise UserError(f"{request.stride}", where="--stride", rule=rule, fix=f"--stride {window}")
        writes = {"repetition", "memorisation"} & set(request.checks)
        if writes and request.prefix + request.length > positions:
            half = positions // 2
            raise UserError(
                f"{request.prefix} + {request.length} tokens",
                where="--prefix, --length",
                rule=f"prompt and continuation fit into the model's {positions} positions",
                fix=f"--prefix {half} --length {half}",
            )
        needed = (*texts, *((Texts.parse(DATA),) if writes and not (texts and texts[0].source) else ()))
        if "memorisation" in request.checks:
            needed = (*needed, Texts.parse("train"), Texts.parse(DATA))
        for source in needed:
            source.require(prepared)
        tasks = None
        if request.tasks:
            tasks = load_tasks(request.tasks, request.include_path, trust_code=request.trust_code)
        return cls(request, prepared, tokenizer, window, texts, tasks)

    def run(self, lead: RankZeroScorer) -> list[EvaluationResult]:
        """All results, in the order of the request: data, tasks, checks; inside `RankZeroScorer.run`.

        Raises:
            UserError: see the tasks.
        """
        request, results = self.request, list[EvaluationResult]()
        for texts in self.texts:
            logger.info("perplexity on %s", texts.name)
            lead.name = texts.name
            documents = texts.documents(self.tokenizer, self.prepared)
            stride = request.stride or max(1, self.window // 2)
            size = texts.bytes(self.prepared)
            count, window = texts.count(self.prepared), self.window
            results.append(
                perplexity(lead, texts.name, documents, length=window, stride=stride, text_bytes=size, count=count)
            )
        if self.tasks is not None:
            from llmrecipes.evaluation.harness import run_tasks

            logger.info("tasks: %s", ", ".join(self.tasks.names))
            lead.name = "tasks"
            results += run_tasks(lead, self.tasks, limit=request.limit, num_fewshot=request.num_fewshot)
        for check in request.checks:
            logger.info("check: %s", check)
            lead.name = check
            results.append(self._check(lead, check))
        return results

    def _check(self, lead: RankZeroScorer, check: str) -> EvaluationResult:
        request = self.request
        if check == "bias":
            return bias(lead)
        prefix, length, samples = request.prefix, request.length, request.samples
        if check == "memorisation" and self.prepared is not None:
            return memorisation(lead, self.prepared, prefix=prefix, length=length, samples=samples, seed=request.seed)
        texts = self.texts[0] if self.texts and self.texts[0].source else Texts.parse(DATA)
        sampling = Sampling(request.temperature, 0, 1.0, request.seed)
        documents = texts.documents(self.tokenizer, self.prepared)
        return repetition(lead, documents, prefix=prefix, length=length, samples=samples, sampling=sampling)
