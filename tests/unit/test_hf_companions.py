"""What is written beside the weights: read by transformers, it says of a text's ends, of sampling and of the tokenizer
what the model said that a run started from, whichever key of its files is set, missing or odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from llmrecipes.hf import tokenizer_files
from llmrecipes.hf.generation_config import FILE, IDS, keep
from llmrecipes.hf.tokenizer_files import CONFIG, write_companions
from tests.helpers import tiny
from tests.hf_models import CONFIGS
from tests.unit.test_data_huggingface import BOS, TEXTS, bpe, folder_of

VOCABULARY = 400
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKEN = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "set": {
        "chat_template": TEMPLATE, "model_max_length": 4096, "padding_side": "left", "truncation_side": "left",
        "clean_up_tokenization_spaces": False, "extra_special_tokens": ["<a>", "<b>"], "add_bos_token": True,
        "model_input_names": ["input_ids"], "unk_token": "a",
    },
    "missing": dict.fromkeys(("bos_token", "pad_token", "tokenizer_class", "add_bos_token")),
    "odd": {
        "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "rag" + TEMPLATE}],
        "model_max_length": 1e30, "tokenizer_class": "NoSuchTokenizer", "extra_special_tokens": {"image_token": "<i>"},
        "bos_token": {**TOKEN, "content": BOS, "special": True},
        "added_tokens_decoder": {"399": {**TOKEN, "content": "<think>", "special": False}},
    },
    "of earlier versions": {
        "additional_special_tokens": ["<a>", {**TOKEN, "content": "<b>", "special": True}], "add_eos_token": True,
        "max_length": 4, "stride": 0, "name_or_path": "x", "special_tokens_map_file": None,
    },
}  # fmt: skip
SAME = (
    "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "model_input_names",
    "chat_template", "special_tokens_map", "all_special_ids", "added_tokens_decoder", "extra_special_tokens",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "require_bounded", lambda section: None)


def written(model: Path, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Companions of a run that has started from a model; what they add to config.json."""
    run_dir, out = folder / "run", folder / "out"
    run_dir.mkdir()
    out.mkdir()
    keep(model, config, run_dir)
    tokenizer = {"type": "huggingface", "path": str(model)}
    recipe = tiny(model={"vocab_size": VOCABULARY}, data={"sources": [{"type": "docstrings"}], "tokenizer": tokenizer})
    return write_companions(out, recipe, None, run_dir, tokenizer=True)


@pytest.mark.parametrize("keys", TOKENIZERS)
def test_a_tokenizer_is_read_as_it_was(keys: str, tmp_path: Path) -> None:
    model = folder_of(bpe(), tmp_path / "model", TOKENIZERS[keys])
    if keys == "missing":  # a template in a file of its own
        (model / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    written(model, tmp_path, {})
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for name in SAME:
        assert getattr(ours, name) == getattr(theirs, name), name
    for text in [*TEXTS, "<a> <think> <i>"]:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids and ours.decode(ids) == theirs.decode(ids)
    # transformers 4 refuses the name of 5's class, and a list under this key.
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert hasattr(transformers, config["tokenizer_class"]) and config["tokenizer_class"] != "TokenizersBackend"
    assert not isinstance(config.get("extra_special_tokens"), list)


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
GENERATION: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "as instruction-tuned models": ({"eos_token_id": [7, 1, 9], "pad_token_id": 7, **SAMPLED}, {"eos_token_id": 7}),
    "ids in config.json only": ({"temperature": 0.3, "do_sample": True}, {"eos_token_id": [1, 8], "bos_token_id": 5}),
    "null": ({"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}, {"eos_token_id": 1}),
    "from config.json": ({"_from_model_config": True, "eos_token_id": 1}, {"eos_token_id": 1}),
    "keys of later versions": ({"eos_token_id": 1, "use_something": {"a": [1]}, "transformers_version": "9.0"}, {}),
    "no file": (None, {"eos_token_id": [1, 9], "pad_token_id": 6, **SAMPLED}),
    "no file and no keys": (None, {}),
}
"""generation_config.json and config.json, of a model whose tokenizer ends texts with 1."""


@pytest.mark.parametrize("kind", GENERATION)
@pytest.mark.parametrize("bos", [BOS, None])
def test_a_model_generates_as_before(kind: str, bos: str | None, tmp_path: Path) -> None:
    file, config = GENERATION[kind]
    model = folder_of(bpe(), tmp_path / "model", {"bos_token": bos, "pad_token": None})
    config = {**CONFIGS["llama"]().to_dict(), **dict.fromkeys(IDS), **config}
    (model / "config.json").write_text(json.dumps(config))
    if file is None:
        theirs = transformers.GenerationConfig.from_model_config(dict(config))
    else:
        (model / FILE).write_text(json.dumps(file))
        theirs = transformers.GenerationConfig.from_pretrained(model)
    special = written(model, tmp_path, config)
    ours = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    apart = {*IDS, "transformers_version", "_from_model_config"}
    assert {k: v for k, v in ours.to_dict().items() if k not in apart} == {
        k: v for k, v in theirs.to_dict().items() if k not in apart
    }
    said = config["eos_token_id"] if file is not None and "eos_token_id" not in file else theirs.eos_token_id
    assert set(as_list(ours.eos_token_id)) == {1, *as_list(said)} - {None} and as_list(ours.eos_token_id)[0] == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for name in ("bos_token_id", "pad_token_id"):
        said = getattr(tokenizer, name)
        kept = getattr(theirs, name) if getattr(theirs, name) is not None else config[name]
        assert getattr(ours, name) == (kept if said is None else said), name
    assert special == {name: getattr(ours, name) for name in IDS}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_ids_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    model = folder_of(bpe(), tmp_path / "model", {"pad_token": None})
    (model / FILE).write_text(json.dumps({"eos_token_id": [-1, "2", None, True, VOCABULARY, 3], "pad_token_id": -1}))
    assert written(model, tmp_path, {}) == {"bos_token_id": 0, "eos_token_id": [1, 3], "pad_token_id": None}
