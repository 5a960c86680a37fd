"""The real Prometheus reads a run, finds nothing to object to, and answers the queries of the dashboard."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboard import ON_GPUS, expressions, free_port, metrics_of, served, text

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def asked(port: int, path: str) -> Any:
    """Data of an answer of Prometheus' API; None: it does not listen yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as answer:
            values = json.load(answer)
    except OSError:
        return None
    assert values["status"] == "success", values
    return values["data"]


def result(port: int, expression: str) -> list[Any]:
    data = asked(port, f"query?{urllib.parse.urlencode({'query': expression})}")
    return [] if data is None else list(data["result"])


@pytest.mark.rotating
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path, corpus: Path, data_dir: Path) -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus and promtool are missing: apt-get install prometheus")
    with served(tmp_path, corpus, data_dir) as port:
        checked = subprocess.run(["promtool", "check", "metrics"], input=text(port), capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        jobs = [{"job_name": "runs", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))
        here = free_port()
        server = subprocess.Popen(
            [
                "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'db'}",
                f"--web.listen-address=127.0.0.1:{here}", "--log.level=error",
            ]
        )  # fmt: skip
        try:
            end = time.monotonic() + 240
            while not result(here, "llmrecipes_step"):
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.2)
            runs = {each["metric"]["run"] for each in result(here, "llmrecipes_step")}
            assert runs == {"served/one"}
            for expression in expressions():
                found = result(here, expression.replace("$run", "served/one"))
                assert bool(found) != bool(metrics_of(expression) & ON_GPUS), expression
        finally:
            server.terminate()
            server.wait(timeout=240)
