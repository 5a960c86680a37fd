"""Evaluation against direct computation, transformers and the harness's own model; data and tasks that are refused."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from jinja2.exceptions import SecurityError, UndefinedError
from rich.console import Console

from llmrecipes.data.folder.documents import documents
from llmrecipes.data.folder.prepared import Prepared, open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.read.curriculum import ScoresRecord
from llmrecipes.data.tokens.tokenizer import EOD, TextTokenizer, train
from llmrecipes.engine.base import World
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.evaluation import history, isolation, measurements
from llmrecipes.evaluation import task_files as task_files_module
from llmrecipes.evaluation.lead import Interrupted, RankZeroScorer
from llmrecipes.evaluation.measurements import Prepare, bias, distinct, rep, repetition
from llmrecipes.evaluation.perplexity import perplexity, windows
from llmrecipes.evaluation.request import EvaluationRequest, EvaluationResult
from llmrecipes.evaluation.sandbox import bounded, sandbox
from llmrecipes.evaluation.tasks import load_tasks
from llmrecipes.evaluation.texts import Text, Texts
from llmrecipes.faults.signals import StopRequest
from llmrecipes.hf.family import config_of, family_of
from llmrecipes.hf.safetensors import write
from llmrecipes.hf.weights import AsHuggingFace
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import TASKS_EVALUATED
from llmrecipes.tracking.progress import Counted
from llmrecipes.train.observers.task_scores import TaskEvaluations
from llmrecipes.workflow import evaluate
from tests.helpers import ROOMY, built, tiny, tiny_on
from tests.observing import observer
from tests.refusals import refused, require_refusal
from tests.unit.test_model_hf import Weights, state_of

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

HERE = World(rank=0, size=1, data_parallel_rank=0, data_parallel_size=1, holds_whole_model=True)
LENGTH = 64
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "read", "its", "book", "nurse", "farmer"]
SPEECH = {"init_method_std": 0.3, "vocab_size": 300, "position_embedding_type": "learned_absolute"}
"""Large weights, so that every token depends on those before it."""


def sentences(number: int, words: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(words)) for _ in range(number)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    backend, eod = train(sentences(50, 40), 300)
    return TextTokenizer(backend, eod, "")


@pytest.fixture(scope="module")
def lead(world: Any, tokenizer: TextTokenizer) -> RankZeroScorer:
    del world
    recipe = tiny(model=SPEECH)
    model = built(recipe)
    return RankZeroScorer(GPTScorer(model.modules, derive(recipe, 1, ROOMY), select()), HERE, tokenizer, batch_size=3)


@pytest.fixture(scope="module")
def prepared(corpus: Path, data_dir: Path) -> Prepared:
    recipe = tiny_on(corpus)
    prepare(recipe, data_dir, progress=lambda _line: None)
    return open_prepared(recipe, data_dir)


def direct(lead: RankZeroScorer, row: list[int]) -> list[float]:
    """Log-probabilities of a row, one row at a time, with the softmax over the vocabulary's own rows."""
    (module,) = lead._scorer._modules  # type: ignore[attr-defined]
    tokens = torch.tensor([row])
    with torch.no_grad():
        logits = module.eval()(tokens[:, :-1], torch.arange(len(row) - 1)[None], None)[0, :, :300].double()
    return [float(logits[place].log_softmax(-1)[token]) for place, token in enumerate(row[1:])]


# -- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5, 8, 9, 10, 31, 64])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_is_scored_once_after_as_many_as_fit(size: int, stride: int) -> None:
    tokens, scored = list(range(100, 100 + size)), []
    for row, last in windows(tokens, 8, stride):
        assert 2 <= len(row) <= 9 and 1 <= last < len(row)
        assert row == tokens[row[0] - 100 : row[-1] - 99]
        scored += row[-last:]
        assert len(row) == 9 or row[0] == 100
    assert scored == tokens[1:]


def test_a_stride_of_the_window_is_the_harness_own_rolling() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = list(range(30))
    theirs = [
        (list(before), list(after))
        for before, after in map(make_disjoint_window, get_rolling_token_windows(tokens, -1, 8, 1))
    ]
    ours = [(row[: len(row) - last], row[-last:]) for row, last in windows([-1, *tokens], 8, 8)]
    assert ours == theirs


# -- perplexity ------------------------------------------------------------------------------------------------------


def test_perplexity_and_bits_per_byte_are_those_of_the_formula(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    texts = [*sentences(3, 60), "short", *sentences(2, 7, seed=1)]
    given = [Text(tokenizer.encode(text), len(text.encode())) for text in texts]
    result = perplexity(lead, "here", given, length=LENGTH, stride=16)
    nats, tokens = 0.0, 0
    for text in given:
        for row, last in windows([tokenizer.eod, *text.tokens], LENGTH, 16):
            nats -= sum(direct(lead, row)[-last:])
            tokens += last
    loss = nats / tokens
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-6)
    assert (result.settings["documents"], result.settings["tokens"]) == (6, tokens)


