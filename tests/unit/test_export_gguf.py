"""`llmrecipes export --to gguf`: what llama.cpp reads of a file is what transformers reads of the model.

Its authors' package reads and writes the files here; llama.cpp itself does with `make test-llama-cpp`.
"""

from __future__ import annotations

import json
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmrecipes.data.tokens.encode import LLAMA3
from llmrecipes.models import gguf_file, gguf_vocabulary
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.models.gguf_file import export_gguf
from llmrecipes.models.importing import import_model
from tests.hf_models import CONFIGS, LENGTH, VOCABULARY, saved
from tests.refusals import refused

BASE = 500000.0
POSITIONS: dict[str, dict[str, Any]] = {
    "unscaled": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-attention": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3,
    },
}  # fmt: skip
"""By how they are scaled; each with another base than the usual one."""
IDS = [5, 17, 290, 41, 3, 250, 128, 77, 9, 200, 31, 66, 140, 12, 99, 287, 54, 8, 211, 19, 73, 160, 44, 2]
SCALED = [positions for positions in POSITIONS if positions != "unscaled"]
CASES = [(kind, "unscaled") for kind in gguf_file.FAMILIES] + [("llama", positions) for positions in SCALED]


def config_of(kind: str, positions: str) -> Any:
    config = CONFIGS[kind]()
    config.rope_parameters = {"rope_type": "default", **POSITIONS[positions], "rope_theta": BASE}
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if positions == "llama3":
        config.max_position_embeddings = 16384
    return config


def written(kind: str, positions: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """The file of a model that transformers saved in a folder, and that was imported."""
    out = folder / "gguf"
    overrides = ["train.precision=fp32", *([] if tokenizer else ["data.tokenizer.type=bpe"])]
    run = import_model(str(folder / "model"), overrides, folder / "runs", "a", name="m")
    options = ExportOptions(dtype="fp32", tokenizer=tokenizer, family=kind)
    export_gguf(run.run_dir, out, folder / "runs", folder / "data", options)
    return out / gguf_file.FILE


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize(("kind", "positions"), [*CASES, ("qwen3", "llama3"), ("mixtral", "yarn")])
def test_positions_are_those_of_the_model(kind: str, positions: str, tmp_path: Path) -> None:
    config = config_of(kind, positions)
    theirs = saved(config, tmp_path / "model")
    if positions == "llama3" and kind == "qwen3":
        with refused("--to gguf", rule="llama3"):
            written(kind, positions, tmp_path)
        return
    file = written(kind, positions, tmp_path)
    found = fields(file)
    of = found["general.architecture"]
    assert found[f"{of}.rope.freq_base"] == BASE
    expected = POSITIONS[positions]
    scaling = {key: value for key, value in found.items() if ".rope.scaling." in key}
    divisors = [tensor.data for tensor in gguf.GGUFReader(file).tensors if tensor.name == gguf_file.DIVISORS]
    if positions == "unscaled":
        assert not scaling and not divisors
        if kind != "mixtral":  # transformers has no reader for it
            # Nor does it read the width of a head of Qwen3, or of experts.
            given = {"config": config} if kind.startswith("qwen3") else {}
            again = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, **given
            ).eval()
            with torch.no_grad():
                difference = again(torch.tensor([IDS])).logits - theirs(torch.tensor([IDS])).logits
            assert float(difference.abs().max()) < 1e-4
        return
    if positions == "llama3":
        channels = found[f"{of}.rope.dimension_count"]
        frequencies = 1 / BASE ** (np.arange(0, channels, 2) / channels)
        scaled, attention = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        assert attention == 1 and not scaling
        np.testing.assert_allclose(frequencies / divisors[0], scaled.numpy(), rtol=1e-6)
        return
    assert not divisors and scaling[f"{of}.rope.scaling.type"] == expected["rope_type"]
    assert scaling[f"{of}.rope.scaling.factor"] == expected["factor"]
    if positions == "linear":
        return
    assert scaling[f"{of}.rope.scaling.original_context_length"] == 16
    _, attention = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert scaling[f"{of}.rope.scaling.attn_factor"] * (1 + 0.1 * np.log(4)) == pytest.approx(attention)


@pytest.mark.parametrize("key", [{"truncate": False}, {"beta_fast": 2.0, "beta_slow": 0.2}])
def test_a_scaling_that_llama_cpp_lacks_is_refused(key: dict[str, Any], tmp_path: Path) -> None:
    config = config_of("llama", "yarn")
    config.rope_parameters |= key
    saved(config, tmp_path / "model")
    with refused("--to gguf"):
        written("llama", "yarn", tmp_path)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
TOKENIZERS = {"gpt-2": None, "llama-bpe": LLAMA3, "qwen2": next(iter(gguf_vocabulary.PATTERNS))}
"""Patterns by llama.cpp's names; None is built into the library."""


