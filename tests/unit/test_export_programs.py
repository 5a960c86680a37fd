"""`llmrecipes export --to onnx|torch-export|gguf`: programs that others run, with the text of transformers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from llmrecipes.cli.app import run
from llmrecipes.models import exported_programs, gguf_file
from tests.helpers import LLAMA, tiny_on, write_recipe
from tests.refusals import refused, require_message
from tests.unit.test_serve import started

NEW, PROMPT = 12, "word 1"
WIDE = {**LLAMA, "ffn_hidden_size": 192}
"""Rows of every matrix are whole blocks of q8_0."""
EXPERTS = {**WIDE, "num_moe_experts": 4, "moe_router_topk": 2}
BROAD = {"hidden_size": 256, "ffn_hidden_size": 512}
"""Rows of every matrix are whole blocks of 256."""
FORMS = {
    "llama": WIDE, "mixtral": EXPERTS, "qwen3-moe": {**EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 96},
}  # fmt: skip
TRAIN = {"train_iters": 2, "eval_interval": 2, "eval_iters": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(folder: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str]:
        code = run([*arguments, "--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out if code == 0 else captured.err

    return call


@pytest.fixture
def llama(folder: Path, corpus: Path, command: Command) -> str:
    """A trained run, and its folder for transformers as `hf`."""
    trained("llama", folder / "hf", corpus, command)
    return "llama"


def trained(form: str, out: Path, corpus: Path, command: Command) -> None:
    """A trained run named after a form, and its folder for transformers, unless they are there."""
    if not out.exists():
        recipe = tiny_on(corpus, form, model={**FORMS[form], "init_method_std": 0.2}, train=TRAIN)
        assert command("train", write_recipe(recipe, out.parent), "--run-id", "one")[0] == 0
        assert command("export", form, "--out", str(out))[0] == 0


def reference(folder: Path) -> tuple[list[int], list[int], torch.Tensor]:
    """The prompt's ids, those that transformers continues it with, and the logits of the prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return prompt[0].tolist(), text[0, prompt.size(1) :].tolist(), model(prompt).logits[0]


def greedy(logits: Callable[[Sequence[int]], Any], prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(np.argmax(logits(ids)[-1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("form", exported_programs.FILES)
@pytest.mark.rotating
def test_a_program_continues_as_transformers_does(form: str, llama: str, folder: Path, command: Command) -> None:
    out = folder / form
    code, printed = command("export", llama, "--to", form, "--out", str(out), "--json")
    assert code == 0
    report = json.loads(printed)
    assert (
        report["largest_difference"] < 1e-4 and report["bytes"] == (out / exported_programs.FILES[form]).stat().st_size
    )
    assert {path.name for path in out.iterdir()} >= {"config.json", "tokenizer.json", "README.md"}
    assert not list(out.glob("**/*.safetensors")), "the weights are in the program"
    prompt, expected, logits = reference(folder / "hf")
    if form == "onnx":
        session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])

        def forward(ids: Sequence[int]) -> Any:
            return session.run(["logits"], {"input_ids": np.array([ids], dtype=np.int64)})[0][0]
    else:
        program = torch.export.load(out / "model.pt2").module()

        def forward(ids: Sequence[int]) -> Any:
            return program(torch.tensor([ids]))[0].detach().numpy()

    np.testing.assert_allclose(forward(prompt), logits, atol=1e-4)
    assert greedy(forward, prompt) == expected


@pytest.mark.rotating
def test_an_onnx_program_with_a_cache_writes_the_same_text(llama: str, folder: Path, command: Command) -> None:
    out = folder / "onnx-cache"
    code, printed = command("export", llama, "--to", "onnx", "--cache", "--out", str(out), "--json")
    assert code == 0 and json.loads(printed)["largest_difference"] < 1e-4
    prompt, expected, logits = reference(folder / "hf")
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    empty = {each.name: np.zeros((2, each.shape[1], 0, each.shape[3]), np.float32) for each in session.get_inputs()[1:]}
    presents = [each.name for each in session.get_outputs()[1:]]
    assert [*empty] == [name.replace("present", "past_key_values") for name in presents] and len(empty) == 4
    ids, past, text = np.array([prompt, prompt[::-1]]), empty, list[int]()
    for _ in range(NEW):  # two rows at once, which do not see each other
        made = session.run(None, {"input_ids": ids, **past})
        past = dict(zip(empty, made[1:], strict=True))
        ids = made[0][:, -1:].argmax(-1)
        text.append(int(ids[0, 0]))
    assert text == expected
    assert past["past_key_values.0.key"].shape[2] == len(prompt) + NEW - 1

    exported_programs._to_int8(out / "model.onnx", external=False)
    small = exported_programs.OnnxProgram(out / "model.onnx")
    found = small.run(torch.tensor([prompt]))[0][0]
    assert 0 < float((found - logits).abs().mean()) < 0.1 * float(logits.abs().mean())


BOUNDS = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.1, "q8_0": 0.1, "q5_1": 0.3, "q4_0": 0.5}


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
def test_a_gguf_file_is_the_model(dtype: str, bound: float, llama: str, folder: Path, command: Command) -> None:
    out = folder / dtype
    assert command("export", llama, "--to", "gguf", "--dtype", dtype, "--out", str(out))[0] == 0
    prompt, _, logits = reference(folder / "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        found = loaded(torch.tensor([prompt])).logits[0]
    assert float((found - logits).abs().mean()) < bound * float(logits.abs().mean())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "q8_0"])