def test_each_document_has_its_own_loss(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    texts = ["", *sentences(2, 60), "", "short", *sentences(40, 7, seed=1), ""]
    every = [Text(tokenizer.encode(text), len(text)) for text in texts]
    losses: list[tuple[float, int]] = []
    whole = perplexity(lead, "all", every, length=LENGTH, stride=16, each=lambda *one: losses.append(one))
    assert [tokens for _, tokens in losses] == [len(text.tokens) for text in every]
    assert sum(nats for nats, _ in losses) == pytest.approx(whole.metrics["loss"] * whole.settings["tokens"])
    for number in (0, 1, 3, 4, 20, 45):
        nats, tokens = losses[number]
        if not tokens:
            assert nats == 0.0
            continue
        alone = perplexity(lead, "one", [every[number]], length=LENGTH, stride=16)
        assert nats / tokens == pytest.approx(alone.metrics["loss"], rel=1e-5)


@pytest.mark.usefixtures("world")
def test_losses_by_document_are_written_beside_the_result(tmp_path: Path, prepared: Prepared) -> None:
    own, folder, recipe = prepared.tokenizer(), tmp_path / "losses", tiny(model={"init_method_std": 0.3})
    whole = RankZeroScorer(
        GPTScorer(built(recipe).modules, derive(recipe, 1, ROOMY), select()), HERE, own, batch_size=8
    )
    wanted = {"data": ("valid",), "per_document": folder}
    work = Prepare.of(EvaluationRequest.model_validate(wanted), prepared, own, LENGTH, LENGTH, "the model")
    (result,) = work.run(whole)
    record = ScoresRecord.model_validate_json((folder / "scores.json").read_bytes())
    assert (record.split, record.model, record.window, record.stride) == ("valid", "the model", LENGTH, LENGTH // 2)
    losses = np.concatenate([np.fromfile(folder / source.file, "<f4") for source in record.sources])
    tokens = [len(text.tokens) for text in Texts.parse("valid").documents(own, prepared)]
    assert len(losses) == result.settings["documents"] == len(tokens) > 1
    assert losses @ tokens / sum(tokens) == pytest.approx(result.metrics["loss"], rel=1e-6)
    assert len(set(losses)) > 1
    for other in (
        {},  # it exists
        {"data": ("valid", "test"), "per_document": tmp_path / "new"},
        {"data": ("stdlib",), "per_document": tmp_path / "new"},
        {"limit": 3, "per_document": tmp_path / "new"},
        {"trust_code": True, "per_document": tmp_path / "new"},
    ):
        with refused("--per-document"):
            Prepare.of(EvaluationRequest.model_validate(wanted | other), prepared, own, LENGTH, LENGTH)
    assert [path.name for path in tmp_path.iterdir()] == ["losses"]


def test_bytes_are_those_of_the_text_and_a_longer_context_helps_no_less(
    lead: RankZeroScorer, tokenizer: TextTokenizer
) -> None:
    umlauts = Text(tokenizer.encode("ä" * 8), 16)
    result = perplexity(lead, "here", [umlauts], length=LENGTH, stride=LENGTH)
    assert result.settings["bytes"] == 16
    known = perplexity(lead, "here", [umlauts], length=LENGTH, stride=LENGTH, text_bytes=32)
    assert known.metrics["bits_per_byte"] == pytest.approx(result.metrics["bits_per_byte"] / 2)


@pytest.mark.usefixtures("world")
def test_data_that_is_missing_or_empty_is_refused_before_a_model_is_loaded(
    tmp_path: Path, tokenizer: TextTokenizer, prepared: Prepared
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "rows.jsonl").write_text('{"other": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"\n')

    def of(**wanted: Any) -> Prepare:
        return Prepare.of(EvaluationRequest.model_validate(wanted), prepared, tokenizer, LENGTH, LENGTH)

    for name in ("nonsense", "text", "stdlib:x", "pickle:x"):
        with refused("--data"):
            of(data=[name])
    with refused("--data"):
        of(data=[f"text:{tmp_path / 'empty.txt'}"])
    with refused("data.sources"):
        of(data=[f"text:{tmp_path / 'none.txt'}"])
    with refused(f"{tmp_path / 'rows.jsonl'}:1"):
        of(data=[f"jsonl:{tmp_path / 'rows.jsonl'}"])
    of(data=[f"jsonl:{tmp_path / 'rows.jsonl'}"], text_key="other")
    with refused(f"{tmp_path / 'bad.jsonl'}:1"):
        of(data=[f"jsonl:{tmp_path / 'bad.jsonl'}"])
    with refused("--window", rule="64"):
        of(data=["valid"], window=65)
    with refused("--stride", rule="64"):
        of(data=["valid"], stride=65)
    with refused("--prefix, --length", rule="64"):
        of(checks=["repetition"])
    with refused("--data"):
        Prepare.of(EvaluationRequest(data=("valid",)), None, tokenizer, LENGTH, LENGTH)
    of(data=["valid"], checks=["repetition"], prefix=8, length=8)


@pytest.mark.usefixtures("world")
def test_a_split_has_the_bytes_that_were_counted_when_it_was_prepared(prepared: Prepared) -> None:
    texts = Texts.parse("valid")
    documents = list(texts.documents(prepared.tokenizer(), prepared))
    assert sum(text.bytes for text in documents) == texts.bytes(prepared)
    assert len(documents) == prepared.manifest.counts("valid").documents
    some = Texts.parse("valid", limit=2)
    assert len(list(some.documents(prepared.tokenizer(), prepared))) == 2 and some.bytes(prepared) is None


# -- the harness -----------------------------------------------------------------------------------------------------


@pytest.fixture
def task_files(tmp_path: Path) -> Path:
    """A multiple-choice task, one of whole texts and one of generated answers, on local data."""
    draw = random.Random(3)
    rows = [
        {"question": text, "choices": [f" {draw.choice(WORDS)}" for _ in range(3)], "answer": draw.randrange(3)}
        for text in sentences(12, 9, seed=2) + sentences(2, 80, seed=4)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    mean = "aggregation: mean, higher_is_better: true"
    (tmp_path / "choice.yaml").write_text(f"""task: a_choice
{head}output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, {mean}}}, {{metric: acc_norm, {mean}}}]
""")
    (tmp_path / "whole.yaml").write_text(f"""task: a_text
{head}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
""")
    (tmp_path / "written.yaml").write_text(f"""task: an_answer
{head}output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["{WORDS[1]}"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match, {mean}}}]
""")
    return tmp_path


@pytest.fixture
def theirs(lead: RankZeroScorer, tokenizer: TextTokenizer, tmp_path: Path) -> HFLM:
    """The harness's own model, with transformers' GPT-2 of the same weights."""
    from lm_eval.models.huggingface import HFLM

    (module,) = lead._scorer._modules  # type: ignore[attr-defined]
    model = tiny(model=SPEECH).model
    family = family_of(model)
    folder = tmp_path / "exported"
    folder.mkdir()
    write(AsHuggingFace(Weights(state_of(module)), family, model), config_of(family, model), folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.backend.to_str()), eos_token=EOD
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return HFLM(pretrained=loaded, tokenizer=wrapped, batch_size=4, max_length=LENGTH, device="cpu")


@pytest.mark.parametrize("added", [(), ("bos",), ("eos",), ("bos", "eos")], ids="-".join)
def test_texts_begin_as_those_of_the_harness_own_model(
    lead: RankZeroScorer, theirs: HFLM, tmp_path: Path, added: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BOS before a text, EOS behind it, both and neither; the folder's tokenizer has the key of transformers."""
    import lm_eval.api.instance

    from llmrecipes.data.tokens.tokenizer import open_huggingface
    from llmrecipes.evaluation.harness import HarnessModel

    backend = lead.tokenizer.backend
    number = backend.get_vocab_size() - 1
    bos = backend.id_to_token(number)
    keys = {f"add_{name}_token": name in added for name in ("bos", "eos")}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(backend.to_str()), bos_token=bos, eos_token=EOD, **keys
    ).save_pretrained(tmp_path / "folder")
    theirs.tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    section = HuggingFaceTokenizer(type="huggingface", path=str(tmp_path / "folder"))
    monkeypatch.setattr(lead, "tokenizer", open_huggingface(section, 1 << 20))
    ours = HarnessModel(lead)
    assert ours.prefix_token_id == theirs.prefix_token_id == number
    for text in ("the cat sat", "", f"{bos} the cat", "the cat " * 200):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)

    def asked(kind: str, *arguments: Any) -> Any:
        return lm_eval.api.instance.Instance(kind, {}, arguments, 0)

    pairs = [asked("loglikelihood", context, " the cat sat") for context in ("", "a mat", "a mat " * 90)]
    scored = zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True)
    assert all(one[0] == pytest.approx(other[0], rel=1e-4) and one[1] == other[1] for one, other in scored)
    # Not one phrase again and again: the harness takes windows with the same tokens for one.
    whole = [asked("loglikelihood_rolling", text) for text in ("the cat sat", *sentences(3, 90))]
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), rel=1e-4)


