"""A config.json as transformers reads it.

Importing transformers takes four times as long with torch. A command that will ask enters `beside` first: it starts a
process without torch, which imports transformers while the command imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

_begun: list[subprocess.Popen[bytes]] = []


class Refused(Exception):
    """transformers refuses the config.json; the message is its own."""


@contextmanager
def beside() -> Iterator[None]:
    """Let a process answer that is started now, unless transformers is imported here anyway."""
    if "transformers" in sys.modules:
        yield
        return
    quiet = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", __file__]  # -P: the modules beside this file have names of libraries
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, bufsize=0, env=quiet) as process:
        _begun.append(process)
        try:
            yield
        finally:
            _begun.remove(process)
            process.kill()


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of transformers, by its names of keys.

    Raises:
        Refused: a value is not one that transformers takes.
    """
    answer = _answer(config)
    if isinstance(answer, str):
        raise Refused(answer)
    return answer


def generation_keys() -> frozenset[str]:
    """Keys of a generation_config.json."""
    return frozenset(_answer(None))


def _answer(config: Mapping[str, Any] | None) -> Any:
    """What the process answers; what this one does, if there is none, or it has ended."""
    for process in _begun:
        questions, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            questions.write(json.dumps(config).encode() + b"\n")
            if line := answers.readline():
                return json.loads(line)
        except OSError:  # it has ended
            pass
    return _here(config)


def _here(config: Mapping[str, Any] | None) -> Any:
    from transformers import AutoConfig, GenerationConfig

    if config is None:
        return list(GenerationConfig().to_dict())
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(json.dumps(config), "utf-8")
            read = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # Again: a value under another name of its key is set after the first validation.
        return type(read).from_dict(read.to_dict()).to_dict()
    except Exception as error:  # of its validators, of torch, of what a value is not
        return str(error) or type(error).__name__
    finally:
        logger.setLevel(level)


def _serve() -> None:
    """Answer a line by a line, until standard input ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then has its configurations alone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import transformers.models.auto.configuration_auto  # noqa: F401  the first line comes later

    for line in sys.stdin:
        print(json.dumps(_here(json.loads(line)), default=str), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
