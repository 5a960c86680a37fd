"""The steps of `data.steps`: what each changes and drops, how it is counted, and the lists that are refused."""

from __future__ import annotations

import gzip
import importlib.machinery
import json
import time
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer

from llmrecipes.data.folder.documents import documents
from llmrecipes.data.folder.prepared import fingerprint, held_out_text
from llmrecipes.data.preparation import corpus as corpus_module
from llmrecipes.data.preparation.write import SAMPLES
from llmrecipes.data.prepare import prepare
from llmrecipes.data.steps import contamination
from llmrecipes.data.steps.eval_files import files_of_tasks
from llmrecipes.data.steps.split import SPLITS, SplitRule, digest
from llmrecipes.data.steps.steps import Dropped, pipeline, step_spec
from llmrecipes.data.steps.words import normalized
from llmrecipes.diagnosis.data_checks import of_data
from llmrecipes.recipe.load import load
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.schema import Data, Recipe
from llmrecipes.recipe.sections.data_steps import LANGUAGES
from llmrecipes.recipe.sections.plugins import resolve
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.refusals import has_token, refused
from tests.unit.data_recipes import STEPS, made_step, recipe

PROSE = (
    "The committee met on Tuesday to discuss the budget of the coming year, and most of the members agreed with the "
    "proposal that they had got. After a long debate about roads, schools and the old harbour, they decided to "
    "ask an engineer for advice before anything is built. Nobody expected the work to begin before spring."
)
PAGE_TEXT, MARKDOWN, REPAIRED = "A harbour & a road.", "# <html> in Markdown", "schön — a red “word”\r\n"
PAGE = (
    "<!DOCTYPE html><html><head><title>t</title><style>p{}</style><script>var x = 1;</script></head><body>"
    "<nav><ul><li><a href='/'>Home</a></li></ul></nav><main><p>A harbour &amp; a road.</p></main></body></html>"
)


def run(text: str, *steps: dict[str, Any]) -> str | tuple[str, str]:
    """The text that the steps make of a document, or the step and rule that drop it."""
    outcome = pipeline(step_spec(Data(steps=tuple(made_step(step) for step in steps))))(text)
    return (outcome.reason, outcome.rule) if isinstance(outcome, Dropped) else outcome.text.decode()


VERSIONS = "version 1.8.3.2, Chrome/8.8.4.4, 8.8.8.8 release notes"


def with_steps(source: AnySource, *steps: dict[str, Any]) -> Recipe:
    used = recipe(source)
    return used.model_copy(
        update={"data": used.data.model_copy(update={"steps": tuple(made_step(step) for step in steps)})}
    )


