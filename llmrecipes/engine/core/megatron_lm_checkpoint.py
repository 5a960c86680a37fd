"""A checkpoint that Megatron-LM wrote with `--ckpt-format torch_dist`: untrusted, and read as data.

    checkpoints/latest_checkpointed_iteration.txt    "1000"
    checkpoints/iter_0001000/metadata.json           {"sharded_backend": "torch_dist", ...}
                             .metadata               torch.distributed.checkpoint's index, a pickle
                             common.pt               what is not sharded, the arguments among it, a pickle
                             __0_0.distcp            parts of tensors, each as torch.save writes it

megatron-core 0.19 has what is not sharded as an object in a .distcp file, in place of common.pt.

The arguments of the training are an `argparse.Namespace` in a pickle, read as data: no class is imported or
instantiated. What a training saves besides plain values (types, enumerations, paths, random states, storages of
tensors) becomes a record without behaviour; what it has no reason to name is refused.

Weights of any layout are read slice by slice, without the optimizer's state. Layers may be stacked along a first
dimension of one tensor, or have one each, and experts in the same way; a norm has its own name, or that of the linear
layer that TransformerEngine fuses it into. All become the names of a model of local layers that one process holds.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.utils import _create_file_view

from llmrecipes.checkpoint.manifest import FileRecord
from llmrecipes.engine.core.checkpoint.index import Index, Numbers, StoredTensor, Table, as_index, build
from llmrecipes.engine.core.checkpoint.pickled_index import MOST_BYTES, InertRecord, record_kind, require_bounded
from llmrecipes.engine.core.checkpoint.pickled_index import read as read_pickled
from llmrecipes.engine.core.checkpoint.reading import load_plain, open_inside
from llmrecipes.engine.core.checkpoint.tensors import weights_of
from llmrecipes.engine.core.model.gpt import construct_without_memory
from llmrecipes.engine.core.model.init import global_name, whole_name
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan
from llmrecipes.untrusted import read_json

TRACKER = "latest_checkpointed_iteration.txt"
INDEX = ".metadata"
FORM = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
FORMAT = "torch_dist"
_MOST_JSON = 1 << 20
_NO_DIGEST = "0" * 64
"""Megatron-LM records none; only the sizes of files are compared with the index."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of Megatron-LM.

    Attributes:
        path: its folder.
        index: its tensors and objects.
        iteration: as its arguments or its name have it; None: neither has.
        arguments: of the training, only plain values; empty if it has none.
    """

    path: Path
    index: Index
    iteration: int | None
    arguments: Mapping[str, Any]


def open_saved(path: Path) -> Saved:
    """Open a checkpoint; no tensor is read.

    Args:
        path: its folder, or the one that has `latest_checkpointed_iteration.txt`.

    Raises:
        UserError: there is none, it has another format, is incomplete, or not plain data.
    """
    folder = _chosen(path)
    _require_format(folder)
    index = _index(folder)
    arguments, iteration = _common(folder, index)
    name = folder.name.removeprefix("iter_")
    if iteration is None and name.isdecimal():
        iteration = int(name)
    return Saved(folder, index, iteration, arguments)


def corrupt(path: Path, why: str) -> UserError:
    """The error for a checkpoint that cannot be read."""
    return UserError(
        f"this checkpoint cannot be read: {why}",
        where=str(path),
        rule="a Megatron-LM checkpoint must have .metadata and the .distcp files that it lists, with plain data only",
        fix="copy it again from where it was saved, or use another iteration",
    )


def _chosen(path: Path) -> Path:
    """The folder of the checkpoint."""
    try:
        if not path.is_dir():
            raise UserError(
                "no such folder", where=str(path), fix="name the folder of a checkpoint, such as iter_0001000"
            )
        if (path / INDEX).is_file():
            return path
        if (tracker := path / TRACKER).is_file():
            with open_inside(path, TRACKER) as stream:
                text = stream.read(64).decode("ascii", "replace").strip()
            name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else ""
            if not name:
                raise corrupt(tracker, f"{text!r} is not an iteration number")
            folder = path / name
            if not folder.is_dir():
                raise corrupt(folder, f"{TRACKER} names it, but it does not exist")
            if not (folder / INDEX).is_file():
                raise _no_index(folder)
            return folder
        raise _no_index(path)
    except OSError as error:
        raise corrupt(path, error.strerror or str(error)) from error


def _no_index(folder: Path) -> UserError:
    """Why a folder is not a checkpoint of this format."""
    names = sorted(entry.name for entry in folder.iterdir())
    if legacy := [name for name in names if name.startswith("mp_rank_")]:
        return UserError(
            f"this checkpoint has the format torch: {legacy[0]} is a pickle of one rank's model",
            where=str(folder),
            rule="loading it would run what the pickle says, and only the layout that saved it can read it",
            fix="let Megatron-LM convert it: its training with --load DIR --ckpt-convert-format torch_dist "
            "--ckpt-convert-save OUT",
        )
    if any(name.endswith(".distcp") for name in names):
        return corrupt(folder, f"{INDEX} is missing: it is written last, so the save was interrupted")
    inside = next((name for name in reversed(names) if name.startswith("iter_")), "")
    return UserError(
        "this folder has no Megatron-LM checkpoint",
        where=str(folder),
        rule=f"a checkpoint folder has {INDEX} with .distcp files, or {TRACKER}",
        fix=str(folder / inside) if inside else "the folder of Megatron-LM's --save",
    )


def _require_format(folder: Path) -> None:
    path = folder / FORM
    if not path.is_file():
        return  # torch.distributed.checkpoint itself writes none
    try:
        form = read_json(path, root=folder, most=_MOST_JSON)["sharded_backend"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise corrupt(path, f"it does not name the format: {error!r}") from error
    if form != FORMAT:
        raise UserError(
            f"this checkpoint has the format {form!r}",
            where=str(path),
            rule=f"only {FORMAT} is read",
            fix=f"let Megatron-LM convert it: --ckpt-convert-format {FORMAT} --ckpt-convert-save OUT",
        )


def _index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.is_file()}
        with open_inside(folder, INDEX) as stream:
            table: Table = read_pickled(stream, stand_in)
        _require_files(folder, table, sizes)
        return build(table, {name: FileRecord(size=size, sha256=_NO_DIGEST) for name, size in sizes.items()})
    except UserError:
        raise
    except (pickle.UnpicklingError, ValueError) as problem:
        raise corrupt(path, str(problem)) from problem
    except Exception as problem:  # malformed bytes raise any kind of exception in pickle
        raise corrupt(path, repr(problem)) from problem


def _require_files(folder: Path, table: Table, sizes: Mapping[str, int]) -> None:
    """Every file is there, as long as the index says: before hours are spent on those in front of it."""
    if missing := sorted(set(table.files) - set(sizes)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise corrupt(folder, f"{missing[0]!r}{more} is missing, of {len(table.files)} files")
    for name, needed in zip(table.files, _ends(table).tolist(), strict=True):
        if needed > sizes[name]:
            raise corrupt(folder / name, f"it has {sizes[name]:,} bytes, and its last part ends at byte {needed:,}")


def _ends(table: Table) -> Numbers:
    """[files] bytes that each file has at least."""
    ends = np.zeros(len(table.files), np.int64)
    file, start, length = table.columns[:3]
    np.maximum.at(ends, file, start + length)
    for record in table.objects:
        ends[record.place[0]] = max(ends[record.place[0]], record.place[1] + record.place[2])
    return ends


def _common(folder: Path, index: Index) -> tuple[Mapping[str, Any], int | None]:
    """Arguments and iteration, if they were saved."""
    place = index.objects.get(COMMON_OBJECT)
    name = COMMON if place is None else place[0]
    path = folder / name
    if place is None and not path.is_file():
        return {}, None
    try:
        with open_inside(folder, name) as stream:
            start, length = (0, path.stat().st_size) if place is None else place[1:]
            return read_arguments(stream, start, length)
    except UserError:
        raise
    except pickle.UnpicklingError as problem:
        raise corrupt(path, str(problem)) from problem
    except Exception as problem:  # as above, and of zip files
        raise corrupt(path, repr(problem)) from problem


_PLAIN = (bool, int, float, str, type(None))
_PACKAGES = frozenset(
    {
        "_codecs", "argparse", "collections", "datetime", "enum", "functools", "megatron", "numpy",
        "nvidia_resiliency_ext", "pathlib", "signal", "torch", "transformer_engine",
    }
)  # fmt: skip
"""Packages whose objects a training may save."""
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "getattr", "range", "set", "slice"})


def read_arguments(stream: IO[bytes], start: int, length: int) -> tuple[Mapping[str, Any], int | None]:
    """Read the arguments and the iteration of what torch.save wrote.

    Args:
        stream: a file.
        start, length: first byte and bytes of the pickle's zip archive in it.

    Returns:
        Arguments with plain values, empty if it has none; the iteration, None if it has none.

    Raises:
        pickle.UnpicklingError: it names what a training does not save.
        Exception: of any kind, for malformed bytes.
    """
    if length > MOST_BYTES:
        raise pickle.UnpicklingError(f"it has {length} bytes, more than what is not sharded can have")
    stream.seek(start)
    with zipfile.ZipFile(io.BytesIO(stream.read(length))) as archive:
        (name,) = (member for member in archive.namelist() if member.endswith("/data.pkl"))
        member = archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > MOST_BYTES:
            raise pickle.UnpicklingError("its pickle is compressed, which torch.save does not do")
        content = archive.read(member)
    require_bounded(content)
    common = _ArgumentUnpickler(io.BytesIO(content)).load()
    if isinstance(common, list) and len(common) == 1:
        (common,) = common  # as an object of megatron-core 0.19
    if not isinstance(common, dict):
        raise pickle.UnpicklingError(f"the common (unsharded) state is a {type(common).__name__}, expected a dict")
    iteration = common.get("iteration")
    return _arguments(common.get("args")), iteration if type(iteration) is int else None


def _arguments(value: object) -> dict[str, Any]:
    state = value.state if isinstance(value, InertRecord) and type(value).__name__ == "Namespace" else value
    if not isinstance(state, dict):
        return {}
    return {name: each for name, each in state.items() if isinstance(name, str) and _is_plain(each)}


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(e, _PLAIN) for e in value))


class _Container(InertRecord):
    """A record whose items, if it has any, are not kept."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...