def save_tokenizer(name: str, folder: Path, *, bos: bool, template: Any = TEMPLATE) -> Any:
    """A byte-level BPE with special tokens, one more that is not special, and a gap before it."""
    splitter: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if (pattern := TOKENIZERS[name]) is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        splitter = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = splitter, decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["word 12 döcument it's " * 9], trainer)
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    result = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",  # noqa: S106 - no password
        eos_token="</s>",  # noqa: S106 - no password
        pad_token="<pad>",  # noqa: S106 - no password
    )
    result.chat_template = template
    result.save_pretrained(folder)
    return result


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_vocabulary_is_that_of_the_tokenizer(name: str, bos: bool, tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    tokenizer = save_tokenizer(name, tmp_path / "model", bos=bos)
    found = fields(written("llama", "unscaled", tmp_path, tokenizer=True))
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items() if "tokenizer.ggml." in key}
    assert (ggml["model"], ggml["pre"]) == ("gpt2", name)
    numbers = {kind: ggml[f"{kind}_token_id"] for kind in ("bos", "eos", "padding")}
    assert numbers == {"bos": 0, "eos": 1, "padding": 2}
    assert ggml["add_bos_token"] is bos and not ggml.get("add_eos_token", False)
    kinds = dict(zip(ggml["tokens"], ggml["token_type"], strict=True))
    assert len(kinds) == len(ggml["tokens"]) == VOCABULARY
    assert all(kinds[token] == gguf.TokenType.CONTROL for token in SPECIAL)
    assert kinds["<think>"] == gguf.TokenType.USER_DEFINED and ggml["tokens"].index("<think>") == len(tokenizer) - 1
    unused = [token for token, kind in kinds.items() if kind == gguf.TokenType.UNUSED]
    assert unused == [f"[PAD{number}]" for number in range(len(tokenizer), VOCABULARY)]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert ggml["merges"] == [" ".join(merge) for merge in merges]
    assert "generation %" not in found["tokenizer.chat_template"]
    talk = [{"role": "user", "content": "word"}, {"role": "assistant", "content": "12"}]
    expected = tokenizer.apply_chat_template(talk, tokenize=False)
    tokenizer.chat_template = found["tokenizer.chat_template"]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == expected


def test_templates_by_name_and_how_to_sample_are_written(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    sampling = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "min_p": None}
    generation = {"do_sample": True, **sampling, "eos_token_id": [1, SPECIAL.index("<|im_end|>")]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    templates = {"default": TEMPLATE, "tool_use": "tools" + TEMPLATE}
    save_tokenizer("llama-bpe", tmp_path / "model", bos=False, template=templates)
    found = fields(written("llama", "unscaled", tmp_path, tokenizer=True))
    of_all = [found["tokenizer.chat_template"], found["tokenizer.chat_template.tool_use"]]
    assert found["tokenizer.chat_templates"] == ["tool_use"] and of_all[1] == "tools" + of_all[0]
    assert all("generation %" not in template for template in of_all)
    kept = {key.removeprefix("general.sampling."): value for key, value in found.items() if ".sampling." in key}
    assert kept == {"temp": 0.5, "top_k": 20, "top_p": 0.75, "penalty_repeat": 1.25}
    ends = [found[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot", "eom")]
    assert ends == [1, 1, SPECIAL.index("<|im_end|>")]


@pytest.mark.llama_cpp
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is missing: make test-llama-cpp LLAMA_CPP=DIR")
@pytest.mark.parametrize(
    ("kind", "positions"), [*CASES, *(("mixtral", scaled) for scaled in SCALED), ("qwen3", "yarn")]
)
def test_llama_cpp_computes_and_tokenizes_the_same(kind: str, positions: str, tmp_path: Path) -> None:
    import xllamacpp

    theirs = saved(config_of(kind, positions), tmp_path / "model")
    save_tokenizer("llama-bpe", tmp_path / "model", bos=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")  # Qwen's classes have their own pattern
    file = written(kind, positions, tmp_path, tokenizer=True)
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(file), LENGTH, 1, False
    options.cpuparams.n_threads, options.verbosity = 1, -1
    server = xllamacpp.Server(options)

    def answer(path: str, given: dict[str, Any]) -> Any:
        connection = HTTPConnection(server.listening_address.removeprefix("http://"), timeout=60)
        connection.request("POST", path, json.dumps(given), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    text = "word 12 döcument<think> it's\n\n<|im_end|>"
    wanted = {"content": text, "add_special": True, "parse_special": True}
    assert answer("/tokenize", wanted)["tokens"] == tokenizer(text).input_ids
    talk = [{"role": "user", "content": "word"}]
    prompt = answer("/apply-template", {"messages": talk})["prompt"]
    assert prompt.removeprefix("<s>") == tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    ).removeprefix("<s>")
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    made = answer("/completion", {"prompt": IDS, "n_predict": 1, "temperature": 0.0, "n_probs": 50})
    found = made["completion_probabilities"][0]["top_logprobs"]
    assert len(found) == 50
    for token in found:
        assert abs(token["logprob"] - float(expected[token["id"]])) < 5e-3, token