@pytest.mark.parametrize(
    ("text", "step", "expected"),
    [
        (PAGE, {"type": "html"}, PAGE_TEXT),
        (MARKDOWN, {"type": "html"}, MARKDOWN),
        ("schÃ¶n â€” a \x1b[31mred\x1b[0m “word”\r\n", {"type": "unicode"}, REPAIRED),
        ("abc", {"type": "length", "min_characters": 4}, ("length", "min_characters")),
        ("abcde", {"type": "length", "max_characters": 4}, ("length", "max_characters")),
        ("mail a.b@c-d.example.org, not a@b", {"type": "personal_data"}, "mail |||EMAIL_ADDRESS|||, not a@b"),
        (
            "8.8.8.8 and 2001:4860:4860::8888 at 12:30:45, 127.0.0.1, 10.0.0.1, version 1.2.3.4.5",
            {"type": "personal_data"},
            "|||IP_ADDRESS||| and |||IP_ADDRESS||| at 12:30:45, 127.0.0.1, 10.0.0.1, version 1.2.3.4.5",
        ),
        (VERSIONS, {"type": "personal_data"}, VERSIONS),
        (PROSE, {"type": "language", "languages": ["de", "en"]}, PROSE),
        (PROSE, {"type": "language", "languages": ["de"]}, ("language", "en")),
        ("x = 1", {"type": "language", "languages": ["en", "zxx"], "min_probability": 0.9}, ("language", "uncertain")),
        (PROSE, {"type": "gopher"}, PROSE),
        (PROSE, {"type": "gopher", "min_words": 100}, ("gopher", "words")),
        (PROSE, {"type": "gopher", "min_words": 1, "max_words": 10}, ("gopher", "words")),
        ("a b c " * 30, {"type": "gopher"}, ("gopher", "word_length")),
        ("#word " * 60, {"type": "gopher"}, ("gopher", "symbols")),
        ("- the word and word\n" * 20, {"type": "gopher"}, ("gopher", "bullets")),
        ("the word and a few more words of it\n" * 8 + "more…\n" * 5, {"type": "gopher"}, ("gopher", "ellipses")),
        ("the word and 1234 5678 9012 " * 20, {"type": "gopher"}, ("gopher", "letters")),
        ("palabra numero siguiente " * 20, {"type": "gopher"}, ("gopher", "stop_words")),
        (PROSE, {"type": "repetition"}, PROSE),
        ("one line\n" * 3 + PROSE, {"type": "repetition"}, ("repetition", "lines")),
        (f"{PROSE}\n\n{PROSE}\n\na\n\nb\n\nc\n\nd", {"type": "repetition"}, ("repetition", "line_characters")),
        (" ".join(f"buy now {n}" for n in range(40)), {"type": "repetition"}, ("repetition", "top_2_gram")),
        (f"{PROSE} {PROSE}", {"type": "repetition"}, ("repetition", "5_grams")),
    ],
)  # fmt: skip
def test_what_a_step_makes_of_a_document(text: str, step: dict[str, Any], expected: str | tuple[str, str]) -> None:
    assert run(text, step) == expected


def test_navigation_is_kept_where_the_whole_page_is_wanted() -> None:
    assert "Home" in run(PAGE, {"type": "html", "main_content": False})
    assert "Home" not in run(PAGE, {"type": "html"})


COOKING = (
    "<html><body><main><ul><li>flour</li><li>eggs</li></ul><ol><li>mix</li><li>bake</li></ol>"
    "<p>10<sup>6</sup> bytes, x<sup>2</sup>, a word<sup>1</sup>, H<sub>2</sub>O</p></main></body></html>"
)


def test_lists_and_exponents_of_a_page_are_kept() -> None:
    text = run(COOKING, {"type": "html"})
    for kept in ("flour", "eggs", "mix", "bake", "10^6 bytes", "x^2", "word1", "H2O"):
        assert kept in text, text


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        ("<!---->" * 4000 + "x", None),
        ("<?xml " * 4000, None),
        ("<html><body>" + "<div>" * 40_000 + "x", ("html", "depth")),
        ("<html><body>" + "<table><tr><td>" * 20_000, ("html", "depth")),
        ("<html><body>" + "<ul>" * 200 + "<li>a" * 40_000, ("html", "depth")),
        ("<html><body>" + ("<ul>" * 30 + "<li>a" + "</ul>" * 30) * 500, None),
        ("<html><body><p " + " ".join(f"a{n}=1" for n in range(40_000)) + ">x", ("html", "attributes")),
        ("<html><body>" + '<a ="' * 40_000, ("html", "attributes")),
        ("<html><body><select>" + "<OPTION>a" * 60_000, ("html", "options")),
        ("<html><body>" + "x" * (8 << 20), ("html", "size")),
        ("<html><body>" + "<ul><li>a</li></ul>" * 5000, None),
        ("<html><body><ul>" + "<li><a href=x>link</a> then some more text</li>" * 5000, None),
        ("<html><body>" + "1<sup>2</sup>" * 5000, None),
        ("<html><body>" + "<a><b><i><p>x" * 5000, None),
    ],
)
def test_the_time_for_a_page_is_bounded(page: str, outcome: tuple[str, str] | None) -> None:
    """By CPU time, which other processes do not lengthen; what grows with the square takes minutes for some of them."""
    run(PAGE, {"type": "html"})  # which imports the extractor
    begin = time.process_time()
    result = run(page, {"type": "html"})
    assert time.process_time() - begin < 5
    assert result == outcome if outcome else isinstance(result, str)