def test_numbers_are_those_of_the_harness_own_model(lead: RankZeroScorer, theirs: HFLM, task_files: Path) -> None:
    """Contexts that are too long are cut in the same way; and nothing is drawn from the random states of training."""
    import lm_eval

    from llmrecipes.evaluation.harness import BOOTSTRAP, metrics_of, run_tasks

    names = [str(task_files / f"{name}.yaml") for name in ("choice", "whole", "written")]
    tasks = load_tasks(names)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    ours = {result.task: result for result in run_tasks(lead, tasks, limit=None, num_fewshot=0)}
    assert before[0] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())
    assert "DISABLE_MULTIPROC" not in os.environ
    again = load_tasks(names)
    other = lm_eval.simple_evaluate(
        model=theirs, tasks=list(again.built), num_fewshot=0, bootstrap_iters=BOOTSTRAP, task_manager=again.manager
    )
    expected = {name: metrics_of(values) for name, values in other["results"].items()}
    assert {name: set(result.metrics) for name, result in ours.items()} == {n: set(m) for n, m in expected.items()}
    for name, result in ours.items():
        assert result.settings["documents"] == 14
        for metric, value in expected[name].items():
            assert result.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, metric)
    assert 0 < ours["a_choice"].metrics["acc"] < 1
    few = run_tasks(lead, load_tasks(names[:1]), limit=5, num_fewshot=0)
    assert few[0].settings["documents"] == 5


def test_an_answer_that_ends_in_a_token_of_the_context_is_scored_by_itself(lead: RankZeroScorer) -> None:
    from llmrecipes.evaluation.harness import HarnessModel

    model, encode = HarnessModel(lead), lead.tokenizer.encode
    assert len(encode("the ca")) >= len(encode("the cat")), "one token, which begins in the context"
    assert model._encode_pair("the ca", "t") == (encode("the ca"), encode("t"))
    assert model._encode_pair("  ", "cat") == (encode("  "), encode("cat"))
    assert model._encode_pair("the", " cat") == (encode("the"), encode(" cat"))