def test_a_gguf_file_with_experts_is_the_model(dtype: str, folder: Path, corpus: Path, command: Command) -> None:
    out, hf = folder / f"qwen3-moe-{dtype}", folder / "hf-qwen3-moe"
    trained("qwen3-moe", hf, corpus, command)
    assert command("export", "qwen3-moe", "--to", "gguf", "--dtype", dtype, "--out", str(out))[0] == 0
    prompt, _, logits = reference(hf)
    # transformers does not read the width of experts from the file.
    config = transformers.AutoConfig.from_pretrained(hf)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, gguf_file="model.gguf", config=config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        found = loaded(torch.tensor([prompt])).logits[0]
    assert float((found - logits).abs().mean()) < BOUNDS[dtype] * float(logits.abs().mean())
    exact = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    gates = [name for name, _ in exact.named_parameters() if name.endswith(".mlp.gate.weight")]
    assert len(gates) == 2 and all(loaded.get_parameter(name).equal(exact.get_parameter(name)) for name in gates)


@pytest.mark.parametrize(("key", "value"), {"mlp_only_layers": [1], "norm_topk_prob": False}.items())
def test_a_router_that_llama_cpp_lacks_is_refused(key: str, value: Any) -> None:
    config = {"mlp_only_layers": [], "norm_topk_prob": True}
    gguf_file._require_form("qwen3_moe", config)
    with refused("--to gguf"):
        gguf_file._require_form("qwen3_moe", {**config, key: value})


