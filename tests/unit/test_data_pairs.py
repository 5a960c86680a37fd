"""Pairs of answers: what a row has to be, their ids as TRL makes them, and samples that keep a pair together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import tokenizers

from llmrecipes.data.prepare import prepare
from llmrecipes.data.read.dataset import build
from llmrecipes.data.sources.sources import documents
from llmrecipes.data.tokens import tokenizer
from llmrecipes.data.tokens.chat import ChatSpec, Conversations, Template
from llmrecipes.data.tokens.pairs import ANSWER, SECOND, pair_encoder
from llmrecipes.data.tokens.templates import CHATML, SPECIAL
from llmrecipes.recipe.schema import Chat, Recipe
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.helpers import tiny
from tests.refusals import refused

CHAT = Chat(preference={})  # type: ignore[arg-type]
TEXTS = {"prompt": "Is it?", "chosen": " Yes.", "rejected": " No, never."}


def said(content: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


TALKS = {"prompt": said("Is it?", "user"), "chosen": said("Yes."), "rejected": said("No, never.")}


def rows(file: Path, *values: Any) -> AnySource:
    file.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return make_source(type="jsonl", path=str(file))


# -- rows ------------------------------------------------------------------------------------------------------------


def test_texts_and_messages_are_read_from_lines_and_tables(tmp_path: Path) -> None:
    found = list(documents(rows(tmp_path / "a.jsonl", TEXTS, TALKS, {**TEXTS, "chosen": None}), CHAT))
    parts = [[message["part"] for message in json.loads(text)] for text in found[:2] if text]
    assert parts == [["prompt", "chosen", "rejected"]] * 2 and found[2] == ""
    pq.write_table(pa.table({name: [value] for name, value in TALKS.items()}), tmp_path / "a.parquet")
    assert list(documents(make_source(type="parquet", path=str(tmp_path / "a.parquet")), CHAT)) == found[1:2]
    named = Chat(prompt_key="q", preference={"chosen_key": "a", "rejected_key": "b"})  # type: ignore[arg-type]
    other = rows(tmp_path / "b.jsonl", {"q": TEXTS["prompt"], "a": TEXTS["chosen"], "b": TEXTS["rejected"]})
    assert list(documents(other, named)) == found[:1]


@pytest.mark.parametrize(
    "row",
    [
        {**TALKS, "prompt": "Is it?"},
        # UltraFeedback's, and as TRL has it without the prompt; with a prompt of messages in front of both
        {name: [*TALKS["prompt"], *TALKS[name]] for name in ("chosen", "rejected")} | {"prompt": "Is it?"},
        {name: [*TALKS["prompt"], *TALKS[name]] for name in ("chosen", "rejected")} | {"score_chosen": 8.0},
        {name: [*TALKS["prompt"], *TALKS[name]] for name in ("chosen", "rejected")} | {"prompt": TALKS["prompt"]},
        # hh-rlhf
        {name: f"\n\nHuman: Is it?\n\nAssistant: {TALKS[name][0]['content']}" for name in ("chosen", "rejected")},
    ],
)
def test_pairs_of_published_sets_are_read(row: dict[str, Any], tmp_path: Path) -> None:
    found = list(documents(rows(tmp_path / "a.jsonl", TALKS, row), CHAT))
    assert found[1] == found[0]


def test_published_answers_of_one_message_and_a_system_message_are_read(tmp_path: Path) -> None:
    """LLaMA-Factory's pairs, and a column of system messages, which texts do not have."""
    one = {key: value[0] if key != "prompt" else value for key, value in TALKS.items()}
    system = {**TALKS, "prompt": [*said("Be kind.", "system"), *TALKS["prompt"]]}
    source = rows(tmp_path / "a.jsonl", TALKS, one, system, {**TALKS, "system": "Be kind."})
    found = list(documents(source, CHAT))
    assert found[0] == found[1] != found[2] == found[3]
    with refused(f"{tmp_path / 'b.jsonl'}:1"):
        list(documents(rows(tmp_path / "b.jsonl", {**TEXTS, "system": "Be kind."}), CHAT))