def test_entities_in_code_are_kept_unless_asked_for() -> None:
    code = 'print("&amp; is &lt;")'
    assert run(code, {"type": "unicode"}) == code
    assert run(code, {"type": "unicode", "unescape_html": True}) == 'print("& is <")'


@pytest.mark.parametrize(
    ("text", "languages", "dropped"),
    [
        ("妈妈做饭", ["zh"], ""),  # zh 0.38, Cantonese 0.40, Wu 0.19
        ("你好", ["ja"], "yue"),
        ("To je dobro", ["sr", "hr", "bs"], ""),  # 0.30, 0.23, 0.17
        ("To je dobro", ["sr", "hr"], ""),
        ("To je dobro", ["hr"], "sr"),
        ("Dobar dan, kako ste", ["hr"], "uncertain"),  # 0.33, more than every other
        ("Jeg har en hund", ["no"], "da"),  # 0.42, 0.54
        ("Jeg har en hund", ["no", "da"], ""),
    ],
)
def test_probabilities_of_wanted_languages_are_added_up(text: str, languages: list[str], dropped: str) -> None:
    outcome = run(text, {"type": "language", "languages": languages})
    assert outcome == (("language", dropped) if dropped else text)


def test_steps_are_applied_in_their_order() -> None:
    short, mask = {"type": "length", "max_characters": 15}, {"type": "personal_data"}
    assert run("a@example.org", mask, short) == ("length", "max_characters")
    assert run("a@example.org", short, mask) == "|||EMAIL_ADDRESS|||"


def test_ccnet_normalization() -> None:
    assert normalized("  Ünïted—2024,\n the  U.N. ") == "united 0000 the u n"


