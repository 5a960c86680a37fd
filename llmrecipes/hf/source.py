"""Where a model is: a folder, or a name on the Hugging Face Hub, whose files are fetched into the Hub's own cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.errors import UserError

PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")
"""Files that are fetched: no code, no pickles."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Found:
    """A model on this machine.

    Attributes:
        path: its folder.
        name: on the Hub, or the path as it was given.
        commit: of the Hub's repository; None for a folder.
    """

    path: Path
    name: str
    commit: str | None

    @property
    def pinned(self) -> str:
        """The value of `train.pretrained` that always means this."""
        return str(self.path.absolute()) if self.commit is None else f"{self.name}@{self.commit}"


def split(text: str) -> tuple[str, str | None]:
    """Name and revision of `NAME@REVISION`; a path that exists has none."""
    if is_path(text):
        return text, None
    name, _, revision = text.partition("@")
    return name, revision or None


def is_path(text: str) -> bool:
    """Whether a text is a path, and not a name on the Hub: it exists, or looks like one."""
    return Path(text).expanduser().exists() or text.startswith((".", "/", "~")) or text.count("/") > 1


def resolve(text: str, revision: str | None = None) -> Found:
    """Find a model, and fetch it from the Hub where it is not here.

    Args:
        text: a folder, or `NAME` or `NAME@REVISION` on the Hub.
        revision: branch, tag or commit.

    Raises:
        UserError: no such folder or name, no network, no permission, or a revision of a folder.
    """
    name, given = split(text)
    if given is not None and revision is not None and given != revision:
        raise UserError(f"{revision} for {text}", where="--revision", rule="one revision", fix="leave one of them out")
    revision = revision or given
    if is_path(name):
        if revision is not None:
            raise UserError(
                f"{revision} for a folder", where="--revision", rule="revisions belong to names on the Hub",
                fix="leave it out",
            )  # fmt: skip
        return Found(Path(name).expanduser(), name, None)
    return _fetched(name, revision)


def _fetched(name: str, revision: str | None) -> Found:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=list(PATTERNS)))
    except Exception as error:  # HTTP, DNS, permissions, names: each library below has its own errors
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UserError(
            f"{name}{'' if revision is None else '@' + revision} cannot be fetched: {reason[:300]}",
            where=name,
            rule="a folder on this machine, or a name on the Hugging Face Hub, which this machine has to reach once",
            fix="check name and revision; that this machine reaches the Hub (HF_ENDPOINT), and HF_TOKEN for a gated "
            "model; or copy the folder here, and give its path",
        ) from error
    # Snapshots in the Hub's cache are named by their commit.
    commit = path.name if _COMMIT.fullmatch(path.name) else None
    return Found(path, name, commit)