def stand_in(module: str, name: str) -> Any:
    """A record in place of a class, or function, that a training saves.

    Raises:
        pickle.UnpicklingError: it does not.
    """
    if name in _BUILTINS if module == "builtins" else module.partition(".")[0] in _PACKAGES:
        return dict if name == "OrderedDict" else record_kind(name, _Container)
    raise pickle.UnpicklingError(f"it names {module}.{name}")


class _ArgumentUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return stand_in(module, name)

    def persistent_load(self, _: Any) -> None:
        """Storages of tensors are not read."""


_SHOWN = 8
_WRAPPED = re.compile(r"\A(?:module\.|model\.)+")
"""In front of the names of a model that is a part of another module."""
_NO_WEIGHT = re.compile(r"(?:chained_\d+\.)?optimizer\..*|rng_state.*|.*\._extra_state.*|.*\.local_tokens_per_expert")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Weights with a row for each token, padded to a multiple that depends on the layout."""


class SavedWeights:
    """Implements `engine.base.WeightSource`.

    Only the stored slices of one weight at a time are in memory; each is read once if weights are read one by one.

    Args:
        saved: the checkpoint.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._places = {
            name: place
            for key, stored in saved.index.tensors.items()
            if not _NO_WEIGHT.fullmatch(key)
            for name, place in weights_of(_WRAPPED.sub("", key), stored)
        }
        self._held: dict[tuple[int, ...], torch.Tensor] = {}
        self._holding = ""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            raise UserError(f"{name} is not in the checkpoint", where=str(self._saved.path))
        if name != self._holding:
            self._held, self._holding = {}, name
        stored, before = place
        box = (*(1 for _ in before), *shape)
        low = np.asarray((*before, *offset), np.int64)
        try:
            parts = stored.slices(tuple(low.tolist()), box)
        except ValueError as problem:
            raise corrupt(self._saved.path, str(problem)) from problem
        # Rows that pad the vocabulary are not in the checkpoint, or are others.
        values = torch.zeros(box, dtype=stored.dtype)
        for start, size, where in zip(parts.offsets, parts.sizes, parts.places.tolist(), strict=True):
            first = np.maximum(start, low)
            last = np.minimum(start + size, low + np.asarray(box))
            part = self._part(stored, tuple(where), tuple(size.tolist()))
            values[as_index(first - low, last - low)] = part[as_index(first - start, last - start)]
        return values.view(shape)

    def require_fit(self, plan: Plan) -> None:
        """Check that the checkpoint has the weights of a model, in its shapes, and no others.

        Args:
            plan: of the recipe, for one rank; this process has joined that world.

        Raises:
            UserError: it has not; with the weights that differ.
        """
        wanted = _wanted(plan)
        rows = plan.recipe.model.vocab_size
        differing = list(_differences(wanted, {name: place.shape for name, place in self._places.items()}, rows))
        if not differing:
            return
        hidden = len(differing) - _SHOWN
        lines = [*islice(differing, _SHOWN), *([f"and {hidden} more"] if hidden > 0 else [])]
        raise UserError(
            "the recipe describes a different model:\n    " + "\n    ".join(lines),
            where=str(self._saved.path),
            rule="the checkpoint and the recipe's model must have the same weights, with the same shapes",
            fix="set the recipe's section model to that of the trained model",
        )

    def _part(self, stored: StoredTensor, place: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A stored part of the weight that is held."""
        if place not in self._held:
            number, start, length = place
            name = self._saved.index.files[number]
            path = self._saved.path / name
            self._held[place] = _load(self._saved.path, path, start, length)
        value = self._held[place]
        if value.dtype != stored.dtype or tuple(value.shape) != shape:
            what = f"{stored.name!r} is {value.dtype} {list(value.shape)}"
            raise corrupt(self._saved.path, f"{what}, its index says {stored.dtype} {list(shape)}")
        return value


def _load(folder: Path, path: Path, start: int, length: int) -> torch.Tensor:
    try:
        with open_inside(folder, path.name) as stream:
            value = load_plain(_create_file_view(stream, start, length), path)
    except (UserError, OSError) as problem:
        raise corrupt(path, problem.what if isinstance(problem, UserError) else str(problem)) from problem
    if not isinstance(value, torch.Tensor):
        raise corrupt(path, f"byte {start} begins a {type(value).__name__}, expected a tensor")
    return value


def _wanted(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for value in nested_values(construct_without_memory(plan).sharded_state()):
        shards = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
        for shard in shards:
            if isinstance(shard, ShardedTensor) and shard.data.is_floating_point():
                shapes[whole_name(global_name(shard))] = tuple(shard.global_shape[shard.prepend_axis_num :])
    return shapes


def _differences(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], tokens: int
) -> Iterator[str]:
    """Weights that differ, a line each; `tokens` is how many rows of the vocabulary the model needs."""
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            yield f"{name}: not in the checkpoint"
        elif name not in wanted:
            yield f"{name}: {list(stored[name])} in the checkpoint, none in the recipe's model"
        elif name in _VOCABULARY and stored[name][1:] == wanted[name][1:]:
            if stored[name][0] < tokens:
                yield f"{name}: {stored[name][0]} rows in the checkpoint, fewer than model.vocab_size {tokens}"
        elif stored[name] != wanted[name]:
            yield f"{name}: {list(stored[name])} in the checkpoint, {list(wanted[name])} in the recipe's model"
