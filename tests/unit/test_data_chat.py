"""Conversations: rows, templates, which tokens are answers, what is dropped and cut, and the sequences they end in."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import tokenizers
import torch
import transformers

from llmrecipes.data.folder.prepared import fingerprint
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.read.dataset import best_fit, build
from llmrecipes.data.sources import sources
from llmrecipes.data.sources.rows import REASONING, SAYS_MORE, TOOL_CALLS, conversation
from llmrecipes.data.steps.copies import Duplicates
from llmrecipes.data.steps.steps import Document, pipeline, step_spec
from llmrecipes.data.tokens import chat, tokenizer
from llmrecipes.data.tokens.chat import ChatSpec, Conversations, Template, chat_encoder
from llmrecipes.data.tokens.templates import CHATML, SPECIAL, TEMPLATES, ends_answers, question
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Chat, Recipe
from llmrecipes.recipe.sections.data_steps import DuplicatesStep
from llmrecipes.recipe.sections.source import AnySource, make_source
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer
from tests.helpers import tiny
from tests.refusals import refused

LENGTH = 160
PREFIX = CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
"""ChatML that does not mark answers."""
Messages = list[dict[str, Any]]


def talk(*contents: str, system: str = "") -> Messages:
    """Contents of the user and the assistant in turn."""
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def jsonl(file: Path, *rows: Any) -> AnySource:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return make_source(type="jsonl", path=str(file))


def made(file: Path, chat: Chat | None = None) -> list[Messages | None]:
    found = sources.documents(make_source(type="jsonl", path=str(file)), chat or Chat())
    return [None if text is None else json.loads(text or "null") for text in found]


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_hold_messages_or_a_prompt_and_its_completion(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    jsonl(file, {"messages": talk("a", "b", system="s"), "id": 1}, {"prompt": "p", "completion": "c"}, {"messages": []})
    assert made(file) == [talk("a", "b", system="s"), talk("p", "c"), None]
    jsonl(file, {"talk": talk("a", "b")}, {"question": "p", "answer": "c", "messages": "else"})
    named = Chat(messages_key="talk", prompt_key="question", completion_key="answer")
    assert made(file, named) == [talk("a", "b"), talk("p", "c")]
    table = pa.table({"messages": [talk("ä", "b"), None], "more": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = list(sources.documents(make_source(type="parquet", path=str(tmp_path / "a.parquet")), Chat()))
    assert [json.loads(text or "null") for text in found if text is not None] == [talk("ä", "b"), None]


def test_rows_of_sharegpt_and_alpaca_are_read(tmp_path: Path) -> None:
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    asked: dict[str, Any] = {"instruction": "add", "output": "3"}
    jsonl(
        tmp_path / "a.jsonl",
        {"messages": shared},
        *(asked | {"input": text} for text in ("1, 2", "", None)),
        asked | {"output": None},
    )
    found = made(tmp_path / "a.jsonl")
    assert found == [talk("a", "b", system="s"), talk("add\n1, 2", "3"), talk("add", "3"), talk("add", "3"), None]
    assert made(tmp_path / "a.jsonl", Chat(prompt_key="instruction", completion_key="output")) == found


def test_published_columns_beside_a_conversation_are_read(tmp_path: Path) -> None:
    """LLaMA-Factory's system, history and tools; OpenOrca's system_prompt."""
    file, tools = tmp_path / "a.jsonl", json.dumps(TOOLS)
    alpaca = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    rows: list[dict[str, Any]] = [
        alpaca | {"tools": tools},
        {"messages": talk("a", "b"), "system": "s", "tools": tools},
        {"messages": talk("a", "b", system="s"), "system": "s"},
        {"prompt": "a", "completion": "b", "system_prompt": "s"},
        {"prompt": "a", "completion": "b", "system_prompt": "", "system": None},
    ]
    source = jsonl(file, *rows)
    found = [json.loads(text or "") for text in sources.documents(source, Chat())]
    assert [messages[0].pop("tools", None) for messages in found] == [TOOLS, TOOLS, None, None, None]
    once = talk("a", "b", system="s")
    assert found == [talk("a", "b", "c", "d", system="s"), once, once, once, talk("a", "b")]
    pq.write_table(pa.Table.from_pylist([alpaca, {"instruction": "a", "output": "b"}]), tmp_path / "a.parquet")
    table = sources.documents(make_source(type="parquet", path=str(tmp_path / "a.parquet")), Chat())
    assert [json.loads(text or "") for text in table] == [talk("a", "b", "c", "d", system="s"), talk("a", "b")]


def test_published_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    dolly = {"instruction": "a", "context": "b", "response": "c", "category": "d"}
    source, lines = jsonl(tmp_path / "a.jsonl", *[dolly | {"instruction": f"a {n}"} for n in range(300)]), list[str]()
    prepare(
        recipe(source, prompt_key="instruction", completion_key="response"),
        tmp_path / "data", workers=1, progress=lines.append,
    )  # fmt: skip
    assert [line for line in lines if "context, category" in line]
    assert sources.unread(jsonl(tmp_path / "b.jsonl", {"messages": talk("a", "b")}), Chat()) == []
    assert sources.unread(jsonl(tmp_path / "b.jsonl", "["), Chat()) == []


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ('{"text": "no"}', "'messages'"),
        ('{"instruction": "a", "output": "b", "history": [["c"]]}', "'history'"),
        ('{"instruction": "a", "output": "b", "system": 1}', "'system'"),
        ('{"messages": [{"role": "system", "content": "a"}], "system": "b"}', ()),
        ('{"messages": [{"role": "assistant", "content": "a", "channel": "analysis"}]}', "'analysis'"),
        ('{"instruction": "a", "input": "b"}', "'output'"),
        ('{"instruction": "a", "input": ["b"], "output": "c"}', "'input'"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "'weight'"),
        ('{"messages": [{"role": "assistant", "content": "a", "train": false}]}', "'train'"),
        ('{"messages": [{"from": "function_call", "value": "a"}]}', "'function_call'"),
        ('{"messages": "hello"}', "'messages'"),
        ('{"messages": {"role": "user"}}', "'messages'"),
        ('{"messages": ["hello"]}', "'messages'"),
        ('{"messages": [{"speaker": "human", "text": "a"}]}', "'role'"),
        ('{"messages": [{"role": "user"}]}', "'content'"),
        *(
            (f'{{"messages": [{{"role": "assistant", "content": {content}, "{key}": [{{"name": "a"}}]}}]}}', f"'{key}'")
            for key in SAYS_MORE
            for content in ('""', "null")
        ),
        ('{"messages": [{"role": "asistant", "content": "a"}]}', "'asistant'"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "'content'"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "'content'"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "'role'"),
        ('{"prompt": ["a"], "completion": "b"}', "'prompt'"),
        ('{"prompt": "a"}', "'completion'"),
        ('{"messages": [', ()),
        ("[1]", ()),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_line(
    tmp_path: Path, row: str, rule: str | tuple[str, ...]
) -> None:
    file = tmp_path / "a.jsonl"
    source = jsonl(file, {"messages": talk("a", "b")}, row)
    with refused(f"{file}:2", rule=rule):
        list(sources.documents(source, Chat()))


def test_rows_that_are_not_utf8_are_refused_or_counted_as_those_of_text_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    surrogate = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
    source = jsonl(file, surrogate, '{"prompt": null, "completion": "b"}')
    assert list(sources.documents(source, Chat())) == [None, ""]
    file.write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}\n')
    with refused(f"{file}:1"):
        list(sources.documents(source, Chat()))


@pytest.mark.slow
@pytest.mark.rotating
def test_the_embedded_set_is_the_same_every_time_and_has_conversations_of_several_turns() -> None:
    source = make_source(type="docstrings")
    found = list(sources.documents(source, Chat()))
    assert found == list(sources.documents(source, Chat()))
    turns = Counter(len(json.loads(text or "")) for text in found)
    assert turns[2] > 2000
    assert turns[4] + turns[6] + turns[8] > 200


# -- templates and answers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    texts = [message["content"] for text in _some(400) for message in json.loads(text)]
    return tokenizer.train(texts, 600, SPECIAL)[0]


def _some(count: int) -> list[str]:
    return [text for text in islice(sources.documents(make_source(type="docstrings"), Chat()), count) if text]


def encoded(
    backend: tokenizers.Tokenizer, talks: Sequence[Messages], template: str = CHATML, longest: int = 10_000,
    *, truncate: bool = True,
) -> Conversations:  # fmt: skip
    spec = ChatSpec(Template(template, "test", (("eos_token", SPECIAL[1]),)), longest, truncate)
    documents = [(conversation(talk) or "").encode() for talk in talks]
    return chat_encoder(backend.to_str(), "uint16", spec)(documents)


def rows_of(found: Conversations) -> list[tuple[list[int], list[int]]]:
    ends = np.cumsum(found.lengths)[:-1]
    ids = np.split(np.frombuffer(found.ids, np.uint16), ends)
    answers = np.split(np.frombuffer(found.answers, np.uint8), ends)
    return [(one.tolist(), other.tolist()) for one, other in zip(ids, answers, strict=True)]


TALKS = [
    talk("What is it?", " a list\nof things "),
    talk("One", "Zwölf 🥊", "and?", "more", system="be short"),
    talk("only", "  x", "unanswered at the end"),
]


def test_ids_and_answers_are_those_of_transformers(backend: tokenizers.Tokenizer) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, eos_token=SPECIAL[1])
    for (ids, answers), messages in zip(rows_of(encoded(backend, TALKS)), TALKS, strict=True):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert answers == expected["assistant_masks"]


def test_without_marks_an_answer_is_what_follows_the_prompt_for_it(backend: tokenizers.Tokenizer) -> None:
    marked, found = (rows_of(encoded(backend, TALKS, template)) for template in (CHATML, PREFIX))
    assert [ids for ids, _ in found] == [ids for ids, _ in marked]
    for (ids, answers), (_, exact) in zip(found, marked, strict=True):
        # The line's end behind an answer is the template's, and it cannot be told apart.
        more = [number for number, (one, other) in enumerate(zip(answers, exact, strict=True)) if one != other]
        assert {backend.decode([ids[number]]) for number in more} == {"\n"}
        assert sum(answers) == sum(exact) + len(more)


@pytest.mark.parametrize(
    "begin",
    [
        "",
        # Qwen2.5, Llama 3.1 and Qwen3.5 look at the first message, or for a question.
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}",
        "{% if messages[0]['role'] == 'system' %}{{ 'Cutting Knowledge Date' }}{% endif %}",
        "{% if not (messages | selectattr('role', 'equalto', 'user') | list) %}{{ raise_exception('no query') }}"
        "{% endif %}",
    ],
)
def test_the_assistant_may_begin(backend: tokenizers.Tokenizer, begin: str) -> None:
    said, asked, system = ({"role": role, "content": role} for role in ("assistant", "user", "system"))
    shapes = [[said, asked, said], [said, said, asked], [system, said, asked, said], [said, asked, said, asked]]
    alone = [] if "raise_exception" in begin else [[said], [system, said]]
    for messages in (*shapes, *alone):
        marked, unmarked = (Template(begin + source, "test").spans(messages, 10_000) for source in (CHATML, PREFIX))
        assert unmarked == (marked[0], [(start, end + 1) for start, end in marked[1]])  # and the end of the line
    found = encoded(backend, [[said, asked, said]], begin + PREFIX)
    assert (found.tally, found.refusal) == ({}, "")


def test_a_template_that_rewrites_earlier_messages_is_refused(backend: tokenizers.Tokenizer) -> None:
    rewriting = "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}{% endfor %}"
    with refused("data.chat.chat_template", rule="{% generation %}"):
        encoded(backend, [talk("a", "b", "c", "d")], rewriting)


def test_conversations_without_an_answer_or_with_a_special_token_are_dropped_and_counted(
    backend: tokenizers.Tokenizer,
) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with\nuser') }}{% endif %}" + CHATML
    talks = [
        talk("a", "b"), talk("a"), talk("a", " \n"), talk("a <|im_end|>", "b"), talk("a", f"b{SPECIAL[0]}"),
        talk("a", "b", system="s"), talk("c", "d"),
    ]  # fmt: skip
    found = encoded(backend, talks, strict)
    assert [length > 0 for length in found.lengths] == [True, False, False, False, False, False, True]
    assert found.tally == {"unanswered": 2, "special_tokens": 2, "rejected": 1}
    assert found.refusal == "begin with"
    assert len(found.answers) == sum(found.lengths)


def test_long_conversations_are_cut_or_dropped(backend: tokenizers.Tokenizer) -> None:
    talks = [talk("a", "b"), talk("a", "word " * 500), talk("word " * 500, "never reached")]
    whole = rows_of(encoded(backend, talks))
    cut = encoded(backend, talks, longest=40)
    assert cut.tally == {"cut": 1, "cut_tokens": len(whole[1][0]) - 40, "unanswered": 1}
    assert rows_of(cut)[1] == (whole[1][0][:40], whole[1][1][:40])
    dropped = encoded(backend, talks, longest=40, truncate=False)
    assert dropped.tally == {"too_long": 2}
    assert rows_of(dropped)[0] == whole[0]
    exact = encoded(backend, talks, longest=len(whole[1][0]), truncate=False)
    assert exact.lengths[:2] == [len(ids) for ids, _ in whole[:2]]


def test_a_huge_message_is_cut_before_it_is_tokenized(backend: tokenizers.Tokenizer) -> None:
    huge = talk("a", "word " * 2_000_000)
    assert encoded(backend, [huge], longest=40).lengths == [40]


def test_templates_run_in_a_sandbox(backend: tokenizers.Tokenizer) -> None:
    escaping = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    found = encoded(backend, [talk("a", "b")], escaping)
    assert found.tally == {"rejected": 1}
    assert "unsafe" in found.refusal


# -- tools -----------------------------------------------------------------------------------------------------------

WITH_TOOLS = """{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + ' ' + (m.name or '') + (m.tool_call_id or '') + '\n' }}
{%- if m.role == 'assistant' -%}
{%- generation -%}
{{ m.reasoning_content or '' }}{{ m.reasoning or '' }}{{ m.thinking or '' }}{{ m.content }}
{%- for call in m.tool_calls or [] -%}{{ '<tool_call>' + (call.function or call) | tojson }}{%- endfor -%}
{{ '<|im_end|>' }}
{%- endgeneration -%}
{%- else -%}
{{ m.content + '<|im_end|>' }}
{%- endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant \n' }}{%- endif -%}"""
"""A template that renders all that rows may have."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def calling(arguments: Any, content: str | None = "") -> list[dict[str, Any]]:
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "warm?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "18 °C", "name": "weather", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is.", "reasoning_content": "18 > 15"},
    ]


def row_encoded(backend: tokenizers.Tokenizer, source: AnySource, template: str) -> Conversations:
    spec = ChatSpec(Template(template, "test"), 10_000, truncate=True)
    documents = [(text or "").encode() for text in sources.documents(source, Chat())]
    return chat_encoder(backend.to_str(), "uint16", spec)(documents)


ARGUMENTS = {"city": "Zürich", "days": [1, {"of": None}]}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_calls_of_tools_are_those_of_transformers(
    backend: tokenizers.Tokenizer, arguments: Any, tmp_path: Path
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=WITH_TOOLS)
    rows: list[dict[str, Any]] = [
        {"messages": calling(arguments), "tools": TOOLS},
        {"messages": calling(arguments, None), "tools": json.dumps(TOOLS)},
        {"messages": [*talk("a"), {"role": "assistant", "content": "b", "reasoning": "c", "thinking": "d"}]},
        {"messages": calling(arguments)[:2], "tools": None},
    ]
    found = row_encoded(backend, jsonl(tmp_path / "a.jsonl", *rows), WITH_TOOLS)
    assert (found.tally, found.refusal) == ({}, "")
    plain = WITH_TOOLS.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    unmarked = rows_of(row_encoded(backend, jsonl(tmp_path / "a.jsonl", *rows), plain))
    given = [(calling(ARGUMENTS), TOOLS)] * 2 + [(rows[2]["messages"], None), (calling(ARGUMENTS)[:2], None)]
    for (ids, answers), (_, and_line_ends), (messages, tools) in zip(rows_of(found), unmarked, given, strict=True):
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert answers == expected["assistant_masks"]
        assert sum(and_line_ends) == sum(answers) + sum(message["role"] == "assistant" for message in messages)
    counted = backend.decode([number for number, answer in zip(*rows_of(found)[0], strict=True) if answer], False)
    assert '"weather", "arguments": {"city": "Zürich", "days": [1, {"of": null}]}' in counted
    assert "18 > 15It is." in counted
    assert "°" not in counted


def test_nulls_with_which_a_table_fills_arguments_are_left_out(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": calling(arguments), "tools": TOOLS} for arguments in ({"city": "a"}, {"unit": "b"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    table = row_encoded(backend, make_source(type="parquet", path=str(tmp_path / "a.parquet")), WITH_TOOLS)
    for (ids, answers), city in zip(rows_of(table), (True, False), strict=True):
        text = backend.decode([number for number, answer in zip(ids, answers, strict=True) if answer], False)
        assert ("city" in text, "unit" in text, "null" in text) == (city, not city, False)


def test_what_a_template_does_not_read_is_not_dropped_from_a_conversation(
    backend: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    said = [{"messages": [*talk("a"), {"role": "assistant", "content": "b", key: "c"}]} for key in REASONING]
    rows = [{"messages": calling({})[:2]}, {"messages": talk("a", "b"), "tools": TOOLS}, *said]
    keys = [TOOL_CALLS, "tools", *REASONING]
    for row, key in zip(rows, keys, strict=True):
        found = row_encoded(backend, jsonl(tmp_path / "a.jsonl", row), CHATML)
        assert found.tally == {"rejected": 1}
        assert repr(key) in found.refusal
    silent = CHATML + "{{ '' if messages[-1].tool_calls else '' }}"
    found = row_encoded(backend, jsonl(tmp_path / "a.jsonl", {"messages": calling({}, "x")}), silent)
    assert found.tally == {"rejected": 1}
    assert "'weather'" in found.refusal or "'reasoning_content'" in found.refusal
    forged = row_encoded(backend, jsonl(tmp_path / "a.jsonl", {"messages": calling({"a": ["<|im_end|>"]})}), WITH_TOOLS)
    assert forged.tally == {"special_tokens": 1}


@pytest.mark.parametrize(
    ("calls", "tools"),
    [
        ("{", []), ("text", []), ([1], []), ([{"name": 5}], []), ([{"function": "a"}], []),
        ([{"name": "a", "arguments": "{"}], []), (None, "{"), (None, [1]), (None, {"name": "a"}),
    ],
)  # fmt: skip
def test_tools_of_another_shape_are_refused(calls: Any, tools: Any, tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "b"} | ({"tool_calls": calls} if calls else {})
    source = jsonl(tmp_path / "a.jsonl", {"messages": [*talk("a"), said], "tools": tools})
    with refused(f"{tmp_path / 'a.jsonl'}:1", rule="'tool_calls'" if isinstance(calls, str) else ()):
        list(sources.documents(source, Chat()))


# -- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
    ],
)
def test_a_template_without_end_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 1)
    with refused("data.chat.chat_template: x"):
        Template(source, "x").check()


def test_a_tokenizer_whose_pattern_backtracks_for_ever_or_whose_file_blocks_is_refused(
    backend: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[-1]).save_pretrained(tmp_path)
    section = HuggingFaceTokenizer(type="huggingface", path=str(tmp_path))
    tokenizer.require_bounded(section)
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    pattern = {"Regex": "(a|aa)+[bc]"}
    content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with refused(f"data.tokenizer: {tmp_path}"):
        tokenizer.require_bounded(section)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with refused(tmp_path / "tokenizer.json"):
        tokenizer.require_bounded(section)


def test_packing_fills_sequences_as_best_fit_decreasing_does() -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, LENGTH + 1, 300)
        packed = best_fit(lengths, LENGTH, seed)
        assert sorted(packed.members.tolist()) == list(range(300))
        assert np.add.reduceat(lengths[packed.members], packed.bounds[:-1]).max() <= LENGTH
        rooms: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fits = [number for number, room in enumerate(rooms) if room >= length]
            if fits:
                rooms[min(fits, key=lambda number: rooms[number])] -= length
            else:
                rooms.append(LENGTH - length)
        assert len(packed) == len(rooms)
    assert not np.array_equal(best_fit(lengths, LENGTH, 0).members, best_fit(lengths, LENGTH, 1).members)


# -- a prepared folder -----------------------------------------------------------------------------------------------


def recipe(*given: AnySource, **chat: Any) -> Recipe:
    data = {
        "sources": [source.model_dump() for source in given], "split": [80.0, 20.0, 0.0], "chat": chat,
        "num_workers": 0,
    }  # fmt: skip
    return tiny(model={"seq_length": LENGTH, "vocab_size": 600}, data=data)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[AnySource]:
    folder = tmp_path_factory.mktemp("rows")
    texts = [json.loads(text) for text in _some(240)]
    bad = [talk("no answer"), talk("x", "<|im_start|>"), texts[0]]
    one = jsonl(folder / "one.jsonl", *({"messages": messages} for messages in [*texts[:160], *bad]))
    pairs = [messages for messages in texts[160:] if len(messages) == 2]
    two = jsonl(folder / "two.jsonl", *({"prompt": p["content"], "completion": c["content"]} for p, c in pairs))
    return [one, two]


@pytest.fixture(scope="module")
def prepared(rows: list[AnySource], tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(recipe(*rows), tmp_path_factory.mktemp("data"), workers=1)


def test_conversations_that_differ_in_their_calls_are_no_duplicates(tmp_path: Path) -> None:
    def asked(row: dict[str, Any], call_id: str = "") -> dict[str, Any]:
        call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": row}}
        return {"messages": [*talk("here?")[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]}

    said = [{"messages": [*talk("a")[:1], {"role": "assistant", "content": "b", "reasoning": why}]} for why in "cd"]
    rows = [asked({"city": "Rome"}, "call_a"), asked({"city": "Rome"}, "call_b"), asked({"city": "Oslo"}), *said]
    used = recipe(jsonl(tmp_path / "a.jsonl", *rows))
    used = used.model_copy(
        update={"data": used.data.model_copy(update={"steps": (DuplicatesStep(type="duplicates"),)})}
    )
    run, seen = pipeline(step_spec(used.data)), Duplicates()
    found = map(run, sources.documents(used.data.sources[0], used.data.chat))
    kept = [seen.add(each.marks[0]) for each in found if isinstance(each, Document)]
    assert kept == [True, False, True, True, True]


def test_the_manifest_has_what_was_dropped_and_what_the_loss_counts(prepared: Prepared) -> None:
    chat = prepared.manifest.chat
    assert chat is not None
    first, second = chat.sources
    assert (first.unanswered, first.special_tokens, first.rejected) == (1, 1, 0)
    assert prepared.manifest.sources[0].duplicates == 1
    answers = sum(file.read_bytes().count(1) for file in prepared.path.glob("*.answers"))
    assert first.answer_tokens + second.answer_tokens == answers
    tokens = sum(prepared.manifest.counts(split).tokens for split in ("train", "valid"))
    assert first.tokens + second.tokens == tokens
    assert 0.2 < answers / tokens < 0.8
    assert (prepared.path / "chat_template.jinja").read_text() == CHATML
    assert not prepared.manifest.held_out
    assert prepared.verify() == sum(prepared.manifest.counts(split).documents for split in ("train", "valid"))


def test_a_damaged_file_of_answers_is_refused(prepared: Prepared, rows: list[AnySource], tmp_path: Path) -> None:
    copied = prepare(recipe(*rows), tmp_path, workers=1)
    file = next(copied.path.glob("*-train.answers"))
    content = file.read_bytes()
    file.write_bytes(bytes([1 - content[0]]) + content[1:])
    with refused(file):
        build(recipe(*rows), copied, "train")


def samples(given: Recipe, prepared: Prepared) -> list[dict[str, torch.Tensor]]:
    dataset = build(given, prepared, "train")
    assert dataset is not None
    return [dataset[number] for number in range(len(dataset))]


@pytest.mark.parametrize("packing", [True, False])
def test_samples_are_whole_conversations(rows: list[AnySource], prepared: Prepared, packing: bool) -> None:
    given = recipe(*rows, packing=packing)
    prepare(given, prepared.path.parent, workers=1)
    backend = tokenizers.Tokenizer.from_file(str(prepared.path / "tokenizer.json"))
    spec = ChatSpec(Template(CHATML, ""), LENGTH + 1, True)
    documents = [text.encode() for source in rows for text in sources.documents(source, Chat()) if text]
    known = {tuple(ids): answers for ids, answers in rows_of(chat_encoder(backend.to_str(), "uint16", spec)(documents))}
    most = 0
    for sample in samples(given, prepared):
        starts = torch.nonzero(sample["position_ids"] == 0).flatten().tolist()
        found = 0
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            tokens, labels, mask = (sample[key][start:end] for key in ("tokens", "labels", "loss_mask"))
            assert torch.equal(sample["position_ids"][start:end], torch.arange(end - start))
            answers = known.get((*tokens.tolist(), int(labels[-1])))
            if answers is None:  # the padding
                assert not mask.any()
                assert end == LENGTH
                continue
            found += 1
            assert torch.equal(tokens[1:], labels[:-1])
            assert mask.tolist() == answers[1:]
        assert sample["loss_mask"].any()
        most = max(most, found)
    assert (most > 1) == packing


def test_every_conversation_is_seen_once_before_any_is_seen_twice(rows: list[AnySource], tmp_path: Path) -> None:
    base = recipe(rows[0])
    longer = base.model_copy(update={"train": base.train.model_copy(update={"train_iters": 24})})
    prepared = prepare(base, tmp_path, workers=1)
    prepare(longer, tmp_path, workers=1)
    first, second = (samples(each, prepared) for each in (base, longer))
    # A longer run begins alike, so it may be resumed as one.
    assert all(torch.equal(one["tokens"], other["tokens"]) for one, other in zip(first, second, strict=False))
    names = [tuple(sample["tokens"].tolist()) for sample in second]
    count = len(set(names))
    assert count < len(names)
    assert len(set(names[:count])) == count
    assert names[:count] != names[count : 2 * count]


def test_sources_are_drawn_by_weight(rows: list[AnySource], prepared: Prepared) -> None:
    heavy = [rows[0], rows[1].model_copy(update={"weight": 3.0})]
    assert fingerprint(recipe(*heavy)) == prepared.manifest.fingerprint
    used = prepare(recipe(*heavy), prepared.path.parent, workers=1)
    folder = max(used.path.glob("index/*"), key=lambda path: path.stat().st_mtime_ns)
    order = np.load(folder / "train-order.npy")
    assert np.bincount(order[:, 0]).tolist() == [len(order) // 4, len(order) * 3 // 4]


def test_packing_needs_no_new_tokens_and_the_length_does(rows: list[AnySource]) -> None:
    base = fingerprint(recipe(*rows))
    assert fingerprint(recipe(*rows, packing=False)) == base
    assert fingerprint(recipe(*rows, max_length=LENGTH + 1)) == base
    assert fingerprint(recipe(*rows, max_length=LENGTH)) != base
    shorter = recipe(*rows)
    shorter = shorter.model_copy(update={"model": shorter.model.model_copy(update={"seq_length": 32})})
    assert fingerprint(shorter) != base


def test_a_source_without_anything_to_learn_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", *({"messages": talk(f"question {n}")} for n in range(20)))
    with refused("data.sources[0]", rule="20"):
        prepare(recipe(source), tmp_path / "data", workers=1)
    assert not list((tmp_path / "data").glob("[!.]*"))


# -- tokenizers of others --------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(backend: tokenizers.Tokenizer, tmp_path: Path) -> transformers.PreTrainedTokenizerFast:
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.EOD)
    found.save_pretrained(tmp_path / "tokenizer")
    return found


def with_theirs(base: Recipe, folder: Path) -> Recipe:
    section = HuggingFaceTokenizer(type="huggingface", path=str(folder))
    return base.model_copy(update={"data": base.data.model_copy(update={"tokenizer": section})})


def test_a_tokenizer_without_a_template_is_refused_before_anything_is_read(
    rows: list[AnySource], theirs: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    given = with_theirs(recipe(*rows), tmp_path / "tokenizer")
    with refused("data.chat.chat_template", rule=("FILE.jinja", "data.chat.template=chatml|qwen3")):
        prepare(given, tmp_path / "data", workers=1)
    for content, rule in ((b"{% for", "Jinja"), (b"\xff", "UTF-8")):
        (tmp_path / "a.jinja").write_bytes(content)
        named = with_theirs(recipe(*rows, chat_template=str(tmp_path / "a.jinja")), tmp_path / "tokenizer")
        with refused("data.chat.chat_template", rule=rule):
            prepare(named, tmp_path / "data", workers=1)
    with refused("data.chat.template: llama3", rule=("<|begin_of_text|>", "data.chat.template=chatml|qwen3")):
        prepare(with_theirs(recipe(*rows, template="llama3"), tmp_path / "tokenizer"), tmp_path / "data", workers=1)


def test_a_template_from_a_file_and_its_own_end_of_an_answer(
    rows: list[AnySource], theirs: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "a.jinja").write_text(PREFIX)
    given = with_theirs(recipe(*rows, chat_template=str(tmp_path / "a.jinja")), tmp_path / "tokenizer")
    found = prepare(given, tmp_path / "data", workers=1)
    assert found.manifest.chat is not None
    assert found.manifest.chat.origin == str(tmp_path / "a.jinja")
    assert found.manifest.tokenizer.eod == theirs.eos_token_id
    asked = question(found, "Why?")
    message = [{"role": "user", "content": "Why?"}]
    assert asked.text == theirs.apply_chat_template(
        message, chat_template=PREFIX, tokenize=False, add_generation_prompt=True
    )
    assert asked.end == theirs.convert_tokens_to_ids(SPECIAL[1])
    lines: list[str] = []
    (tmp_path / "a.jinja").write_text(CHATML)
    prepare(given, tmp_path / "data", workers=1, progress=lines.append)
    assert any(str(tmp_path / "a.jinja") in line for line in lines)
    assert not any("chat_template=FILE" in line for line in lines)
    (tmp_path / "a.jinja").write_text("{% set today = strftime_now('%Y') %}" + CHATML)
    prepare(given, tmp_path / "other", workers=1, progress=lines.append)
    assert any("chat_template=FILE" in line for line in lines)


THINKING = "<think>\nwhy\n</think>\n\nb"
RENDERED = {
    # Token for token as printed in OpenAI's description of ChatML, Meta's of Llama 3's prompt format, and Qwen 3's.
    "chatml": (
        talk(" a\n", THINKING, "c", " d ", system="s"),
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\n",
        f"{THINKING}<|im_end|>",
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        " d <|im_end|>",
        "\n",
    ),
    "llama3": (
        talk(" a\n", "b", "c", " d ", system="s"),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "b<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "d<|eot_id|>",
        "",
    ),
    "qwen3": (
        talk(" a\n", THINKING, "c", "\nd ", system="s"),
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\n",
        "b<|im_end|>",
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nd <|im_end|>",
        "\n",
    ),
}
"""Conversations, and their text in turn: not an answer, an answer with the end of its turn, …"""


@pytest.mark.parametrize("name", TEMPLATES)
def test_marked_templates_render_the_text_of_their_models_and_mark_the_answers(name: str) -> None:
    messages, *parts = RENDERED[name]
    template = Template(TEMPLATES[name].source, name)
    text, spans = template.spans(messages, 1 << 20)
    assert text == "".join(parts)
    assert [text[slice(*span)] for span in spans] == parts[1::2]
    # The prompt for an answer is what precedes one.
    assert template.prompt(messages[:2]) == parts[0]
    assert all(part.endswith(TEMPLATES[name].special[-1]) for part in parts[1::2])
    backend, end = tokenizer.train(_some(50), 600, TEMPLATES[name].special)
    ((ids, answers),) = rows_of(encoded(backend, [messages], TEMPLATES[name].source))
    learnt = backend.decode([i for i, answer in zip(ids, answers, strict=True) if answer], skip_special_tokens=False)
    assert learnt == "".join(parts[1::2])
    assert [i for i, answer in zip(ids, answers, strict=True) if answer].count(end) == 2


def test_qwen_3_keeps_the_reasoning_of_the_last_answer_and_the_results_of_tools() -> None:
    template = Template(TEMPLATES["qwen3"].source, "qwen3")
    messages = [*talk("a", THINKING), {"role": "tool", "content": "5"}, {"role": "assistant", "content": "e"}]
    text, spans = template.spans(messages, 1 << 20)
    assert text == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{THINKING}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\ne<|im_end|>\n"
    )
    assert [text[slice(*span)] for span in spans] == [f"{THINKING}<|im_end|>", "<think>\n\n</think>\n\ne<|im_end|>"]


@pytest.mark.parametrize("system", ["", "Be kind."])
def test_qwen_3_has_the_tools_and_calls_of_its_own_template(system: str) -> None:
    """Its own text, as in the model's repository, from the definitions on to the end of the first call."""
    messages = [*([{"role": "system", "content": system}] if system else []), *calling(ARGUMENTS)]
    call = messages[-3]["tool_calls"][0]
    messages[-3] = messages[-3] | {"content": "Let me see.", "tool_calls": [call, call["function"]]}
    written = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, {"of": null}]}}\n</tool_call>'
    )
    text, spans = Template(TEMPLATES["qwen3"].source, "qwen3").spans(messages, 1 << 20, TOOLS)
    given = f"{system}\n\n" if system else ""
    assert text == (
        f"<|im_start|>system\n{given}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}}\n</tools>\n\nFor each function call, return a json object with function name '
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nwarm?<|im_end|>\n"
        f"<|im_start|>assistant\nLet me see.\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n18 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n18 > 15\n</think>\n\nIt is.<|im_end|>\n"
    )
    assert [text[slice(*span)] for span in spans] == [
        f"Let me see.\n{written}\n{written}<|im_end|>",
        "<think>\n18 > 15\n</think>\n\nIt is.<|im_end|>",
    ]