@pytest.mark.llama_cpp
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is missing: make test-llama-cpp LLAMA_CPP=DIR")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bound"), {"fp32": 5e-3, "fp16": 0.02, "q8_0": 0.1, "q4_0": 0.3}.items())
def test_llama_cpp_continues_as_transformers_does(
    dtype: str, bound: float, form: str, folder: Path, corpus: Path, command: Command
) -> None:
    """llama.cpp itself; with few bits it rounds the inputs of matrices too, so that close tokens may change places."""
    import xllamacpp

    out, hf = folder / f"llama-cpp-{form}-{dtype}", folder / f"hf-{form}"
    trained(form, hf, corpus, command)
    assert command("export", form, "--to", "gguf", "--dtype", dtype, "--out", str(out))[0] == 0
    prompt, expected, logits = reference(hf)
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(out / "model.gguf"), 64, 1, False
    options.cpuparams.n_threads, options.verbosity = 1, -1
    server = xllamacpp.Server(options)  # it ends with its object

    def answer(path: str, given: dict[str, Any]) -> Any:
        connection = HTTPConnection(server.listening_address.removeprefix("http://"), timeout=60)
        connection.request("POST", path, json.dumps(given), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    assert answer("/tokenize", {"content": PROMPT})["tokens"] == prompt
    wanted = {"n_predict": NEW, "temperature": 0.0, "ignore_eos": True, "return_tokens": True, "n_probs": 20}
    made = answer("/completion", {"prompt": prompt, **wanted})
    if dtype == "fp32":
        assert made["tokens"] == expected
    # transformers has no reader for Mixtral in GGUF: it is compared with weights that are not rounded, or not at all.
    if form == "mixtral" and dtype == "q4_0":
        return
    if form != "mixtral":
        config = transformers.AutoConfig.from_pretrained(hf)
        read = transformers.AutoModelForCausalLM.from_pretrained(
            out, gguf_file="model.gguf", config=config, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            logits = read(torch.tensor([prompt])).logits[0]
    logprobs = logits[-1].log_softmax(-1)
    for token in made["completion_probabilities"][0]["top_logprobs"]:
        assert abs(token["logprob"] - float(logprobs[token["id"]])) < bound, token


@pytest.mark.llama_cpp
@pytest.mark.skipif(find_spec(gguf_file.LLAMA_CPP) is None, reason="llama-cpp-python is missing: make test-llama-cpp")
@pytest.mark.parametrize("form", ["llama", "mixtral"])
def test_llama_cpp_writes_its_own_types(form: str, folder: Path, corpus: Path, command: Command) -> None:
    import llama_cpp

    name, bytes_before = f"broad-{form}", 2**40
    recipe = tiny_on(corpus, name, model={**FORMS[form], **BROAD, "init_method_std": 0.04}, train=TRAIN)
    assert command("train", write_recipe(recipe, folder), "--run-id", "one")[0] == 0
    for dtype, bound in {"fp32": 1e-4, "q6_k": 0.1, "q5_k_m": 0.15, "q4_k_m": 0.25}.items():
        out = folder / f"{name}-{dtype}"
        code, printed = command("export", name, "--to", "gguf", "--dtype", dtype, "--out", str(out), "--json")
        assert code == 0 and {path.name for path in out.iterdir()} == {"model.gguf"}
        size = json.loads(printed)["bytes"]
        program = llama_cpp.Llama(str(out / "model.gguf"), n_ctx=64, verbose=False, n_threads=1, logits_all=True)
        prompt = program.tokenize(PROMPT.encode(), add_bos=False)
        program.eval(prompt)
        logits = program.scores[: len(prompt)].copy()
        program.reset()
        text = [token for token, _ in zip(program.generate(prompt, temp=0.0), range(NEW), strict=False)]
        program.close()
        if dtype == "fp32":
            exact, expected = logits, text
        assert size < bytes_before and text == expected, dtype
        assert np.abs(logits - exact).mean() < bound * np.abs(exact).mean(), dtype
        bytes_before = size
        if form == "llama":  # transformers has no reader for Mixtral
            read = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
            with torch.no_grad():
                same = read.eval()(torch.tensor([prompt])).logits[0].numpy()
            assert np.abs(logits - same).mean() < 0.03 * np.abs(same).mean(), dtype


LLAMA_SERVER = """
import signal, sys

sys.path.append({folder!r})
import xllamacpp

options, params = dict(zip(sys.argv, sys.argv[1:])), xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = options["--model"], [options["--host"]], int(options["--port"])
params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads, params.verbosity = 64, 1, False, 1, -1
server = xllamacpp.Server(params)
print("listening", flush=True)
signal.pause()
"""
"""llama.cpp's own server, which the package has as a library, with the options of its program."""


@pytest.mark.llama_cpp
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is missing: make test-llama-cpp LLAMA_CPP=DIR")
def test_serve_answers_with_llama_cpp(
    llama: str, folder: Path, command: Command, tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, program = folder / "served", tmp_path / "llama-server"
    assert command("export", llama, "--to", "gguf", "--dtype", "fp32", "--out", str(out))[0] == 0
    package = find_spec("xllamacpp")
    assert package is not None and package.origin is not None
    code = LLAMA_SERVER.format(folder=str(Path(package.origin).parents[1]))
    program.write_text(f"#!{sys.executable}\n{code}", "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    process, _ = started(out / "model.gguf", "listening", "--backend", "llama.cpp", "--port", str(unused_port))
    try:
        connection = HTTPConnection("127.0.0.1", unused_port, timeout=60)
        wanted = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(wanted), {"Content-Type": "application/json"})
        text = json.loads(connection.getresponse().read())["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, printed
    assert text == transformers.AutoTokenizer.from_pretrained(folder / "hf").decode(reference(folder / "hf")[1])


def test_what_a_form_lacks_is_refused(
    llama: str, folder: Path, corpus: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = tiny_on(corpus, "narrow", model={**LLAMA, "ffn_hidden_size": 176}, train=TRAIN)
    other = {**LLAMA, "gated_linear_unit": False, "qk_layernorm": True}
    gateless = tiny_on(corpus, "gateless", model=other, train=TRAIN)
    for recipe in (narrow, gateless):
        assert command("train", write_recipe(recipe, folder), "--run-id", "one")[0] == 0
    out = ("--out", str(folder / "refused"))
    code, printed = command("export", "narrow", "--to", "gguf", "--dtype", "q4_k_m", *out)
    assert code == 2
    if find_spec(gguf_file.LLAMA_CPP) is None:
        require_message(printed, "--dtype", rule="llama-cpp-python")
    monkeypatch.setattr(gguf_file, "find_spec", lambda _: True)  # rows are compared before it is imported
    cases: dict[tuple[str, ...], tuple[str, str]] = {
        ("narrow", "--to", "gguf", "--dtype", "q8_0"): ("--dtype", "176"),
        ("narrow", "--to", "gguf", "--dtype", "q4_k"): ("--dtype", "q4_k_m"),
        ("narrow", "--to", "gguf", "--dtype", "q4_k_m"): ("--dtype", "256"),
        ("narrow", "--to", "gguf", "--cache"): ("--cache", "--to"),
        ("gateless", "--to", "gguf"): ("--to", "--family"),
        ("narrow", "--to", "onnx", "--dtype", "bf16"): ("--dtype", "fp32"),
        ("narrow", "--dtype", "q8_0"): ("--dtype", "fp32"),
        ("narrow", "--to", "coreml"): ("--to", "torch-export"),
    }
    for arguments, (where, token) in cases.items():
        code, printed = command("export", *arguments, *out)
        assert code == 2, arguments
        require_message(printed, where, rule=token)
    monkeypatch.setattr(exported_programs, "find_spec", lambda _: None)
    code, printed = command("export", "narrow", "--to", "onnx", *out)
    assert code == 2
    require_message(printed, "--to", rule="llmrecipes[runtimes]")
    assert not list(folder.glob("*refused*")) and not list(folder.glob(".*.part"))


def test_an_operation_that_a_form_lacks_is_one_message(
    llama: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that torch cannot trace, in place of one of the model's."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float(hidden.sum())

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", forward)
    code, printed = command("export", llama, "--to", "onnx", "--out", str(folder / "untraced"))
    assert code == 2
    require_message(printed, "--to")
    assert not list(folder.glob("*untraced*"))