def test_counts_samples_and_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes whatever the number of processes; held-out text and hashes are those of the cleaned documents."""
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    rows = [f"{PROSE} Entry {'abcdefghij'[n % 10] * (n // 10 + 1)}, by user{n}@example.org." for n in range(120)]
    rows += [row.upper() for row in rows[:7]] + [f"short {n}" for n in range(30)] + ["", PROSE.replace("the", "#")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = make_source(type="jsonl", path=str(file))
    steps = ({"type": "gopher", "min_words": 40}, {"type": "personal_data"}, {"type": "duplicates"})
    used = with_steps(source, *steps)
    lines: list[str] = []
    one, two = (prepare(used, tmp_path / f"{n}", workers=n, progress=lines.append) for n in (1, 2))
    record = one.manifest.sources[0]
    assert (record.read, record.empty, record.duplicates) == (159, 1, 7)
    assert record.steps == {"gopher": 31, "personal_data": 0}
    assert record.rules == {"gopher.symbols": 1, "gopher.words": 30}
    assert record.changed == {"personal_data": 120}
    assert sum(counts.documents for counts in record.splits.values()) == 120
    assert any("7 duplicate" in line and "31 by gopher" in line for line in lines)
    assert b"@example.org" not in held_out_text(one) and b"|||EMAIL_ADDRESS|||" in held_out_text(one)
    assert {n: f.sha256 for n, f in one.manifest.files.items()} == {n: f.sha256 for n, f in two.manifest.files.items()}
    samples = [json.loads(line) for line in (one.path / SAMPLES).read_text().splitlines()]
    assert [sample["step"] for sample in samples] == ["gopher"] * 20 + ["duplicates"] * 7
    assert all(sample["source"] == record.label for sample in samples)
    assert any(sample["rule"] == "words" and sample["text"].startswith("short ") for sample in samples)
    assert all("ENTRY" in sample["text"] for sample in samples if sample["step"] == "duplicates")
    assert one.verify() == 120
    # Order, types and keys count, a default that is written does not.
    others = [steps[::-1][1:], steps[:1], (steps[0] | {"max_words": 99}, *steps[1:]), ()]
    assert len({fingerprint(with_steps(source, *other)) for other in (steps, *others)}) == 5
    assert fingerprint(with_steps(source, steps[0] | {"max_words": 100_000}, *steps[1:])) == fingerprint(used)


def test_every_type_has_its_function_and_its_keys() -> None:
    for name, step in STEPS.items():
        takes = set(signature(resolve(step.does.target)).parameters)
        assert takes - {"tokens", "factors", "drawn"} == step.model_fields.keys() - {"type"}, name
    assert list(STEPS) == list(keys()["data.steps.N.type"].by_type)
    assert step_spec(Data()).steps == () and SplitRule((1.0, 0.0, 0.0)).of(b"\0" * 32) == "train"


def test_a_step_that_judges_text_comes_after_html() -> None:
    judges = [name for name, step in STEPS.items() if not step.does.takes_markup]
    assert {name for name, step in STEPS.items() if ".quality:" in step.does.target} <= set(judges)
    keys = {"language": ", languages: [en]", "classifier": ", model: a.bin, labels: [good]"}
    for name in judges:
        with refused("data.steps.1.type"):
            load("gpt-tiny", [f"data.steps=[{{type: {name}{keys.get(name, '')}}}, {{type: html}}]"])


@pytest.mark.parametrize(
    ("steps", "where", "value"),
    [
        ("[{type: denoise}]", "data.steps.0.type", "gopher"),
        ("[{type: unicode, treshold: 3}]", "data.steps.0.treshold", "data.steps.0.treshold"),
        ("[{type: repetition, min_words: 3}]", "data.steps.0.min_words", "gopher"),
        ("[{type: length}]", "data.steps.0.min_characters", "max_characters"),
        ("[{type: length, min_characters: 9, max_characters: 8}]", "data.steps.0.min_characters", "8"),
        ("[{type: gopher, max_words: 9}]", "data.steps.0.min_words", "50"),
        ("[{type: html}, {type: html, main_content: false}]", "data.steps", "html"),
        ("[{type: language, languages: [en, deu]}]", "data.steps.0.languages", "de"),
        ("[{type: language}]", "data.steps.0.languages", "language"),
        ("[{type: decontaminate}]", "data.steps.0.paths", "tasks"),
        ("[{type: duplicates}, {type: unicode}]", "data.steps.1", "duplicates"),
        ("[{type: balance}, {type: unicode}]", "data.steps.1", "balance"),
        ("[{type: balance, temperature: 0.5}]", "data.steps.0.temperature", "1"),
        ("[{type: classifier, labels: [good]}]", "data.steps.0.model", "classifier"),
        ("[{type: classifier, model: a.bin}]", "data.steps.0.labels", "classifier"),
        ("[{type: code, max_mean_line_length: 2000}]", "data.steps.0.max_mean_line_length", "1000"),
        ("[{type: duplicates, max_repeated_spans: 0.1}]", "data.steps.0.max_repeated_spans", "span_sentences"),
        ("[{type: duplicates, cut_spans: true}]", "data.steps.0.cut_spans", "span_sentences"),
        ("[{type: duplicates, span_sentences: 3, min_words: 9}]", "data.steps.0.min_words", "cut_spans"),
        (
            "[{type: duplicates, span_sentences: 3, cut_spans: true, max_repeated_spans: 0.1}]",
            "data.steps.0.max_repeated_spans",
            "cut_spans",
        ),
        ("[{type: noise}, {type: near_duplicates}]", "data.steps.1", "noise"),
        ("[{type: near_duplicates}, {type: duplicates}]", "data.steps.1", "near_duplicates"),
        ("[{type: noise, noise_rate: 1.0}]", "data.steps.0.noise_rate", "1"),
        ("[{type: duplicates, span_sentences: 3, cut_spans: true}, {type: noise}]", "data.steps.1.type", "cut_spans"),
        ("[{type: c4}, {type: code}]", "data.steps.1.type", "c4"),
        ("[{type: language, languages: [de]}, {type: gopher}]", "data.steps.1.type", "en"),
        ("[{type: fineweb}, {type: html}]", "data.steps.1.type", "fineweb"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(steps: str, where: str, value: str) -> None:
    with refused(where) as caught:
        load("gpt-tiny", [f"data.steps={steps}"])
    assert has_token(str(caught.value), value)


def test_a_resolved_recipe_has_all_keys_of_all_steps() -> None:
    steps = load("gpt-tiny", ["data.steps=[{type: unicode}, {type: length, min_characters: 3}]"]).recipe.data.steps
    written = [step.model_dump(mode="json") for step in steps]
    assert written[0]["min_words"] is None
    assert load("gpt-tiny", [f"data.steps={json.dumps(written)}"]).recipe.data.steps == steps


def test_a_limit_that_the_first_steps_have_made_impossible_is_refused() -> None:
    with refused("data.steps.0.max_characters", rule="data.min_characters"):
        load("gpt-tiny", ["data.min_characters=9", "data.steps=[{type: length, max_characters: 8}]"])


def test_a_missing_package_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.data.steps.steps.find_spec", lambda name: None)
    source = make_source(type="text", path=str(tmp_path / "nowhere"))
    with refused("data.steps.0.type") as caught:
        prepare(with_steps(source, {"type": "unicode"}), tmp_path / "data", workers=1)
    assert has_token(str(caught.value), "ftfy") and "llmrecipes[corpora]" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_documents_with_text_of_an_evaluation_are_dropped(tmp_path: Path) -> None:
    rows = [{"question": PROSE, "choices": ["short", PROSE[:20]]}, {"question": None, "answer": 3}]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    step = {"type": "decontaminate", "paths": [str(tmp_path / "*.jsonl")]}
    words = PROSE.split()
    inside = f"short {' '.join(words[9:22]).upper().replace(',', ' !')} and so on"
    assert run(inside, step) == ("decontaminate", "task.jsonl")
    other = f"short {' '.join(words[9:21])} and so on"
    assert run(other, step) == other
    assert run(other, step | {"ngram_words": 12}) == ("decontaminate", "task.jsonl")


@pytest.mark.parametrize("kind", ["samples", "gz", "parquet", "task"])
def test_evaluations_are_read_in_the_forms_of_the_harness(kind: str, tmp_path: Path) -> None:
    said = " ".join(f"the model said {n}" for n in range(9))
    doc, others = {"question": {"stem": PROSE}}, {"arguments": {"gen_args_0": {"arg_0": said}}, "resps": [[said]]}
    name = {"samples": "samples_a.jsonl", "gz": "a.jsonl.gz", "parquet": "a.parquet", "task": "task.yaml"}[kind]
    if kind == "samples":
        (tmp_path / name).write_text(json.dumps({"doc_id": 0, "doc": doc, "target": "B", **others}))
    elif kind == "gz":
        (tmp_path / name).write_bytes(gzip.compress(json.dumps(doc).encode()))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([doc, {"question": None}]), tmp_path / name)
    else:
        (tmp_path / "data.jsonl").write_text(json.dumps(doc))
        (tmp_path / name).write_text(
            "task: mine\ndataset_path: json\nprocess_docs: !function utils.f\n"
            f"dataset_kwargs:\n  data_files: {{test: ['{tmp_path / 'data.jsonl'}']}}\n"
        )
    step = {"type": "decontaminate", "paths": [str(tmp_path / name)]}
    assert run(f"so {PROSE}", step) == ("decontaminate", name)
    assert run(said, step) == said


def test_a_task_on_the_hub_has_no_local_files(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("task: arc\ndataset_path: allenai/ai2_arc\n")
    with refused(tmp_path / "task.yaml", rule=("allenai/ai2_arc", "dataset_kwargs.data_files")):
        contamination.decontaminate([str(tmp_path / "task.yaml")], 13)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with refused(tmp_path / "a.parquet"):
        contamination.decontaminate([str(tmp_path / "a.parquet")], 13)


def test_evaluations_by_the_names_of_tasks_groups_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of a task are local files or in the cache of the Hub, of one configuration and the splits that are
    evaluated; what is not there is one message, before any source is read."""
    tasks = tmp_path / "lm_eval" / "tasks"
    tasks.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").touch()
    (tmp_path / "local.jsonl").write_text(json.dumps({"question": PROSE}))
    (tasks / "base").write_text("dataset_path: org/exams\ntest_split: test\nprocess_docs: !function utils.f\n")
    (tasks / "history.yaml").write_text('"include": base\n"task": "history"\ndataset_name: old\ntag: exams_all\n')
    (tasks / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: '{tmp_path / 'local.jsonl'}'}}\n"
    )
    (tasks / "group.yaml").write_text("group: both\ntask:\n  - mine\n  - task: history\n")
    (tasks / "away.yaml").write_text("task: away\ndataset_path: org/away\n")
    spec = importlib.machinery.PathFinder.find_spec("lm_eval", [str(tmp_path)])
    monkeypatch.setattr("llmrecipes.data.steps.eval_files.find_spec", lambda name: spec)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "datasets--org--exams"
    for part, text in (
        ("old/test-0.parquet", "old test"),
        ("old/train-0.parquet", "train"),
        ("new/test-0.parquet", "n"),
    ):
        file = cached / "snapshots" / "abc" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"question": [" ".join(f"{text} {k}" for k in range(20))]}), file)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")

    def first(*names: str) -> list[str | tuple[str, str]]:
        texts = (PROSE, *(" ".join(f"{text} {k}" for k in range(20)) for text in ("old test", "train", "n")))
        outcomes = [run(text, {"type": "decontaminate", "tasks": list(names)}) for text in texts]
        return [each[1] if isinstance(each, tuple) else "" for each in outcomes]

    assert first("history") == ["", "history", "", ""]
    assert first("exams_all") == ["", "exams_all", "", ""]
    assert first("mine", "both") == ["mine", "both", "", ""]
    nowhere = make_source(type="text", path=str(tmp_path / "nowhere"))
    for name, said in (("away", "org/away"), ("histori", "histori")):
        with refused("data.steps[].tasks") as caught:
            prepare(with_steps(nowhere, {"type": "decontaminate", "tasks": [name]}), tmp_path / "data")
        assert has_token(str(caught.value), said)
    files_of_tasks.cache_clear()
    monkeypatch.setattr("llmrecipes.data.steps.eval_files.find_spec", lambda name: None)
    with refused("data.steps[].tasks", rule="lm_eval"):
        prepare(with_steps(nowhere, {"type": "decontaminate", "tasks": ["mine"]}), tmp_path / "data")


