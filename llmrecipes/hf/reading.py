"""A folder with a model, as transformers saves it: config.json, and weights in safetensors; on this machine, or fetched
from the Hugging Face Hub into the Hub's own cache.

It is untrusted. Nothing in it is run or unpickled: JSON is read as data, weights by the safetensors library, and only
from files inside the folder (or where the Hub's cache keeps them).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from llmrecipes import untrusted
from llmrecipes.data.folder.checked import hashes
from llmrecipes.errors import UserError
from llmrecipes.hf import fp8_blocks, mxfp4

PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")
"""Files that are fetched: no code, no pickles."""
SMALL = tuple(pattern for pattern in PATTERNS if pattern != "*.safetensors")
"""Those without weights."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Located:
    """A model on this machine.

    Attributes:
        path: its folder.
        name: on the Hub, or the path as the user wrote it.
        commit: commit of the Hub's repository; None for a folder.
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


def resolve(text: str, revision: str | None = None, patterns: tuple[str, ...] = PATTERNS) -> Located:
    """Locate a model, and fetch it from the Hub if it is not on this machine.

    Args:
        text: a folder, or `NAME` or `NAME@REVISION` on the Hub.
        revision: branch, tag or commit.
        patterns: files that are fetched.

    Raises:
        UserError: no such folder or name, no network, no permission, or a revision of a folder.
    """
    name, named = split(text)
    if named is not None and revision is not None and named != revision:
        raise UserError(
            f"{revision} contradicts {text}", where="--revision", rule="give one revision", fix="leave one of them out"
        )
    revision = revision or named
    if is_path(name):
        if revision is not None:
            raise UserError(
                f"{revision} given for a folder",
                where="--revision",
                rule="only models on the Hub have revisions",
                fix="leave it out",
            )
        return Located(Path(name).expanduser(), name, None)
    return _fetched(name, revision, patterns)


def _fetched(name: str, revision: str | None, patterns: tuple[str, ...]) -> Located:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # HTTP, DNS, permissions, names: each library below has its own errors
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UserError(
            f"cannot fetch this model: {reason[:300]}",
            where=f"{name}{'' if revision is None else '@' + revision}",
            rule="a folder on this machine, or a name on the Hugging Face Hub, which this machine must reach once",
            fix="check the name and revision, access to the Hub (HF_ENDPOINT), and HF_TOKEN for a gated model; or "
            "copy the folder to this machine and use its path; or llmrecipes export RUN --to hf for a run",
        ) from error
    # Snapshots in the Hub's cache are named by their commit.
    commit = path.name if _COMMIT.fullmatch(path.name) else None
    return Located(path, name, commit)


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
OTHER_WEIGHTS = ("*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.npz")
SHOWN = 5
"""Names in a message, at most."""
MOST_DIMENSIONS = 8

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Element types that hold weights as they are, by their name in safetensors."""


@dataclass(frozen=True)
class Held:
    """A tensor in a file."""

    file: Path
    dtype: str
    """Its name in safetensors."""
    shape: tuple[int, ...]
    scales: Path | None = None
    """File with its scales, if it is quantised and shown as it is read: see `hf.mxfp4` and `hf.fp8_blocks`."""
    unpack: Callable[..., Any] | None = None
    """Reads a part of it then."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.scales is None else (self.file, self.scales)


@dataclass(frozen=True)
class Folder:
    """A model on disk.

    Attributes:
        path: the folder.
        config: config.json.
        tensors: those of the weights, by name.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Held]


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}
"""Of computing, by the name of an element type."""


def precision_of(folder: Folder) -> str:
    """Precision that transformers computes with: `dtype` of config.json, or that of the stored weights.

    Weights of several types have the one of most elements: transformers takes that of the first tensor.

    Returns:
        A value of `train.precision`. fp32 stands for float64 too, which no recipe computes with.

    Raises:
        UserError: `dtype` is not the name of a floating-point type.
    """
    named = next((key for key in ("dtype", "torch_dtype") if folder.config.get(key) is not None), None)
    if named is None:
        elements: Counter[str] = Counter()
        for held in folder.tensors.values():
            if held.dtype in FLOATS:
                elements[FLOATS[held.dtype]] += math.prod(held.shape)
        return _PRECISIONS[elements.most_common(1)[0][0]] if elements else "bf16"
    value = folder.config[named]
    if not isinstance(value, str) or value not in _PRECISIONS:
        raise UserError(
            f"{str(value)[:80]!r} is not an element type of weights",
            where=f"{folder.path / CONFIG}: {named}",
            rule=f"one of {', '.join(_PRECISIONS)}, or missing: the type of the stored weights",
            fix=f"remove {named}",
        )
    return _PRECISIONS[value]


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def further_layers(names: Iterable[str], layers: int) -> dict[str, int]:
    """Tensors of layers after the model's, which are of multi-token prediction, and the number of the layer of each.

    Args:
        names: of the tensors of a folder.
        layers: of the model.
    """
    numbers = {name: int(match[1]) for name in names if (match := _LAYER.match(name))}
    return {name: number for name, number in numbers.items() if number >= layers}


