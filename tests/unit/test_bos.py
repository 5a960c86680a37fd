"""BOS is one decision: of preparing, prompts, evaluation and everything exported, by default that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data.folder.data_manifest import NAME
from llmrecipes.data.folder.prepared import Prepared, fingerprint, open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.tokens.tokenizer import EOD, added_ids, open_huggingface
from llmrecipes.data.tokens.tokenizer import train as train_tokenizer
from llmrecipes.hf.tokenizer_files import write_tokenizer
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.helpers import tiny_on
from tests.refusals import refused

TEXTS = [f"the cat number {number} sat on the mat" for number in range(40)]
VOCABULARY = 320


def saved(folder: Path, **keys: Any) -> str:
    backend, _ = train_tokenizer(TEXTS, VOCABULARY - 8)
    assert isinstance(backend, tokenizers.Tokenizer)
    keys = {"eos_token": EOD, **keys}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **keys).save_pretrained(folder)
    return str(folder)


BOS = {"bos_token": "<s>", "add_bos_token": True}
KINDS: dict[str, tuple[dict[str, Any], bool | None, bool]] = {
    "added": (BOS, None, True),
    "added, switched off": (BOS, False, False),
    "not added": ({"bos_token": "<s>"}, None, False),
    "not added, switched on": ({"bos_token": "<s>"}, True, True),
    "no bos": ({}, None, False),
    "bos is eos": ({"bos_token": EOD, "add_bos_token": True}, None, False),
    "eos added behind": ({**BOS, "add_eos_token": True}, None, True),
}
"""Keys of the tokenizer, `add_bos_token` of the recipe, and whether documents begin with BOS."""


def recipe_of(rows: Path, path: str, add: bool | None, **data: Any) -> Recipe:
    tokenizer = {"type": "huggingface", "path": path, "add_bos_token": add}
    sources = [{"type": "jsonl", "path": str(rows)}]
    return tiny_on(rows, model={"vocab_size": VOCABULARY}, data={"sources": sources, "tokenizer": tokenizer, **data})


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def documents(prepared: Prepared) -> list[list[int]]:
    stems = sorted(path.with_suffix("") for path in prepared.path.glob("*train*.bin"))
    return [np.asarray(row).tolist() for stem in stems for row in IndexedDataset(str(stem))]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_prompts_and_the_exported_tokenizer_begin_alike(kind: str, texts: Path, tmp_path: Path) -> None:
    keys, add, begins = KINDS[kind]
    recipe = recipe_of(texts, saved(tmp_path / "tokenizer", **keys), add)
    said = list[str]()
    prepared = prepare(recipe, tmp_path / "data", workers=1, progress=said.append)
    tokenizer = prepared.tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    prefix = [theirs.bos_token_id] if begins else []
    assert any("add_bos_token" in line for line in said) is begins
    rows = documents(prepared)
    assert rows
    for row in rows:
        text = theirs.decode(row[len(prefix) : -1])
        assert text in TEXTS
        assert row == [*prefix, *theirs.encode(text, add_special_tokens=False), theirs.eos_token_id]
    assert tokenizer.prompt("the cat") == [*prefix, *tokenizer.encode("the cat")]
    assert tokenizer.start == (prefix or [tokenizer.eod])

    folder = tmp_path / "exported"
    folder.mkdir()
    write_tokenizer(folder, recipe, prepared)
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert added_ids(exported.backend_tokenizer)[0] == tuple(prefix)
    if begins:
        assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is True
        assert exported.encode("the cat")[:1] == prefix
    # Read as a folder, it is evaluated as it was trained.
    section = recipe.data.tokenizer.model_copy(update={"path": str(folder), "add_bos_token": None})
    assert list(open_huggingface(section, VOCABULARY).prefix) == prefix
    import gguf

    (folder / "config.json").write_text("{}")
    marks = gguf.SpecialVocab(folder, n_vocab=VOCABULARY)
    assert marks.add_special_token.get("bos", False) is begins


@pytest.mark.parametrize("keys", [{}, {"bos_token": EOD}])
def test_bos_that_a_tokenizer_lacks_is_refused(keys: dict[str, Any], texts: Path, tmp_path: Path) -> None:
    recipe = recipe_of(texts, saved(tmp_path / "tokenizer", **keys), True)
    with refused("data.tokenizer.add_bos_token"):
        prepare(recipe, tmp_path / "data", workers=1)


def test_bos_of_a_tokenizer_that_is_trained_is_refused() -> None:
    with refused("data.tokenizer.add_bos_token"):
        load("gpt-tiny", ["data.tokenizer.add_bos_token=true"])


def test_data_of_earlier_versions_is_loaded_and_says_that_it_has_no_bos(texts: Path, tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer", **BOS)
    recipe = recipe_of(texts, path, None)
    assert fingerprint(recipe) != fingerprint(recipe_of(texts, path, False))
    without = prepare(recipe_of(texts, path, False), tmp_path / "other", workers=1)
    folder = tmp_path / "data" / fingerprint(recipe)
    folder.parent.mkdir()
    without.path.rename(folder)
    manifest = json.loads((folder / NAME).read_text())
    del manifest["tokenizer"]["prefix"], manifest["data"]["tokenizer"]["add_bos_token"]
    manifest["fingerprint"] = folder.name
    (folder / NAME).write_text(json.dumps(manifest))
    said = list[str]()
    prepared = prepare(recipe, tmp_path / "data", progress=said.append)
    assert any("BOS" in line and str(folder) in line for line in said)
    assert prepared.tokenizer().prefix == () and prepared.tokenizer().prompt("a") == prepared.tokenizer().encode("a")
    target = tmp_path / "exported"
    target.mkdir()
    write_tokenizer(target, recipe, open_prepared(recipe, tmp_path / "data"))
    assert added_ids(transformers.AutoTokenizer.from_pretrained(target).backend_tokenizer)[0] == ()


@pytest.mark.parametrize("add", [None, False])
def test_pairs_of_texts_begin_as_documents(add: bool | None, tmp_path: Path) -> None:
    rows = [{"prompt": text, "chosen": " yes", "rejected": " no"} for text in TEXTS]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = saved(tmp_path / "tokenizer", **BOS)
    template = tmp_path / "a.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}")
    recipe = recipe_of(file, path, add, chat={"preference": {}, "chat_template": str(template)})
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for row in documents(prepare(recipe, tmp_path / "data", workers=1)):
        assert row.count(theirs.bos_token_id) == (0 if add is False else 2)
        assert (row[0] == theirs.bos_token_id) is (add is None)