def test_evaluation_files_are_read_before_anything_else(tmp_path: Path) -> None:
    nowhere = make_source(type="text", path=str(tmp_path / "nowhere"))
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    for name, where in (("missing.txt", "data.steps[].paths"), ("bad.jsonl", f"{tmp_path / 'bad.jsonl'}:2")):
        with refused(where):
            prepare(with_steps(nowhere, {"type": "decontaminate", "paths": [str(tmp_path / name)]}), tmp_path / "data")


def test_the_languages_are_those_of_the_model() -> None:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    assert sorted(LanguageIdentifier.from_model_file(MODEL_FILE).labels) == list(LANGUAGES)


def test_what_evaluations_were_found_is_in_the_manifest_the_report_and_mlflow(tmp_path: Path) -> None:
    from mlflow.utils.validation import _validate_metric_name

    from llmrecipes.report.machine_sections import contamination
    from llmrecipes.tracking.events import DECONTAMINATED, METRIC_NOTES
    from llmrecipes.train.summary import decontaminated_metrics

    rows = [f"{PROSE} Entry {'abcdefghij'[n % 10] * (n // 10 + 1)}." for n in range(60)]
    (tmp_path / "other.txt").write_text(" ".join(f"other{n}" for n in range(30)))
    leak = [f"{n} {' '.join(f'other{k}' for k in range(15))}" for n in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, *leak]))
    source = make_source(type="jsonl", path=str(file))
    step = {"type": "decontaminate", "paths": [str(tmp_path / "*.txt")], "ngram_words": 13}
    prepared = prepare(with_steps(source, step), tmp_path / "data", workers=1)
    made = prepared.manifest
    assert made.decontaminated == {"other.txt": 3}
    (leaking,) = of_data(json.loads((prepared.path / "manifest.json").read_text("utf-8")))
    assert (leaking.rule, leaking.evidence) == ("leaking_data", {"documents": 3, "file": "other.txt"})
    assert decontaminated_metrics({"task (1).txt": 2, "other.txt": 3}) == {
        "decontaminated/documents": 5.0, "decontaminated/task _1_.txt": 2.0, "decontaminated/other.txt": 3.0,
    }  # fmt: skip
    for name in decontaminated_metrics({"a(b)?ä.jsonl": 1}):
        _validate_metric_name(name)
    assert DECONTAMINATED in METRIC_NOTES
    assert "other.txt" in contamination(made)
    plain = prepare(with_steps(source), tmp_path / "data", workers=1).manifest
    assert plain.decontaminated is None and "decontaminate" in contamination(plain)