def test_an_interrupted_evaluation_has_no_result(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    stopped = RankZeroScorer(lead._scorer, HERE, tokenizer, 1, stop)
    texts = [Text(tokenizer.encode(text), len(text)) for text in sentences(4, 20)]
    with pytest.raises(Interrupted):
        stopped.run(lambda one: perplexity(one, "here", texts, length=LENGTH, stride=8))
    assert len(asked) == 3


PLAIN = "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("task: [", ()),
        ("just words", ()),
        ("task: mine\ndoc_to_text: !function code.run\n", ()),
        ("task: mine\nclass: !function code.Task\n", ()),
        ("task: mine\nclass: Task\n", ()),
        ("group: all\ntask: [{task: a, custom_dataset: x}]\n", ()),
        (PLAIN + "use_prompt: other.yaml:x\n", "use_prompt"),
        ("task: mine\ndataset_path: pandas\n", ()),
        ("task: mine\ndataset_path: ./code.py\n", "dataset_path"),
        ("task: mine\ninclude: task.yaml\n", "task.yaml"),
        ("task: mine\nx: !!python/object/apply:os.system [touch owned]\n", ()),
    ],
)
def test_a_task_file_that_is_damaged_or_is_code_is_refused(
    text: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text(text)
    (tmp_path / "code.py").write_text("open('owned', 'w')\nrun = Task = print\n")
    with refused(tmp_path / "task.yaml", rule=rule):
        load_tasks([str(tmp_path / "task.yaml")])
    with refused(tmp_path / "task.yaml", rule=rule):
        load_tasks(["arc_easy"], include=tmp_path)
    assert not (tmp_path / "owned").exists()


CODE = "import os\nos.mkdir(RAN)\n\n\ndef run(*_, **__):\n    return []\n\n\nTask = run\n"
"""A module that leaves a trace when it is imported."""
IN_A_GROUP = "group: all\ntask: [{task: inner, %s}]\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + "metric_list: [{metric: HERE/code.py}]\n",
        PLAIN + "metric_list: [{metric: ./code.py, aggregation: mean, higher_is_better: true}]\n",
        PLAIN + "metric_list: [{metric: !function code.run, aggregation: mean}]\n",
        PLAIN + "metric_list: [{metric: acc, hf_evaluate: true}]\n",
        PLAIN + "metric_list: [{metric: exact_match, aggregation: !function code.run}]\n",
        PLAIN + "metric_list: [{metric: exact_match, aggregation: code.run}]\n",
        PLAIN + "metric_list: [{metric: exact_match, compute: !function code.run}]\n",
        PLAIN + "metric_list: {metric: exact_match}\n",
        PLAIN + "filter_list: [{name: x, filter: [{function: custom, filter_fn: !function code.run}]}]\n",
        PLAIN + "filter_list: [{name: x, filter: [{function: !function code.run}]}]\n",
        PLAIN + "filter_list: [{name: x, filter: [{function: regex, regex_pattern: !function code.run}]}]\n",
        PLAIN + "fewshot_config: {sampler: !function code.Task}\n",
        PLAIN + "fewshot_config: {samples: !function code.run}\n",
        PLAIN + "fewshot_config: {process_docs: code.run}\n",
        PLAIN + "process_docs: code.run\n",
        PLAIN + "process_results: !function code.run\n",
        PLAIN + "custom_dataset: !function code.run\n",
        PLAIN + "doc_to_image: !function code.run\n",
        PLAIN + "doc_to_choice: [!function code.run]\n",
        PLAIN + "use_prompt: promptsource:x\n",
        PLAIN + "generation_kwargs: {until: !function code.run}\n",
        PLAIN + "metadata: {pretrained: !function code.run}\n",
        PLAIN + "unsafe_code: true\n",
        PLAIN + "x: !!python/object/new:os.system [mkdir RAN]\n",
        PLAIN + "? !!python/name:os.system\n: 1\n",
        PLAIN.replace("rows.jsonl", "reference://::code.json"),
        PLAIN.replace("rows.jsonl", "https://example.org/rows.jsonl"),
        PLAIN.replace("data_files", "features: !function code.run, data_files"),
        PLAIN.replace("data_files", "storage_options: {simple_templates: false}, data_files"),
        PLAIN.replace("data_files", "trust_remote_code: true, data_files"),
        PLAIN.replace("data_files", "converters: {q: code.run}, data_files"),
        PLAIN.replace("path: json", "path: HERE/code.py"),
        PLAIN.replace("path: json", "path: pandas"),
        PLAIN.replace("path: json", "path: !function code.run"),
        "include: sub/code.yaml\n" + PLAIN,
        "include: HERE/sub/code.yaml\n" + PLAIN,
        "include: [plain.yaml, sub/code.yaml]\n" + PLAIN,
        IN_A_GROUP % "class: !function code.Task",
        IN_A_GROUP % "metric_list: [{metric: HERE/code.py}]",
        IN_A_GROUP % "task: [!function code.run]",
        "group: all\ntask: []\naggregate_metric_list: [{metric: acc, aggregation: !function code.run}]\n",
        "group: all\nprocess_docs: !function code.run\ntask: [arc_easy]\n",
        "group: all\ntask: [{task: niah_multikey_1, metadata: {pretrained: HERE}}]\n",
        "group: all\nmetadata: {pretrained: HERE}\ndataset_path: json\ntask: [arc_easy]\n",
        "group: all\ntask: [{task: arc_easy, dataset_path: HERE}]\n",
        "group: all\ntask: [{group: mmlu, dataset_kwargs: {data_files: rows.jsonl}}]\n",
    ],
)
def test_no_way_to_name_code_in_a_task_file_runs_it(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "code.py").write_text(CODE.replace("RAN", repr(str(tmp_path / "ran"))))
    (tmp_path / "sub/code.yaml").write_text("process_docs: !function code.run\n")
    (tmp_path / "plain.yaml").write_text("description: ''\n")
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "a": "b"}\n')
    templates = 'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n' if text.endswith(PLAIN) or PLAIN in text else ""
    task = tmp_path / "task.yaml"
    task.write_text(text.replace("HERE", str(tmp_path)).replace("RAN", str(tmp_path / "ran")) + templates)
    with refused(tmp_path / "sub/code.yaml" if "sub/code.yaml" in text else task):
        load_tasks([str(task)])
    assert not (tmp_path / "ran").exists()