ANSWERS = ("Yes.", "No, never.")
SHP = {"history": "Is it?", "human_ref_A": ANSWERS[0], "human_ref_B": ANSWERS[1], "labels": 1, "score_A": 3}
SAFE = {"prompt": "Is it?", "response_0": ANSWERS[1], "response_1": ANSWERS[0], "better_response_id": 1}
STEER = {"prompt": "Is it?", "response_1": ANSWERS[0], "response_2": ANSWERS[1], "preference_strength": -2}
ARENA = {
    "conversation_a": [*TALKS["prompt"], *TALKS["rejected"]],
    "conversation_b": [*TALKS["prompt"], *TALKS["chosen"]],
    "winner": "model_b",
}


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (SHP, {"human_ref_A": ANSWERS[1], "human_ref_B": ANSWERS[0], "labels": 0}),
        (SAFE, {"response_0": ANSWERS[0], "response_1": ANSWERS[1], "better_response_id": 0}),
        (STEER, {"response_1": ANSWERS[1], "response_2": ANSWERS[0], "preference_strength": 1}),
        (
            ARENA,
            {"conversation_a": ARENA["conversation_b"], "conversation_b": ARENA["conversation_a"], "winner": "model_a"},
        ),
    ],
    ids=["SHP", "PKU-SafeRLHF", "HelpSteer2", "Chatbot Arena"],
)
def test_judgements_of_published_sets_say_which_answer_is_better(
    row: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    judgement = next(key for key in ("labels", "better_response_id", "preference_strength", "winner") if key in row)
    neither = {"preference_strength": 0, "winner": "tie"}.get(judgement)
    tie = [] if neither is None else [{**row, judgement: neither}]
    lines = [row, {**row, **other}, *tie]
    found = list(documents(rows(tmp_path / "a.jsonl", *lines), CHAT))
    right = list(documents(rows(tmp_path / "b.jsonl", TALKS), CHAT))
    assert found == [*right, *right, *("" for _ in tie)]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet")
    assert list(documents(make_source(type="parquet", path=str(tmp_path / "a.parquet")), CHAT)) == found
    wrong = rows(tmp_path / "c.jsonl", row, {**row, judgement: 7})
    with refused(f"{tmp_path / 'c.jsonl'}:2", rule=(repr(judgement), "7")):
        list(documents(wrong, CHAT))


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({**SAFE, "safer_response_id": 0}, ("better_response_id", "safer_response_id")),
        ({"instruction": "a", "completions": [{"response": "b", "overall_score": 7}]}, ("UltraFeedback",)),
        ({"prompt": "a", "response": "b", "helpfulness": 3}, ("HelpSteer2",)),
        ({"prompt": "a", "completion": "b", "label": True}, ("KTO",)),
        ({**STEER, "prompt": "a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc"}, ("<extra_id_1>",)),
    ],
)
def test_scores_that_do_not_make_pairs_are_refused(row: dict[str, Any], rule: tuple[str, ...], tmp_path: Path) -> None:
    with refused(f"{tmp_path / 'a.jsonl'}:1", rule=rule):
        list(documents(rows(tmp_path / "a.jsonl", row), CHAT))


def test_whole_conversations_are_divided_as_trl_does(tmp_path: Path) -> None:
    system, more = said("Be kind.", "system"), said("Sure?", "user")
    begin = [*system, *TALKS["prompt"], *said("Perhaps."), *more]
    # TRL 1.16's extract_prompt: the messages that both have are the prompt.
    source = rows(tmp_path / "a.jsonl", {name: [*begin, *TALKS[name]] for name in ("chosen", "rejected")})
    parts = [(message["part"], message["content"]) for message in json.loads(next(documents(source, CHAT)) or "")]
    asked = [("prompt", message["content"]) for message in begin]
    assert parts == [*asked, ("chosen", "Yes."), ("rejected", "No, never.")]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"chosen": TALKS["chosen"], "rejected": TALKS["rejected"]}, "'prompt'"),
        ({"prompt": "a", "chosen": "b"}, "'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "'prompt'"),
        ({**TEXTS, "rejected": TEXTS["chosen"]}, "'rejected'"),
        ({**TALKS, "rejected": TALKS["chosen"]}, "'rejected'"),
        ({**TEXTS, "chosen": said("b")}, "'chosen'"),
        ({**TEXTS, "prompt": 1, "chosen": 2, "rejected": 3}, "'prompt'"),
        ({**TALKS, "chosen": [{"role": "assistant"}]}, "'content'"),
    ],
)
def test_what_is_not_a_pair_is_refused_with_its_line(row: dict[str, Any], rule: str, tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS, row)
    with refused(f"{tmp_path / 'a.jsonl'}:2", rule=rule):
        list(documents(source, CHAT))


# -- ids -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words() -> tuple[tokenizers.Tokenizer, int]:
    return tokenizer.train(["Is it? Yes. No, never. Or: is that so?"] * 9, 300, SPECIAL)


def encoded(
    words: tuple[tokenizers.Tokenizer, int], values: Sequence[Any], length: int = 60, *, truncate: bool = True
) -> Conversations:
    backend, eod = words
    source = [json.dumps([{**message, "part": part} for part, messages in row.items() for message in messages])
              for row in values]  # fmt: skip
    plain = CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    spec = ChatSpec(Template(plain, "test"), length, truncate, pairs=True)
    return pair_encoder(backend.to_str(), "uint16", eod, spec)([text.encode() for text in source])