def test_documents_of_which_spans_are_cut_out_are_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process and by two; near-duplicates are those of what is left, which has its own hash and split."""
    shared = "The same notice is here. It has three sentences. Nobody reads it any more."
    letters = str.maketrans("0123456789", "abcdefghij")  # digits are all the same to the step
    own = [" ".join(str(1000 + n * 40 + k).translate(letters) for k in range(40)) + "." for n in range(30)]
    rows = [f"{text} {shared}" for text in own] + [own[3] + " Added words are few.", f"{shared} Too short."]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    used = with_steps(
        make_source(type="jsonl", path=str(tmp_path / "rows.jsonl")),
        {"type": "duplicates", "span_sentences": 3, "cut_spans": True, "min_words": 20},
        {"type": "near_duplicates", "threshold": 0.7},
    )
    one = prepare(used, tmp_path / "one", workers=1)
    [record] = one.manifest.sources
    assert (record.duplicates, record.steps["near_duplicates"], record.changed["duplicates"]) == (1, 1, 29)
    assert record.rules == {"duplicates.cut_sentences": 3 * 29, "duplicates.too_short": 1}
    hashes = b"".join(path.read_bytes() for path in one.path.glob("*.sha256"))
    kept = {hashes[start : start + 32] for start in range(0, len(hashes), 32)}
    assert kept == {digest(text.encode()) for text in (f"{own[0]} {shared}", *(f"{text} " for text in own[1:]))}
    tokenizer = Tokenizer.from_file(str(one.path / "tokenizer.json"))
    ids = np.fromfile(one.path / "00-train.bin", one.manifest.dtype)
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=True).count("notice") <= 1
    samples = [json.loads(line) for line in (one.path / SAMPLES).read_text().splitlines()]
    assert shared in [row["text"] for row in samples if row["rule"] == "cut_sentences"]
    two = prepare(used, tmp_path / "two", workers=2)
    assert two.manifest.files == one.manifest.files and two.manifest.sources == one.manifest.sources


@pytest.mark.parametrize("replacement", ["blank", "unigram"])
def test_noise_replaces_words_of_training_documents_only(replacement: str, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        words = "".join(f"w{number}x{n}\n" if n % 7 == 0 else f"w{number}x{n} " for n in range(50))
        (folder / f"{number:02d}.txt").write_text(words)
    source = make_source(type="text", path=str(folder))
    clean = recipe(source, split=(80.0, 10.0, 10.0))
    steps = (made_step({"type": "noise", "noise_rate": 0.2, "replacement": replacement}),)
    noisy = clean.model_copy(update={"data": clean.data.model_copy(update={"steps": steps})})
    before, after = prepare(clean, tmp_path / "data", workers=1), prepare(noisy, tmp_path / "data", workers=1)
    assert after.manifest.held_out == before.manifest.held_out
    for split in SPLITS:
        name = f"00-{split}.sha256"
        assert (after.path / name).read_bytes() == (before.path / name).read_bytes()
    assert after.manifest.sources[0].changed == {"noise": after.manifest.sources[0].splits["train"].documents}
    originals = {each.split()[0].partition("x")[0]: each for each in (f.read_text() for f in folder.iterdir())}
    tokenizer, replaced, total = after.tokenizer(), 0, 0
    for ids in documents(after, "train"):
        text = tokenizer.decode(ids)
        [name] = {word.partition("x")[0] for word in text.split() if word != "_"}
        original = originals[name]
        assert [c for c in text if c.isspace()] == [c for c in original if c.isspace()]
        pairs = list(zip(text.split(), original.split(), strict=True))
        other = [word for word, was in pairs if word != was]
        assert all(word == "_" if replacement == "blank" else word in original.split() for word in other)
        replaced, total = replaced + len(other), total + len(pairs)
    assert 0.15 < replaced / total < 0.25
