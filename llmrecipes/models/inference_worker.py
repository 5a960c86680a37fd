"""One process that loads a model in one form and measures it, so that its peak memory is that of this form only."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from llmrecipes.errors import UserError
from llmrecipes.hardware.process import peak_memory
from llmrecipes.io import write_atomic

if TYPE_CHECKING:
    import torch

    from llmrecipes.data.tokens.tokenizer import TextTokenizer

ROWS = 4
"""Rows of a forward pass of perplexity."""


class InferenceSpec(BaseModel):
    """A measurement."""

    folder: Path
    """With the model."""
    program: str
    """`transformers`, `onnxruntime`, `torch.export` or `llama.cpp`."""
    dtype: str = "auto"
    """Of transformers: `fp32`, `bf16`, or `auto`, as stored."""
    texts: Path | None = None
    """Lines {"tokens": [...], "bytes": N}, a document each; None: neither perplexity nor a prompt of text."""
    window: int
    """Tokens that perplexity reads at once."""
    start: tuple[int, ...] = ()
    """Ids before the text of a document."""
    prompt_tokens: int
    new_tokens: int
    repeats: int
    threads: int
    out: Path
    """File for the result."""


@dataclass(frozen=True)
class MeasuredForm:
    """What a form of a model does on this machine.

    Attributes:
        first_token_seconds: from the prompt to the first new token, median of the repeats.
        tokens_per_second: new tokens a second after the first, one text at a time; median of the repeats.
        peak_memory_bytes: of the process until it had written them, at most; program and libraries are in it.
        memory_before_bytes: memory in bytes of the process before it loaded the model.
        cache: whether keys and values are kept; else each token is computed from all before it.
        tokens: the greedy continuation of the prompt.
        bits_per_byte: bits per byte of the texts; None without them.
        perplexity: e to the loss in nats a token; None without texts.
    """

    first_token_seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    memory_before_bytes: int
    cache: bool
    tokens: list[int]
    bits_per_byte: float | None = None
    perplexity: float | None = None


class LoadedModel(Protocol):
    """A loaded model."""

    positions: int
    cache: bool
    vocabulary: int

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [rows, length, vocabulary] of token ids [rows, length]."""

    def greedy(self, prompt: list[int]) -> Iterator[int]:
        """Most likely tokens, without end."""


class _Transformers:
    cache = True

    def __init__(self, spec: InferenceSpec) -> None:
        import torch
        import transformers

        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            spec.folder, dtype=kinds.get(spec.dtype, "auto"), trust_remote_code=False
        ).eval()
        self.positions = int(self._model.config.max_position_embeddings)
        self.vocabulary = int(self._model.config.vocab_size)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        return made

    def greedy(self, prompt: list[int]) -> Iterator[int]:
        import torch

        ids = torch.tensor([prompt])
        past = None
        while True:
            answer = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = answer.past_key_values
            token = int(answer.logits[0, -1].argmax())
            ids = torch.tensor([[token]])
            yield token


class _TorchExport:
    cache = False

    def __init__(self, spec: InferenceSpec) -> None:
        import torch

        self.positions, self.vocabulary = sizes(spec.folder)
        self._run = torch.export.load(spec.folder / "model.pt2").module()

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._run(ids)
        return made

    def greedy(self, prompt: list[int]) -> Iterator[int]:
        return _without_cache(self.logits, prompt)


class _Onnx:
    def __init__(self, spec: InferenceSpec) -> None:
        from llmrecipes.models.exported_programs import OnnxProgram

        self.positions, self.vocabulary = sizes(spec.folder)
        self._program = OnnxProgram(spec.folder / "model.onnx", spec.threads)
        self.cache = self._program.cache

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self._program.run(ids)[0]

    def greedy(self, prompt: list[int]) -> Iterator[int]:
        import torch

        if not self.cache:
            yield from _without_cache(self.logits, prompt)
        ids = torch.tensor([prompt])
        past = None
        while True:
            logits, past = self._program.run(ids, past)
            token = int(logits[0, -1].argmax())
            ids = torch.tensor([[token]])
            yield token


def sizes(folder: Path) -> tuple[int, int]:
    """Positions and vocabulary of a model in Hugging Face's form.

    Raises:
        UserError: its config.json does not say them.
    """
    from llmrecipes.hf.reading import CONFIG, read_json

    config = read_json(folder, CONFIG)
    positions = config.get("max_position_embeddings", config.get("n_positions"))  # the latter in GPT-2
    if not isinstance(positions, int) or not isinstance(config.get("vocab_size"), int):
        raise UserError(
            "no max_position_embeddings or vocab_size",
            where=str(folder / CONFIG),
            rule="config.json of a language model must have both",
        )
    return positions, config["vocab_size"]


