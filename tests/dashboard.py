"""A real run that serves its values, and what the shipped dashboard asks for."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from llmrecipes.tracking import prometheus
from llmrecipes.tracking.prometheus import in_base_units
from tests.helpers import finish, start_command, tiny_on, write_recipe

DASHBOARD = Path(prometheus.__file__).with_name("grafana.json")
ON_GPUS = {
    f"llmrecipes_{group}_{in_base_units(name)[0]}"
    for group, names in (
        ("node", ("gpu_use", "throttled", "temperature_c", "power_watts", "infiniband_bytes_per_second")),
        ("rank", ("memory_reserved_bytes",)),
    )
    for name in names
} | {"llmrecipes_mfu_ratio"}
"""What only a run on GPUs, or on InfiniBand, has."""
PROFILE = {
    "name": "here", "gpus_per_node": 0, "cpu_cores": 2, "memory_gib": 8,
    "intra_node": {"kind": "memory", "gb_per_s": 10}, "inter_node": {"kind": "ethernet", "gb_per_s": 1},
    "costs": {"pue": 1.2, "kg_co2_per_kwh": 0.4},
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"train_iters": 1_000_000, "eval_interval": 5, "eval_iters": 1},
    "checkpoint": {"save_interval": 200},
    "tracking": {"mlflow": False, "tensorboard": False, "prometheus": True, "energy_model": "codecarbon"},
}


def dashboard() -> dict[str, Any]:
    """The shipped file."""
    values: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return values


def expressions() -> list[str]:
    """Queries of all panels."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics in a query."""
    return set(re.findall(r"\bllmrecipes_\w+", expression))


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody who asks for any: gloo opens hundreds of those."""
    while True:
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(one.getsockname()[1])


def text(port: int) -> str:
    """What Prometheus would read; empty: nobody listens yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@contextmanager
def served(folder: Path, corpus: Path, data_dir: Path) -> Iterator[int]:
    """The port of a run on two ranks that has a value for each query that a CPU can answer; it is stopped later."""
    port = free_port()
    sections = {**SECTIONS, "tracking": {**SECTIONS["tracking"], "prometheus_port": port}}
    recipe, profile = write_recipe(tiny_on(corpus, "served", **sections), folder), folder / "here.yaml"
    profile.write_text(yaml.safe_dump(PROFILE))
    paths = ("--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir))
    words = ("--run-id", "one", "--nproc", "2", "--no-sample", "--cluster", str(profile), *paths)
    process: subprocess.Popen[str] = start_command("train", recipe, *words)
    try:
        wanted = set().union(*map(metrics_of, expressions())) - ON_GPUS
        end = time.monotonic() + 240
        while missing := {name for name in wanted if f"\n{name}{{" not in text(port)}:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, missing
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process, 75)
    assert text(port) == "", "nobody listens after the run"
