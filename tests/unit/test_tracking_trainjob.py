"""The status of a TrainJob, sent over TLS to a server that takes what Kubeflow Trainer takes."""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmrecipes.tracking import run_tracker, trainjob
from llmrecipes.tracking.events import EvalMetrics
from llmrecipes.tracking.trainjob import CERTIFICATE, TOKEN, URL, TrainerServer, TrainJobSink
from tests.helpers import tiny
from tests.kubernetes_schemas import definition
from tests.unit.test_tracking_jsonl import step

SECONDS = 20.0


class Trainer:
    """Trainer's server: the messages it has taken, with the token of each."""

    def __init__(self, folder: Path, answer: int = 200) -> None:
        self.certificate, key = certified(folder)
        self.token = folder / "token"
        self.token.write_text("first\n")
        self.taken: Queue[tuple[str, dict[str, Any]]] = Queue()
        taken = self.taken

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taken.put((self.headers["Authorization"], json.loads(body)))
                self.send_response(answer)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}/namespaces/n/trainjobs/t/status"

    def variables(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in ((URL, self.url), (CERTIFICATE, self.certificate), (TOKEN, self.token)):
            patch.setenv(name, str(value))

    def next(self) -> tuple[str, dict[str, Any]]:
        """The token and the status of the next message, which Kubernetes would store."""
        import jsonschema  # takes a second, and every process of a test run imports this module

        token, body = self.taken.get(timeout=SECONDS)
        assert body.keys() == {"trainerStatus"}
        status: dict[str, Any] = body["trainerStatus"]
        jsonschema.validate(status, definition("trainer.kubeflow.org", "v1alpha1", "TrainerStatus"))
        datetime.datetime.fromisoformat(status["lastUpdatedTime"])
        return token, status

    def first(self, wanted: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        """The next status for which this is true."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            token, status = self.next()
            if wanted(token, status):
                return status
        raise AssertionError("no such message")


def certified(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate of 127.0.0.1 that has signed itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files = folder / "ca.crt", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, form, plain))
    return files


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    made.variables(monkeypatch)
    yield made
    made.server.shutdown()
    made.server.server_close()


def numbers(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def test_a_trainjob_shows_progress_time_left_and_metrics(trainer: Trainer) -> None:
    sink = TrainJobSink(TrainerServer.of_environment(), resumed_step=4, total_steps=40, interval=0.01)
    assert trainer.next()[1]["progressPercentage"] == 10
    for number in range(5, 31):
        sink.step(step(number, loss=2.5, step_seconds=3.0, mfu=None))
    sink.eval(
        EvalMetrics(step=30, valid_loss=float("nan"), consumed_samples=480, consumed_tokens=9600, eval_seconds=1.0)
    )
    status = trainer.first(lambda _, status: "valid_loss" in numbers(status))
    assert status["progressPercentage"] == 75
    assert status["estimatedRemainingSeconds"] == 30
    assert numbers(status) | {"step": "30", "total_steps": "40", "loss": "2.5", "valid_loss": "nan"} == numbers(status)
    assert "mfu" not in numbers(status)
    trainer.token.write_text("renewed\n")  # as the kubelet does
    trainer.first(lambda token, _: token == "Bearer renewed")
    sink.step(step(40, loss=2.0))
    sink.end("FINISHED")
    sink.close("FINISHED")
    sent = [trainer.next()[1] for _ in range(trainer.taken.qsize())]
    assert sent[-1]["progressPercentage"] == 100
    assert sent[-1]["estimatedRemainingSeconds"] == 0


def test_a_message_has_the_fields_of_transformers_callback(trainer: Trainer) -> None:
    from transformers.integrations.integration_utils import KubeflowCallback

    theirs: Any = KubeflowCallback()
    state = SimpleNamespace(is_world_process_zero=True, max_steps=40, global_step=20)
    theirs.on_train_begin(None, state, None)
    theirs._update_status(50, 100, {"loss": 2.5}, force=True)
    trainer.next()
    token, status = trainer.next()
    sink = TrainJobSink(TrainerServer.of_environment(), resumed_step=0, total_steps=40, interval=0.01)
    sink.step(step(20, loss=2.5))
    ours = trainer.first(lambda sent_with, status: sent_with == token and "loss" in numbers(status))
    sink.close("FINISHED")
    assert {name: type(value) for name, value in ours.items()} == {name: type(status[name]) for name in status}


def test_a_server_that_refuses_is_named_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path, answer=403)
    trainer.variables(monkeypatch)
    with caplog.at_level(logging.WARNING, trainjob.logger.name):
        sink = TrainJobSink(TrainerServer.of_environment(), resumed_step=0, total_steps=9, interval=0.01)
        for _ in range(3):
            trainer.next()
        sink.close("FINISHED")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "403" in caplog.text
    assert "first" not in caplog.text
    trainer.server.shutdown()
    trainer.server.server_close()


def test_a_token_that_is_no_word_is_not_sent_and_not_quoted(trainer: Trainer) -> None:
    trainer.token.write_text("sec\nret")
    with pytest.raises(ValueError, match="token is not one word"):
        TrainerServer.of_environment().send({})
    assert trainer.taken.empty()


def test_a_server_that_another_authority_has_signed_gets_no_token(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(CERTIFICATE, str(certified(tmp_path / "other")[0]))
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        TrainerServer.of_environment().send({"lastUpdatedTime": "2026-11-29T00:00:00Z"})
    assert trainer.taken.empty()


@pytest.mark.parametrize(("name", "value"), [(URL, "http://trainer"), (TOKEN, ""), (CERTIFICATE, "")])
def test_half_a_configuration_is_not_used(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        TrainerServer.of_environment()


def test_only_pods_with_an_address_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert run_tracker.TRAINJOB not in run_tracker.opened_by(tiny("here")).values()
    monkeypatch.setenv(URL, "https://trainer")
    assert run_tracker.TRAINJOB in run_tracker.opened_by(tiny("here")).values()
    assert run_tracker.TRAINJOB_URL == URL