Form = Callable[[Mapping[str, Held], Path], dict[str, Held]]
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Types of models that are others under another name."""
COMPRESSED = "compressed-tensors"
"""`quant_method` of what `llmrecipes quantize` writes."""


def open_folder(path: Path, quantised: str | None = None) -> Folder:
    """Open a folder: its config.json, and the headers of its weights.

    Args:
        path: the folder.
        quantised: as `read_config`.

    Raises:
        UserError: no folder, no config.json, weights that are missing, corrupt, pickled or quantised, or files outside
            of the folder.
    """
    config, form = _read_config(path, quantised)
    files = _weight_files(path)
    tensors: dict[str, Held] = {}
    for file, names in files.items():
        header = _header(path, file)
        for name in header if names is None else names:
            if name not in header:
                raise _broken(path / INDEX, f"{file} does not have {name}, which the index lists", "")
            tensors[name] = header[name]
    if not tensors:
        raise _broken(path / next(iter(files)), "no tensors", "")
    return Folder(path, config, tensors if form is None else form(tensors, path))


def read_config(path: Path, quantised: str | None = None) -> dict[str, Any]:
    """config.json of a folder.

    Args:
        path: the folder.
        quantised: a `quant_method` that is accepted; None: only weights as they are, and those that are dequantised as
            they are read, whose `quantization_config` is left out.

    Raises:
        UserError: no folder, no such file, not a JSON object, or the weights are quantised in another way.
    """
    return _read_config(path, quantised)[0]


def _read_config(path: Path, quantised: str | None) -> tuple[dict[str, Any], Form | None]:
    """config.json, and how its quantised tensors are shown."""
    if not path.is_dir():
        raise UserError(
            "no such folder", where=str(path), rule="a model is a folder with config.json and model.safetensors"
        )
    if not os.path.lexists(path / CONFIG):
        raise UserError(
            f"{CONFIG} is missing",
            where=str(path),
            rule=f"a model is a folder with {CONFIG} and weights in safetensors",
            fix=_adapter_fix(path),
        )
    config = read_json(path, CONFIG)
    if isinstance(kind := config.get("model_type"), str):
        config["model_type"] = ALIASES.get(kind, kind)
    section = config.get("quantization_config")
    if section is None:
        return config, None
    method = section.get("quant_method", "unnamed") if isinstance(section, dict) else section
    if quantised is None and (form := _form(method, section, config.get("model_type"))) is not None:
        del config["quantization_config"]
        return config, form
    if quantised is None:
        raise UserError(
            f"quantised weights: quantization_config has {str(method)[:40]!r}",
            where=str(path / CONFIG),
            rule="training must start from weights in fp32, bf16 or fp16",
            fix="use the original weights, or a copy converted back to bf16",
        )
    if method != quantised:
        raise UserError(
            f"quantised weights: quantization_config has {str(method)[:40]!r}",
            where=str(path / CONFIG),
            rule=f"quantised weights must be {quantised}, as llmrecipes quantize writes them",
            fix="use the original weights",
        )
    return config, None


def _form(method: Any, section: Any, model_type: Any) -> Form | None:
    """How quantised tensors are shown, if they can be dequantised as they are read."""
    if method == mxfp4.METHOD and model_type in mxfp4.FAMILIES:
        return mxfp4.shown
    if method == fp8_blocks.METHOD and (block := fp8_blocks.blocks(section)) is not None:
        return partial(fp8_blocks.shown, block=block)
    return None


def runs_code(path: Path) -> str | None:
    """What asks to run Python code of the folder: `auto_map` of config.json, or a file; None: nothing.

    It is never run. A model whose `model_type` is known does not need it.
    """
    for name in (CONFIG, TOKENIZER_CONFIG):
        if os.path.lexists(path / name) and "auto_map" in read_json(path, name):
            return f"auto_map in {name}"
    return next((file.name for file in sorted(path.glob("*.py"))), None)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder.

    Raises:
        UserError: it is not a regular file of the folder, too large, or not a JSON object.
    """
    try:
        value = untrusted.read_json(folder / name, root=untrusted.model_root(folder), constant=_no_constant)
    except OSError as error:
        raise _unreadable(folder / name, error) from error
    if not isinstance(value, dict):
        raise _broken(folder / name, f"not a JSON object, but a {type(value).__name__}", "")
    return value