def test_a_link_includes_what_lies_beside_its_target(tmp_path: Path) -> None:
    """The harness reads it there; a check beside the link would be of another file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/code.py").write_text(CODE.replace("RAN", repr(str(tmp_path / "ran"))))
    (tmp_path / "inner.yaml").write_text("description: ''\n")
    (tmp_path / "sub/inner.yaml").write_text("process_docs: !function code.run\n")
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "a": "b"}\n')
    (tmp_path / "sub/real.yaml").write_text(
        PLAIN.replace("rows.jsonl", str(tmp_path / "rows.jsonl")) + "include: inner.yaml\ndoc_to_text: q\n"
    )
    (tmp_path / "task.yaml").symlink_to("sub/real.yaml")
    with refused(tmp_path / "sub/inner.yaml", rule="code.run"):
        load_tasks([str(tmp_path / "task.yaml")])
    assert not (tmp_path / "ran").exists()


def test_what_runs_is_what_was_parsed(task_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes between the check and the harness."""
    path = task_files / "choice.yaml"
    (task_files / "code.py").write_text(CODE.replace("RAN", repr(str(task_files / "ran"))))
    parsed = task_files_module.read_task_file

    def then_changed(file: Path, where: str) -> task_files_module.TaskFile:
        read = parsed(file, where)
        path.write_text(path.read_text() + "process_docs: !function code.run\n")
        return read

    monkeypatch.setattr("llmrecipes.evaluation.tasks.read_task_file", then_changed)
    (task,) = load_tasks([str(path)]).built
    assert task.task_name == "a_choice" and len(task.eval_docs) == 14
    assert not (task_files / "ran").exists()


def test_a_local_task_takes_no_name_of_the_harness(task_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = task_files / "choice.yaml"
    path.write_text(path.read_text().replace("task: a_choice", "task: arc_easy"))
    with refused(path, rule="arc_easy"):
        load_tasks(["arc_easy"], include=task_files)
    monkeypatch.chdir(task_files)
    (task_files / "allenai/ai2_arc").mkdir(parents=True)
    with refused("--task", rule=("allenai/ai2_arc", "arc_easy")):
        load_tasks(["arc_easy"])


def test_a_template_that_fails_on_a_later_document_is_the_task_s_mistake(
    lead: RankZeroScorer, task_files: Path
) -> None:
    from llmrecipes.evaluation.harness import run_tasks

    path = task_files / "choice.yaml"
    (task_files / "rows.jsonl").write_text("".join(f'{{"n": {n}, "choices": ["a", "b"]}}\n' for n in (1, 0)))
    text = path.read_text().replace("{{answer}}", "{{0}}")
    for template in ("{{1 // n}}", "{{'a'.ljust(10 if n else 10**9)}}"):
        path.write_text(text.replace("{{question}}", template))
        with refused(path):
            run_tasks(lead, load_tasks([str(path)]), limit=None, num_fewshot=0)


def test_groups_of_local_tasks_are_made_of_parsed_files(task_files: Path) -> None:
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {task_files / 'rows.jsonl'}}}}}\ntest_split: test\n"
    )
    (task_files / "both.yaml").write_text(
        "group: both\n"
        "task: [a_choice, {task: a_text, task_alias: other}, {task: inline, output_type: loglikelihood}]\n"
        f"{data}doc_to_text: '{{{{question}}}}'\ndoc_to_target: ' {WORDS[0]}'\nnum_fewshot: 0\n"
        "aggregate_metric_list: {metric: acc}\n"
    )
    (group,) = load_tasks(["both"], include=task_files).built
    names = [task.task_name for task in group.get_all_tasks()]
    assert (group.name, names) == ("both", ["a_choice", "a_text", "both::inline"])
    assert group.get("a_text").config.task_alias == "other"
    (task_files / "both.yaml").write_text("group: both\ntask: [{group: inner, task: [both]}]\n")
    with refused(task_files / "both.yaml"):
        load_tasks(["both"], include=task_files)


def test_data_is_read_by_plain_readers_only(task_files: Path) -> None:
    """A folder's files choose the reader; that of archives and pickles is another."""
    folder = task_files / "rows"
    folder.mkdir()
    with tarfile.open(folder / "test.tar", "w") as archive:
        archive.add(task_files / "rows.jsonl", "a.pth")
    path = task_files / "choice.yaml"
    text = path.read_text()
    path.write_text(re.sub("dataset_path.*\n.*\n", f"dataset_path: {folder}\n", text))
    with refused("a_choice"):
        load_tasks([str(path)])
    (folder / "test.tar").unlink()
    (task_files / "rows.jsonl").rename(folder / "test.jsonl")
    assert len(load_tasks([str(path)]).built[0].eval_docs) == 14


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
        "x: " + "[" * 100_000 + "\n",
        "x: " + "{a: " * 100_000 + "\n",
        "".join(f"{' ' * level}x:\n" for level in range(500)),
        "x: " + "9" * 5000 + "\n",
        "x: 2026-99-99\n",
        "x: " + "y" * 300_000 + "\n",
        "[1]: 2\n",
        "\x00",
        "x: !!binary a\n",
    ],
)
def test_a_task_file_that_exhausts_or_confuses_the_parser_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(PLAIN + text)
    with refused(tmp_path / "task.yaml"):
        load_tasks([str(tmp_path / "task.yaml")])


def test_a_task_file_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "gone.yaml").symlink_to("nothing")
    for name in ("fifo", "zero", "folder", "loop", "gone"):
        with refused(tmp_path / f"{name}.yaml"):
            load_tasks([str(tmp_path / f"{name}.yaml")])
        (tmp_path / "task.yaml").write_text(f"{PLAIN}include: {name}.yaml\n")
        with refused(tmp_path / f"{name}.yaml"):
            load_tasks([str(tmp_path / "task.yaml")])