def _without_cache(logits: Callable[[torch.Tensor], torch.Tensor], prompt: list[int]) -> Iterator[int]:
    import torch

    ids = list(prompt)
    while True:
        ids.append(int(logits(torch.tensor([ids]))[0, -1].argmax()))
        yield ids[-1]


class _LlamaCpp:
    cache = True

    def __init__(self, spec: InferenceSpec) -> None:
        import llama_cpp

        self._program = llama_cpp.Llama(
            str(spec.folder / "model.gguf"),
            n_ctx=0,
            verbose=False,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
            logits_all=True,
        )
        self.positions, self.vocabulary = self._program.scores.shape  # n_ctx() is rounded up to 256

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        made = []
        for row in ids.tolist():
            self._program.reset()
            self._program.eval(row)
            made.append(torch.from_numpy(self._program.scores[: len(row)].copy()))
        return torch.stack(made)

    def greedy(self, prompt: list[int]) -> Iterator[int]:
        self._program.reset()
        yield from self._program.generate(prompt, temp=0.0, reset=True)


PROGRAMS: dict[str, Callable[[InferenceSpec], LoadedModel]] = {
    "transformers": _Transformers,
    "onnxruntime": _Onnx,
    "torch.export": _TorchExport,
    "llama.cpp": _LlamaCpp,
}


def measure(spec: InferenceSpec) -> MeasuredForm:
    """Load a model and measure it."""
    import torch

    torch.set_num_threads(spec.threads)
    texts = [] if spec.texts is None else [json.loads(line) for line in spec.texts.read_text("utf-8").splitlines()]
    before = peak_memory()
    with torch.no_grad(), redirect_stderr(StringIO()):
        program = PROGRAMS[spec.program](spec)
        length = max(1, min(spec.prompt_tokens, program.positions - spec.new_tokens - 1))
        known = [token for text in texts for token in text["tokens"]][:length]
        draw = torch.Generator().manual_seed(0)
        prompt = known or torch.randint(0, program.vocabulary, (length,), generator=draw).tolist()
        new = max(2, min(spec.new_tokens, program.positions - len(prompt) - 1))
        firsts = []
        speeds = []
        tokens = list[int]()
        for _ in range(spec.repeats + 1):  # the first one warms up, and unpacks what is packed
            started = time.perf_counter()
            stream = program.greedy(prompt)
            tokens = [next(stream)]
            first = time.perf_counter()
            tokens += [next(stream) for _ in range(new - 1)]
            ended = time.perf_counter()
            firsts.append(first - started)
            speeds.append((new - 1) / (ended - first))
        peak = peak_memory()
        scored = _perplexity(spec, program, texts) if texts else {}
    return MeasuredForm(
        first_token_seconds=statistics.median(firsts[1:]),
        tokens_per_second=statistics.median(speeds[1:]),
        peak_memory_bytes=peak,
        memory_before_bytes=before,
        cache=program.cache,
        tokens=tokens,
        bits_per_byte=scored.get("bits_per_byte"),
        perplexity=scored.get("perplexity"),
    )


def _perplexity(spec: InferenceSpec, program: LoadedModel, texts: list[dict[str, Any]]) -> dict[str, float]:
    """As `llmrecipes eval --data` measures it."""
    from llmrecipes.data.tokens.tokenizer import TextTokenizer
    from llmrecipes.evaluation.lead import RankZeroScorer
    from llmrecipes.evaluation.logits_scorer import ALONE, LogitsScorer
    from llmrecipes.evaluation.perplexity import perplexity
    from llmrecipes.evaluation.texts import Text

    window = min(spec.window, program.positions)
    # Texts are tokens already.
    tokenizer = TextTokenizer(None, spec.start[-1], "", prefix=spec.start)  # type: ignore[arg-type]
    lead = RankZeroScorer(LogitsScorer(program.logits, program.positions), ALONE, tokenizer, ROWS)
    documents = [Text(text["tokens"], text["bytes"]) for text in texts]
    return dict(perplexity(lead, "texts", documents, length=window, stride=max(1, window // 2)).metrics)


def folder_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer in the folder of a model.

    Raises:
        UserError: there is none, or it has no end-of-text token.
    """
    from llmrecipes.data.tokens.tokenizer import open_huggingface
    from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            "no tokenizer.json",
            where=str(folder),
            rule="text is encoded with the model's own tokenizer",
            fix="copy the tokenizer's files to that folder",
        )
    section = HuggingFaceTokenizer(type="huggingface", path=str(folder.absolute()))
    return open_huggingface(section, sizes(folder)[1])


def main(argument: str) -> None:
    """Measure what a file says, and write the result to the file that it names."""
    spec = InferenceSpec.model_validate_json(Path(argument).read_text("utf-8"))
    write_atomic(spec.out, json.dumps(asdict(measure(spec))))


if __name__ == "__main__":
    main(sys.argv[1])
