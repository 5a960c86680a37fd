"""`llmrecipes serve --backend vllm` with vLLM itself, built for CPUs: text and log-probabilities of transformers."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from llmrecipes.cli.app import run
from tests.helpers import LLAMA, tiny_on, write_recipe
from tests.unit.test_serve import started

VLLM = Path(__file__).parents[2] / ".venv-vllm" / "bin"
NEW, PROMPT = 32, "word 1"
FORMS = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "qk_layernorm": True, "share_embeddings_and_output_weights": True},
    "qwen3-moe": {
        **LLAMA, "qk_layernorm": True, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96,
    },
}  # fmt: skip
TRAIN = {"train_iters": 2, "eval_interval": 2, "eval_iters": 1}
OPTIONS = ("--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not (VLLM / "vllm").is_file(), reason="vLLM is missing: make test-vllm"),
]


def completion(port: int, model: str) -> dict[str, Any]:
    wanted = {
        "model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    connection = HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("POST", "/v1/completions", json.dumps(wanted), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    assert "choices" in answer, answer
    return dict(answer["choices"][0])


@pytest.mark.parametrize(
    ("form", "end"), zip(FORMS, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), strict=True), ids=FORMS
)
def test_vllm_continues_as_transformers_does_and_leaves_no_process(
    form: str,
    end: signal.Signals,
    tmp_path: Path,
    corpus: Path,
    data_dir: Path,
    unused_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tiny_on(corpus, form, model={**FORMS[form], "hidden_size": 128, "init_method_std": 0.2}, train=TRAIN)
    where = ("--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir))
    assert run(["train", write_recipe(recipe, tmp_path), "--run-id", "one", *where]) == 0
    folder = tmp_path / "hf"
    assert run(["export", form, "--out", str(folder), *where]) == 0

    monkeypatch.setenv("PATH", str(VLLM), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    process, _ = started(folder, "startup complete", "--backend", "vllm", "--port", str(unused_port), *OPTIONS)
    helpers = psutil.Process(process.pid).children(recursive=True)
    try:
        answer = completion(unused_port, str(folder))
        process.send_signal(end)
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == (-end if end is signal.SIGKILL else 0), printed
        assert len(helpers) >= 3 and not psutil.wait_procs(helpers, timeout=60)[1]
    finally:
        process.kill()
        for helper in helpers:
            with suppress(psutil.NoSuchProcess):
                helper.kill()

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        log_probabilities = model(text).logits[0, prompt.size(1) - 1 : -1].log_softmax(-1)
    tokens = [int(token.removeprefix("token_id:")) for token in answer["logprobs"]["tokens"]]
    assert tokens == text[0, prompt.size(1) :].tolist()
    for expected, likeliest in zip(log_probabilities, answer["logprobs"]["top_logprobs"], strict=True):
        assert len(likeliest) == 5
        for token, found in likeliest.items():
            assert found == pytest.approx(float(expected[int(token.removeprefix("token_id:"))]), abs=1e-3)