@pytest.mark.parametrize(
    "template",
    [
        "{{cycler.__init__.__globals__.os.mkdir('ran')}}",
        "{{question.__class__.__mro__}}",
        "{{'a' * 10**9}}",
        "{{2 ** 100000}}",
        "{{'%999999999d' % 1}}",
        "{{'%999999999d'|format(1)}}",
        "{{'{:999999999}'.format(1)}}",
        "{{'{:{w}}'.format(1, w=999999999)}}",
        "{{'a'.ljust(10**9)}}",
        "{{'a'|center(10**9)}}",
        "{{lipsum(100000)}}",
        "{{('b' * 4000000)|replace('', 'b' * 4000000)}}",
        "{% set a = 'xx' %}" + "{% set a = a ~ a %}" * 60 + "{{a}}",
        "{% set a = 'xx' %}" + "{% set a = [a, a]|join %}" * 60 + "{{a}}",
        "{% for a in range(10000) %}{{'x' * 4000}}{% endfor %}",
        "{% for a in question %}{% for b in question %}{% for c in question %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(x) %}{{x}}{{x}}{% endmacro %}{{m(1)}}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "x" * 70_000,
    ],
)
def test_a_template_reaches_and_makes_nothing_but_text(template: str) -> None:
    with pytest.raises(SecurityError if "lipsum" not in template else UndefinedError):
        sandbox().from_string(template).render(question="a" * 40)


def test_a_template_has_a_time_limit_and_common_ones_work() -> None:
    with pytest.raises(SecurityError), bounded(0.2):
        sandbox().from_string("{{question|regex_replace('(a+)+$', '')}}").render(question="a" * 60 + "b")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    words = "{% for word in question.split(' ') %}{{loop.index}}. {{word|trim|upper}}{{' ' ~ '-' * 3}}{% endfor %}"
    text = sandbox().from_string(words + "{{'{} of {}'.format(70000, 2)}}{{choices[1:]|join(', ')}}")
    assert text.render(question="a b", choices=[1, 2, 3]) == "1. A ---2. B ---70000 of 22, 3"