def test_a_named_template_is_that_of_the_prepared_data(rows: list[AnySource], tmp_path: Path) -> None:
    found = prepare(recipe(*rows, template="llama3"), tmp_path / "data", workers=1)
    assert (found.path / "chat_template.jinja").read_text() == TEMPLATES["llama3"].source
    asked = question(found, "Why?")
    assert found.tokenizer().backend.id_to_token(asked.end) == "<|eot_id|>"
    assert fingerprint(recipe(*rows)) != fingerprint(recipe(*rows, template="chatml"))


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "where", "rule"),
    [
        ({"data": {"sources": [{"type": "stdlib"}], "chat": {}}}, "data.sources.0.type", "jsonl"),
        ({"data": {"sources": [{"type": "docstrings"}]}}, "data.sources.0.type", "data.chat"),
        (
            {"data": {"sources": [{"type": "jsonl", "path": "x", "text_key": "y"}], "chat": {}}},
            "data.sources.0.text_key", "data.chat.messages_key",
        ),
        ({"data": {"sources": [{"type": "docstrings"}], "chat": {"max_length": 66}}}, "data.chat.max_length", "65"),
        (
            {"data": {"sources": [{"type": "docstrings"}], "chat": {"template": "chatml", "chat_template": "x"}}},
            "data.chat.template", "chat_template",
        ),
        ({"data": {"sources": [{"type": "docstrings"}], "chat": {"max_length": 1}}}, "data.chat.max_length", "65"),
        ({"model": {"transformer_impl": "transformer_engine"}}, "model.transformer_impl", "data.chat.packing"),
        ({"model": {"mtp_num_layers": 1, "position_embedding_type": "rope"}}, "model.mtp_num_layers", "next"),
        ({"layout": {"context_parallel_size": 2}}, "layout.context_parallel_size", "data.chat.packing"),
        (
            {"search": {"space": [{"key": "optimizer.lr", "low": 1e-4, "high": 1e-3}],
                        "objectives": ["valid_bits_per_byte"]}},
            "search.objectives", "valid_loss",
        ),
    ],
)  # fmt: skip
def test_rules(changes: dict[str, Any], where: str, rule: str) -> None:
    sections = {"data": {"sources": [{"type": "docstrings"}], "chat": {}}, **changes}
    found = {problem.key: problem for problem in check(tiny(**sections))}
    assert rule in f"{found[where].what} {found[where].rule} {found[where].fix}"
    padded = {**sections["data"], "chat": {**sections["data"].get("chat", {}), "packing": False}}
    if where.startswith(("model", "layout")):
        assert where not in {problem.key for problem in check(tiny(**{**sections, "data": padded}))}


def test_a_template_without_an_end_of_turn_is_noticed() -> None:
    backend, _ = tokenizer.train(["a text"], 300, SPECIAL)
    messages = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    plain = messages + "{% if add_generation_prompt %}assistant:{% endif %}"
    end = " + '<|im_end|>' }}\n{%- endgeneration -%}"
    outside = CHATML.replace(end, " }}\n{%- endgeneration -%}\n{{ '<|im_end|>' }}")
    assert outside != CHATML
    templates = (CHATML, PREFIX, plain, outside)
    ends = [ends_answers(Template(source, "test"), backend.to_str()) for source in templates]
    assert ends == [True, True, False, False]