def test_an_answer_begins_where_the_prompt_ends(words: tuple[tokenizers.Tokenizer, int]) -> None:
    backend, eod = words
    text = {name: said(value, "") for name, value in TEXTS.items()}
    made = encoded(words, [TALKS, text])
    ids, marks = np.frombuffer(made.ids, np.uint16), np.frombuffer(made.answers, np.uint8)
    assert sum(made.lengths) == len(ids) == len(marks)
    answers = []
    for start, end in pairwise([0, made.lengths[0], sum(made.lengths)]):
        second = start + int(np.flatnonzero(marks[start:end] == SECOND)[0])
        for first, last in ((start, second), (second, end)):
            answers.append(backend.decode(ids[first:last][marks[first:last] == ANSWER].tolist(), False))
    assert answers[:2] == ["Yes.<|im_end|>\n", "No, never.<|im_end|>\n"]
    assert answers[2:] == [" Yes.<|im_end|>", " No, never.<|im_end|>"] and ids[-1] == eod


def test_long_pairs_are_cut_dropped_or_refused(words: tuple[tokenizers.Tokenizer, int]) -> None:
    long = {**TALKS, "rejected": said("No, never. " * 20)}
    cut = encoded(words, [long])
    assert cut.tally["cut"] == 1 and cut.lengths[0] < 2 * 60 + 1
    assert encoded(words, [long], truncate=False).tally == {"too_long": 1}
    alike = {**TALKS, "chosen": said("No, never. " * 20), "rejected": said("No, never. " * 21)}
    assert encoded(words, [alike]).tally == {"unanswered": 1}, "what is left of both answers is equal"
    asked = {**TALKS, "prompt": said("Is it? " * 40, "user")}
    with refused("data.chat.max_length"):
        encoded(words, [asked])
    assert encoded(words, [asked], truncate=False).tally == {"too_long": 1}
    assert encoded(words, [{**TALKS, "chosen": said("<|im_end|>")}]).tally == {"special_tokens": 1}


def test_calls_of_tools_are_rendered_or_their_pair_is_rejected(
    words: tuple[tokenizers.Tokenizer, int], tmp_path: Path
) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [{"name": "Yes", "arguments": "{}"}]}
    source = rows(tmp_path / "a.jsonl", {**TALKS, "chosen": [calling], "tools": [{"name": "Yes"}]})
    text = next(documents(source, CHAT)) or ""
    reading = "{{ tools | length }}{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }};{% endfor %}"
    for template, tally in (("{% for m in messages %}{{ m.content }}{% endfor %}", {"rejected": 1}), (reading, {})):
        spec = ChatSpec(Template(template, "test"), 100, truncate=True, pairs=True)
        made = pair_encoder(words[0].to_str(), "uint16", words[1], spec)([text.encode()])
        assert made.tally == tally
    assert "'Yes'" in words[0].decode(np.frombuffer(made.ids, np.uint16).tolist())


# -- samples ---------------------------------------------------------------------------------------------------------


def prepared_samples(folder: Path, *, packing: bool) -> tuple[Recipe, Any]:
    pairs = [{"prompt": f"number {n}?", "chosen": f" yes {n}", "rejected": f" no {n} {n}"} for n in range(60)]
    source = rows(folder / "pairs.jsonl", *pairs)
    recipe = tiny(
        dpo={},
        model={"seq_length": 96, "vocab_size": 300},
        train={"global_batch_size": 4, "train_iters": 9, "eval_iters": 1},
        data={
            "sources": [source.model_dump()], "chat": {"packing": packing, "preference": {}},
            "split": [80.0, 20.0, 0.0], "tokenizer": {"type": "bpe"},
        },
    layout={"micro_batch_size": 2})  # fmt: skip
    return recipe, prepare(recipe, folder / "data")


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_both_answers_of_a_pair_are_in_one_micro_batch(packing: bool, tmp_path: Path) -> None:
    recipe, prepared = prepared_samples(tmp_path, packing=packing)
    samples, decode = build(recipe, prepared, "train"), prepared.tokenizer().decode
    assert samples is not None and len(samples) >= 36
    size, seen = recipe.layout.micro_batch_size, set()
    for batch in range(18):
        answers: list[str] = []
        for number in range(batch * size, batch * size + size):
            sample = samples[number]
            begins = [*np.flatnonzero(sample["position_ids"].numpy() == 0).tolist(), recipe.model.seq_length]
            for first, last in pairwise(begins):
                counted = sample["loss_mask"][first:last].bool()
                if counted.any():
                    text = decode(sample["tokens"][first:last].tolist())
                    number_asked = text.split("?")[0].split()[-1]
                    answers += [decode(sample["labels"][first:last][counted].tolist()).split("<|")[0], number_asked]
        assert len(answers) % 4 == 0
        for better, asked, worse, other in zip(*(answers[n::4] for n in range(4)), strict=True):
            assert (better, worse) == (f" yes {asked}", f" no {other} {other}") and asked == other
            seen.add(asked)
    assert len(seen) > 15
