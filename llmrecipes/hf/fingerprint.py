"""What tells one folder of weights from another: the hash of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from llmrecipes.data.checked import hashes
from llmrecipes.hf.reading import CONFIG, Folder, read_bytes


def fingerprint(folder: Folder, log: Callable[[str], None]) -> str:
    """SHA-256 of config.json, of names, types and shapes of all tensors, and of the hashes of their files.

    One changed byte is seen. The hashes are remembered by size, times and inode, so the weights are read once for each
    user: a 70B model in bf16 has 140 GB, at least 70 s from a disk that delivers 2 GB/s (calculated).

    Args:
        folder: the model.
        log: receives a line when files are read.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256(read_bytes(folder.path, CONFIG))
    heads = {name: (held.file.name, held.dtype, held.shape) for name, held in folder.tensors.items()}
    files = {held.file.name: held.file for held in folder.tensors.values()}
    digest.update(json.dumps([heads, hashes(folder.path, files, log)], sort_keys=True).encode())
    return digest.hexdigest()