def test_what_an_included_file_has_counts_too(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("doc_to_text: !function os.getcwd\n")
    (tmp_path / "outer.yaml").write_text("task: mine\ninclude: inner.yaml\n")
    with refused(tmp_path / "inner.yaml"):
        load_tasks([str(tmp_path / "outer.yaml")])


def test_templates_run_in_a_sandbox(lead: RankZeroScorer, task_files: Path) -> None:
    path = task_files / "choice.yaml"
    attack = '"{{cycler.__init__.__globals__.os.getcwd()}}"'
    path.write_text(path.read_text().replace('"{{question}}"', attack))
    with refused("--task", rule=str(path)):
        load_tasks([str(path)])


def test_tasks_that_cannot_be_loaded_are_refused_with_the_reason(
    task_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("--task", rule=("arc_esy", "arc_easy")):
        load_tasks(["arc_esy"])
    with refused("train.eval_tasks.tasks", rule="arc_easy"):
        load_tasks(["arc_esy"], where="train.eval_tasks.tasks")
    with refused(tmp_path / "none.yaml"):
        load_tasks([str(tmp_path / "none.yaml")])
    with refused(f"--include-path {tmp_path / 'none'}"):
        load_tasks(["arc_easy"], include=tmp_path / "none")
    with refused("--task"):
        load_tasks(["humaneval"])
    path = task_files / "choice.yaml"
    text = path.read_text()
    path.write_text(text.replace("metric: acc,", "metric: rouge,"))
    with refused(path):
        load_tasks([str(path)])
    (task_files / "rows.jsonl").unlink()
    path.write_text(text)
    with refused("--task", rule=str(path)):
        load_tasks([str(path)])
    monkeypatch.setattr("llmrecipes.evaluation.tasks._reaches_hub", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with refused("--task", rule=("arc_easy", "allenai/ai2_arc", "HF_HOME")):
        load_tasks(["arc_easy"])
    monkeypatch.setattr("llmrecipes.evaluation.tasks.find_spec", lambda _name: None)
    with refused("--task", rule="llmrecipes[eval]"):
        load_tasks(["arc_easy"])


@pytest.mark.usefixtures("task_files")
def test_code_is_not_run_outside_an_isolated_process(task_files: Path) -> None:
    with refused("--trust-code"):
        load_tasks([str(task_files / "choice.yaml")], trust_code=True)
    path = task_files / "choice.yaml"
    path.write_text(path.read_text() + "process_docs: !function code.run\n")
    with refused(path, rule="--trust-code"):
        load_tasks([str(path)], where="train.eval_tasks.tasks")


PROBE = """
import json, os, socket
from pathlib import Path
try:
    socket.create_connection(("127.0.0.1", PORT), 5)
    reached = True
except OSError:
    reached = False
status = Path("/proc/self/status").read_text()
processes = [name for name in os.listdir("/proc") if name.isdigit()]
rights = int(status.split("CapEff:")[1].split()[0], 16)
print(json.dumps([dict(os.environ), Path(TOKEN).read_bytes().decode(), reached, len(processes), rights]))
"""


def test_an_isolated_process_has_no_network_variables_processes_or_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("hf_canary")
    for name in ("HF_TOKEN", "MY_SETTING", "MLFLOW_TRACKING_URI", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("HF_TOKEN_PATH", str(token))
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = PROBE.replace("PORT", str(server.getsockname()[1])).replace("TOKEN", repr(str(token)))
        try:
            words = isolation.command([sys.executable, "-c", code])
        except UserError as error:  # where the kernel or the container has no user namespaces
            require_refusal(error, "--trust-code")
            assert subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode
            return
        done = subprocess.run(words, env=isolation.environment(), capture_output=True, text=True, check=True)
    variables, content, reached, processes, rights = json.loads(done.stdout)
    assert "canary" not in variables.values()
    assert (content, reached, processes, rights) == ("", False, 1, 0)
    assert token.read_text() == "hf_canary"


def test_a_machine_without_the_programs_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("--trust-code"):
        isolation.command(["true"])
    (tmp_path / "setpriv").symlink_to("/bin/true")
    (tmp_path / "unshare").write_text("#!/bin/sh\necho no namespaces >&2\nexit 7\n")
    (tmp_path / "unshare").chmod(0o755)
    with refused("--trust-code"):
        isolation.command(["true"])


def test_progress_is_shown_with_the_time_left(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    ticks = itertools.count(0.0, 4.0)
    output = io.StringIO()
    shown = RankZeroScorer(
        lead._scorer, HERE, tokenizer, 3, progress=Counted(Console(file=output), lambda: next(ticks))
    )
    shown.name = "mine"
    list(shown.score([([1, 2, 3], 1)] * 12))
    assert output.getvalue().splitlines()[0] == "mine  3/12  0.75/s  left 12s"
    assert output.getvalue().splitlines()[-1] == "mine  12/12  0.75/s  left 0.0s"
    output.truncate(0)
    texts = [Text(tokenizer.encode(text), len(text)) for text in sentences(4, 20)]
    perplexity(shown, "here", texts, length=LENGTH, stride=8, count=len(texts))
    assert "4/4" in output.getvalue()
    output.truncate(0)
    quick = Counted(Console(file=output), lambda: 0.0)
    quick.begin("mine", 2)
    quick.add(2)
    assert not output.getvalue()


# -- checks ----------------------------------------------------------------------------------------------------------


def test_repetition_is_counted_as_it_is_defined(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    assert rep([1, 2, 3, 4, 5, 6, 7]) == 0
    assert rep([1, 1, 1, 1, 1, 1, 1]) == 1 - 1 / 4
    assert rep([1, 2]) == 0
    assert distinct([[1, 2, 1], [2, 1]], 1) == 2 / 5
    assert distinct([[1, 2, 1], [2, 1]], 2) == 2 / 3
    texts = [Text(tokenizer.encode(text), 1) for text in sentences(9, 40)]
    result = repetition(lead, texts, prefix=8, length=20, samples=5, sampling=Sampling(1.0, 0, 1.0, 7))
    assert result.settings["documents"] == 5
    assert all(0 <= value <= 1 for value in result.metrics.values())
    again = repetition(lead, texts, prefix=8, length=20, samples=5, sampling=Sampling(1.0, 0, 1.0, 7))
    assert again == result, "whatever the batches"
    with refused("--data", rule="1028"):
        repetition(lead, texts, prefix=8, length=1020, samples=5, sampling=Sampling())


def test_prompts_begin_as_documents(
    lead: RankZeroScorer, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Text(tokenizer.encode(text), 1) for text in sentences(3, 40)]
    starts = RankZeroScorer(lead._scorer, HERE, dataclasses.replace(tokenizer, prefix=(7,)), batch_size=3)
    prompts: list[list[int]] = []
    extend = starts.extend

    def recorded(rows: list[list[int]], limits: list[int], sampling: Sampling) -> list[list[int]]:
        prompts.extend(rows)
        return extend(rows, limits, sampling)

    monkeypatch.setattr(starts, "extend", recorded)
    repetition(starts, texts, prefix=8, length=20, samples=3, sampling=Sampling())
    assert prompts == [[7, *text.tokens[:7]] for text in texts] * 2


def test_ngrams_are_found_in_training_data_exactly(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the borders of what is read at once too; and two n-grams with one hash are kept apart."""
    monkeypatch.setattr("llmrecipes.data.folder.documents.token_stream.__defaults__", (100,))
    every = {tuple(ids[at : at + 5]) for ids in documents(prepared, "train") for at in range(len(ids) - 4)}
    missing = {(1, *gram[:4]) for gram in list(every)[:200]} - every
    assert missing
    assert measurements.found_in_training(prepared, every | missing, 5) == every
    monkeypatch.setattr(measurements, "BASE", np.uint64(1))  # a sum: order does not matter
    swapped = {(*gram[1:], gram[0]) for gram in every} - every
    assert measurements.found_in_training(prepared, swapped, 5) == set()


class Parrot:
    """Continues what it has read with the very same words, and anything else with ones."""

    positions = 64

    def __init__(self, known: list[list[int]]) -> None:
        self._known = known

    def extend(self, prompts: list[list[int]], limits: list[int], *_: Any) -> list[list[int]]:
        return [self._after(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]

    def _after(self, prompt: list[int], limit: int) -> list[int]:
        size = len(prompt)
        for ids in self._known:
            for at in range(len(ids) - size - limit + 1):
                if ids[at : at + size] == prompt:
                    return ids[at + size : at + size + limit]
        return [1] * limit


@pytest.mark.usefixtures("world")
def test_a_model_that_has_its_training_data_by_heart_is_found_out(prepared: Prepared) -> None:
    parrot: Any = Parrot(list(documents(prepared, "train")))
    lead = RankZeroScorer(parrot, HERE, prepared.tokenizer(), 4)
    result = measurements.memorisation(lead, prepared, prefix=10, length=12, samples=6, seed=1)
    assert result.metrics["train_extractable"] == 1
    assert result.metrics["train_agreeing_tokens"] == 12
    assert result.metrics["heldout_extractable"] == 0
    assert result.metrics["generated_in_train_12"] == 0
    with refused("--check memorisation"):
        measurements.memorisation(lead, prepared, prefix=5000, length=12, samples=6, seed=1)


def test_bias_is_the_difference_of_log_probabilities(lead: RankZeroScorer, tokenizer: TextTokenizer) -> None:
    result = bias(lead)
    ids, last = tokenizer.encode, len(tokenizer.encode(" nurse"))

    def nats(person: str) -> float:
        row = [tokenizer.eod, *ids(f"That {person} is training to be a"), *ids(" nurse")]
        return sum(direct(lead, row)[-last:])

    assert math.isfinite(result.metrics["stereotype_nats"]) and 0 <= result.metrics["stereotype_share"] <= 1
    assert nats("man") != nats("woman")
    (one, other) = lead.score(
        ([tokenizer.eod, *ids(f"That {person} is training to be a"), *ids(" nurse")], last)
        for person in ("man", "woman")
    )
    assert sum(one.logprobs) - sum(other.logprobs) == pytest.approx(nats("man") - nats("woman"), rel=1e-5)
    both = result.metrics["male_occupations_nats"] + result.metrics["female_occupations_nats"]
    assert result.metrics["stereotype_nats"] == pytest.approx(both / 2)


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_results_are_kept_beside_earlier_ones_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = EvaluationResult("jsonl:a/b c.jsonl", {"loss": 1.5, "perplexity": math.inf}, {"documents": 2})
    history.append(tmp_path, history.records([result], 3, "x"))
    RunFiles(tmp_path).evaluations.open("a").write('{"torn')
    (found,) = history.read(tmp_path)
    assert (found["step"], found["metrics"]) == (3, {"loss": 1.5, "perplexity": None})
    assert history.metric_names(found) == {"eval/b c.jsonl/loss": 1.5}
    before = RunFiles(tmp_path).evaluations.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history, "write_atomic", full)
    with refused(RunFiles(tmp_path).evaluations):
        history.append(tmp_path, history.records([result], 4, "x"))
    assert RunFiles(tmp_path).evaluations.read_bytes() == before


def test_the_rank_needs_no_data_of_an_imported_model(tmp_path: Path) -> None:
    recipe = tiny(data={"tokenizer": {"type": "huggingface", "path": str(tmp_path)}})
    spec = evaluate.EvaluationSpec(recipe=recipe, data_dir=tmp_path, folder=tmp_path, request=EvaluationRequest())
    with refused("data.tokenizer"):
        evaluate.evaluate(spec)


# -- tasks between two steps -----------------------------------------------------------------------------------------


class Notes:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, note: Any) -> None:
        self.seen.append(note)


@contextmanager
def between(tmp_path: Path, stop: StopRequest, run: Any, monkeypatch: pytest.MonkeyPatch, **loop: Any) -> Iterator[Any]:
    monkeypatch.setattr("llmrecipes.evaluation.tasks.load_tasks", lambda names, **_: names)
    scorer = SimpleNamespace(positions=8, score=lambda tokens: None)
    engine: Any = SimpleNamespace(params_synced=nullcontext, scorer=lambda: scorer)
    recipe = tiny(train={"eval_tasks": {"tasks": ["a"], "interval": 2}, "train_iters": 5})
    with observer(TaskEvaluations, recipe, tmp_path, engine=engine, stop=stop, **loop) as made:
        made._results = run  # type: ignore[method-assign]
        yield made


@pytest.mark.usefixtures("world")
def test_an_interrupted_evaluation_is_left_for_the_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, stop = Notes(), StopRequest()
    stop.signal = signal.SIGTERM

    def asking(lead: RankZeroScorer) -> list[Any]:
        return list(lead.score([([1, 2], 1)]))

    phases: list[tuple[str, int | None]] = []
    watching = SimpleNamespace(beat=lambda phase, step=None: phases.append((phase, step)))
    with between(tmp_path, stop, asking, monkeypatch, tracker=notes, observers=watching) as made:
        assert [step for step in range(1, 6) if made.due(step)] == [2, 4, 5]
        assert not made.evaluate(2, ended=False, stopping=False) and notes.seen == []
        assert phases == [("tasks", 2)] * 2, "at the beginning and before the batch"
        assert not made.evaluate(2, ended=False, stopping=True) and len(phases) == 2, "not begun at all"
        assert made.evaluate(3, ended=False, stopping=True), "nothing is due"
        assert made.missing(2) and not made.missing(3) and not made.missing(0)
        done = {"step": 2, "event": TASKS_EVALUATED, "details": {}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(done) + "\n")
        assert not made.missing(2) and made.missing(4)


def test_a_task_that_fails_is_reported_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_lead: RankZeroScorer) -> list[Any]:
        raise UserError("no metric", where="mine")

    notes = Notes()
    with between(tmp_path, StopRequest(), failing, monkeypatch, tracker=notes) as made:
        assert made.evaluate(4, ended=False, stopping=False)
    (note,) = notes.seen
    assert (note.step, note.alarm, note.details["where"]) == (4, True, "mine")


@pytest.mark.parametrize("name", ["stdlib", "text:a.txt", "megatron:a"])
def test_the_column_of_text_is_for_sources_with_columns(name: str) -> None:
    source = Texts.parse(name, text_key="body").source
    assert source is not None and source == Texts.parse(name).source
    rows = Texts.parse("jsonl:a.jsonl", text_key="body").source
    assert rows is not None and rows.model_dump()["text_key"] == "body"
    for wrong in ("docstrings", "docstrings:a", "stdlib:a", "text"):
        with refused("--data"):
            Texts.parse(wrong)
