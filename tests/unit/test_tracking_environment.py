"""env.json: enough to make a run again, and no secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from llmrecipes.tracking import run_environment


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_versions_machine_and_command_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRECIPES_IMAGE_DIGEST", "sha256:abc")
    found = run_environment.capture(tmp_path)
    json.dumps(found, allow_nan=False)
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["packages"]["megatron-core"] == metadata.version("megatron-core")
    assert found["packages"]["typer"] == metadata.version("typer")  # not named in PACKAGES
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert 1 <= found["cores"]["usable"] <= found["cores"]["present"]
    assert found["memory_bytes"] > 2**28
    assert found["image_digest"] == "sha256:abc"
    assert found["command"]


def test_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "NCCL_AUTH_TOKEN", "SLURM_JWT"):
        monkeypatch.setenv(name, "sesame")
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    command = ["python", "-m", "x", "--api-token=sesame", "--password", "sesame", "data.tokenizer.path=gpt2"]
    monkeypatch.setattr(sys, "orig_argv", command)
    found = run_environment.capture(tmp_path)
    assert "sesame" not in json.dumps(found)
    assert found["variables"]["NCCL_DEBUG"] == "7" and found["variables"]["OMP_NUM_THREADS"] == "7"
    assert found["command"][-1] == "data.tokenizer.path=gpt2"


def test_git_commit_and_changes(tmp_path: Path) -> None:
    assert run_environment.capture(tmp_path)["git"] is None
    git(tmp_path, "init", "--quiet")
    assert run_environment.capture(tmp_path)["git"] is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "not-tracked").touch()
    assert run_environment.capture(tmp_path)["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("2")
    recorded = run_environment.capture(tmp_path)["git"]
    assert (recorded["commit"], recorded["dirty"]) == (commit, True)
    assert recorded["diff"].splitlines()[-4:] == [
        "-1",
        "\\ No newline at end of file",
        "+2",
        recorded["diff"].splitlines()[-1],
    ]
    (tmp_path / "a").write_bytes(b"PASSWORD=opensesame\n\xff\n")
    diff = run_environment.capture(tmp_path)["git"]["diff"]
    assert "+PASSWORD=" in diff and "opensesame" not in diff
    (tmp_path / "a").write_text("3\n" * run_environment.MOST_DIFF)
    assert run_environment.capture(tmp_path)["git"] == {"commit": commit, "dirty": True, "diff": None}


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 570.1, GPU-1'\necho 'broken line'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = run_environment.capture(tmp_path)["gpus"]
    assert gpus == [{"name": "NVIDIA H200", "memory_mib": 143771, "driver": "570.1", "uuid": "GPU-1"}]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert run_environment.capture(tmp_path)["gpus"] == []