def read_bytes(folder: Path, name: str) -> bytes:
    """The content of a small file of a folder, such as that of a tokenizer.

    Raises:
        UserError: it is not a regular file of the folder, too large, or cannot be read.
    """
    try:
        return untrusted.read(folder / name, root=untrusted.model_root(folder))
    except OSError as error:
        raise _unreadable(folder / name, error) from error


def copy(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a folder; a link out of the folder is refused.

    Raises:
        UserError: as `read_bytes`.
        OSError: the target cannot be written.
    """
    try:
        source = untrusted.open_file(folder / name, root=untrusted.model_root(folder), most=untrusted.MANIFEST)
    except OSError as error:
        raise _unreadable(folder / name, error) from error
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _weight_files(path: Path) -> dict[str, list[str] | None]:
    """Files of weights and the names in each; None: all that it has."""
    has_one = os.path.lexists(path / WEIGHTS)
    if os.path.lexists(path / INDEX):
        indexed = _indexed(path)
        if has_one and WEIGHTS not in indexed:
            raise UserError(
                f"two sets of weights: {WEIGHTS}, and the files that {INDEX} lists",
                where=str(path),
                rule="one set of weights: transformers reads the first, and vLLM the second",
                fix="move those that are old elsewhere; from the Hub: hf download NAME --exclude FILE --local-dir DIR",
            )
        return dict(indexed)
    if has_one:
        return {WEIGHTS: None}
    raise _no_weights(path)


def _indexed(path: Path) -> dict[str, list[str]]:
    weight_map = read_json(path, INDEX).get("weight_map")
    where = path / INDEX
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(where, "no weight_map", "")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise _broken(
                where, f"weight_map has {str(file)[:80]!r} for {name[:80]}", "a file of this folder, *.safetensors"
            )
        files.setdefault(file, []).append(name)
    if missing := [file for file in sorted(files) if not os.path.lexists(path / file)]:
        raise UserError(
            f"{len(missing)} of {len(files)} files of weights are missing: {_listed(missing)}",
            where=str(path),
            rule=f"the folder must have every file that {INDEX} lists",
            fix="download the complete model again",
        )
    return files


def _header(folder: Path, name: str) -> dict[str, Held]:
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        path = untrusted.real(folder / name, root=untrusted.model_root(folder))
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(key)
                tensors[key] = Held(path, str(part.get_dtype()), tuple(part.get_shape()))
    except OSError as error:
        raise _unreadable(folder / name, error) from error
    except (SafetensorError, ValueError, OverflowError) as error:
        raise _broken(
            folder / name,
            f"corrupt or truncated: {str(error)[:200]}",
            "it must be a complete safetensors file",
            "download it again",
        ) from error
    if bad := next((key for key, held in tensors.items() if len(held.shape) > MOST_DIMENSIONS), None):
        raise _broken(folder / name, f"{bad[:80]} has {len(tensors[bad].shape)} dimensions", "")
    return tensors


def _no_weights(path: Path) -> UserError:
    pickles = sorted({file.name for pattern in PICKLES for file in path.glob(pattern)})
    if pickles:
        return UserError(
            f"the weights are pickles: {_listed(pickles)}",
            where=str(path),
            rule="loading a pickle can run code in it; weights are read only from safetensors",
            fix="use a revision with model.safetensors; or convert it where that is safe: load it with "
            "transformers, then call save_pretrained",
        )
    others = sorted({file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern)})
    return UserError(
        f"no weights in safetensors{': only ' + _listed(others) if others else ''}",
        where=str(path),
        rule=f"weights must be in {WEIGHTS}, or in files that {INDEX} lists",
        fix=_adapter_fix(path) or "download the complete model again",
    )


def _adapter_fix(path: Path) -> str:
    if (path / "adapter_config.json").exists():
        return "this is an adapter: use its base model (base_model_name_or_path)"
    return ""


def _broken(where: Path, what: str, rule: str, fix: str = "") -> UserError:
    return UserError(what, where=str(where), rule=rule, fix=fix)


def _unreadable(where: Path, error: Exception) -> UserError:
    return UserError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(where))


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def wrong_types(folder: Folder, names: Iterator[str]) -> None:
    """Refuse weights that are not floating-point numbers.

    Raises:
        UserError: the first of these tensors that is not.
    """
    for name in names:
        held = folder.tensors[name]
        if held.dtype not in FLOATS:
            raise UserError(
                f"{name} has elements of type {held.dtype}",
                where=str(held.file),
                rule=f"weights must be {', '.join(FLOATS)}; quantised ones cannot be trained",
                fix="use the original weights, or a copy converted back to bf16",
            )


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
    files = {file.name: file for held in folder.tensors.values() for file in held.files}
    digest.update(json.dumps([heads, hashes(folder.path, files, log)], sort_keys=True).encode())
    return digest.hexdigest()
