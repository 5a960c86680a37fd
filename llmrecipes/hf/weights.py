"""Weights under other names: a folder's by those of megatron-core, a checkpoint's by those of transformers.

A folder is read in boxes: a rank reads the slices that it owns. Where the rows of a box lie in the folder's tensors is
determined by splitting the numbers of the rows, with the same transform that splits the weights themselves. Every such
transform moves rows, and some transpose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmrecipes.errors import UserError
from llmrecipes.hf.match import require_same, section_of
from llmrecipes.hf.reading import CONFIG, FLOATS, SHOWN, Folder, further_layers, open_folder, read_config, wrong_types
from llmrecipes.hf.safetensors import TensorSource
from llmrecipes.hf.table import EMBEDDING, VOCABULARY, Family, Pair, Transform
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Model

MEAN_ROWS = 1 << 7
"""Rows that are added or compared at a time: so few stay in the processor's cache, in a tenth of the time of 4,096."""
MOST_RUNS = 1 << 5
"""Runs of rows that are read one by one."""
MAPPED = 1 << 28
"""Bytes that are read before a file is reopened, which releases its pages."""
OTHERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.[a-z_]+)$")
"""Tensors of older files that follow from config.json: masks, and frequencies of the rotary embedding."""

OUTPUT_LAYER = "lm_head.weight"


class _Source(NamedTuple):
    """One tensor of the folder, as the source of some rows of a weight."""

    name: str
    rows: torch.Tensor
    """[n] row of the weight that each row of the tensor becomes."""
    transposed: bool
    expert: int | None
    """Its place in a tensor of all experts of a layer."""


class FolderWeights:
    """See `engine.base.WeightSource`.

    Rows of the vocabulary that the folder does not have, for new tokens or as padding, are the mean of those that it
    has (Hewitt 2021, Initializing New Word Embeddings for Pretrained Language Models): their logits are then the mean
    of the others, and the other tokens keep nearly all of the probability that they had.

    Args:
        folder: the model.
        family: family of its config.json.
        model: model of the recipe, which may have a larger vocabulary.
        section: of its config.json, from `match.section_of` with layers of multi-token prediction.

    Raises:
        UserError: weights are missing, of another shape, quantised, or unused; or copies of one differ.
    """

    def __init__(self, folder: Folder, family: Family, model: Model, section: Mapping[str, Any]) -> None:
        rows = section["vocab_size"]
        self._folder = folder
        self._model = model.model_copy(update={"vocab_size": rows, "make_vocab_size_divisible_by": 1})
        self._sizes = weights(self._model)
        self._pairs = {pair.ours: _as_named(pair, family, folder) for pair in family.pairs(self._model)}
        self._rows = cache(partial(_rows, model=self._model))
        self._mean = cache(self._mean_of)
        self._open: tuple[object, Any] | None = None
        self._mapped = 0
        copied = family.copied(self._model)
        if model.share_embeddings_and_output_weights:  # some programs write the tied output layer
            copied[OUTPUT_LAYER] = self._pairs[EMBEDDING].theirs[0]
        further = further_layers(folder.tensors, model.num_layers)
        known = model.num_layers + (section.get("mtp_num_layers") or 0)
        kept = model.mtp_num_layers is not None
        self._left_out = () if kept else tuple(name for name, layer in further.items() if layer < known)
        self._require(family, {copy: name for copy, name in copied.items() if copy in folder.tensors})

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tensors of the layers of multi-token prediction, of which the recipe has none."""
        return self._left_out

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        pair = self._pairs[name]
        held = [self._folder.tensors[part] for part in pair.theirs]
        dtypes = [getattr(torch, FLOATS[part.dtype]) for part in held]
        box = torch.empty(shape, dtype=max(dtypes, key=lambda part: part.itemsize))
        first = offset[0]
        last = offset[0] + shape[0]
        columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
        for source in self._sources(pair):
            for taken, chosen, target in _runs(source.rows, first, last):
                box[target] = self._slice(source, taken, columns)[chosen]
        rows = self._sizes[name][0]
        if last > rows:
            if pair.transform is not VOCABULARY:
                raise ValueError(f"{name} has {rows} rows, {last} requested")
            box[max(rows - first, 0) :] = self._mean(pair.theirs[0])[columns]
        return box

    def close(self) -> None:
        """Close the file that is open."""
        self._open = None

    def _sources(self, pair: Pair) -> list[_Source]:
        size = self._sizes[pair.ours]
        split = self._rows(pair.transform, size[0], len(size))
        return [_Source(name, *of, pair.expert) for name, of in zip(pair.theirs, split, strict=True)]

    def _slice(self, source: _Source, rows: slice, columns: tuple[slice, ...]) -> torch.Tensor:
        place = (*columns, rows) if source.transposed else (rows, *columns)
        try:
            if source.expert is None:
                values = self._part(source.name, place)
            else:
                values = self._part(source.name, (slice(source.expert, source.expert + 1), *place))[0]
        except UserError:
            raise
        except Exception as error:  # the library has its own kinds of errors
            where = str(self._folder.tensors[source.name].file)
            raise UserError(f"{source.name} cannot be read: {error}", where=where, fix="download it again") from error
        return values.t() if source.transposed else values

    def _part(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        held = self._folder.tensors[name]
        if held.unpack is None:
            return self._read(held.file, name, place)
        unpacked: torch.Tensor = held.unpack(name, held, self._read, place)
        return unpacked

    def _read(self, path: Path, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        values: torch.Tensor = self._file(path).get_slice(name)[place]
        self._mapped += values.nbytes
        return values

    def _file(self, path: Path) -> Any:
        """The open file; one at a time and not for long: pages of a mapped file count as memory."""
        from safetensors import safe_open

        if self._open is None or self._open[0] != path or self._mapped > MAPPED:
            self._open, self._mapped = None, 0
            try:
                self._open = path, safe_open(path, framework="pt")
            except Exception as error:
                raise UserError(f"cannot be read: {error}", where=str(path), fix="download it again") from error
        return self._open[1]

    def _mean_of(self, name: str) -> torch.Tensor:
        """Mean of the rows of a tensor, in fp32, summed in one order whatever the layout."""
        rows, *rest = self._folder.tensors[name].shape
        total = torch.zeros(rest, dtype=torch.float64)
        for start in range(0, rows, MEAN_ROWS):
            part = self._part(name, (slice(start, min(start + MEAN_ROWS, rows)),))
            total += part.double().sum(0)
        return (total / rows).float()

    def _require(self, family: Family, copied: Mapping[str, str]) -> None:
        where = str(self._folder.path)
        tensors = self._folder.tensors
        used = {name: ours for ours, pair in self._pairs.items() for name in pair.theirs}
        if missing := [name for name in used if name not in tensors]:
            raise UserError(
                f"{_counted(missing)} missing",
                where=where,
                rule=f"a model of type {family.name} with this config.json must have them",
                fix="download the complete model again",
            )
        wrong = []
        for pair in self._pairs.values():
            weight = torch.empty(self._sizes[pair.ours], device="meta")
            for name, part in zip(pair.theirs, pair.transform.split(weight, self._model), strict=True):
                expected = _whole(pair, part, self._model)
                if not pair.expert and tensors[name].shape != expected:
                    wrong.append(f"{name}: expected {list(expected)}, found {list(tensors[name].shape)}")
        if wrong:
            hidden = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            raise UserError(
                "\n    ".join(["tensor shapes do not match config.json:", *wrong[:SHOWN], *hidden]),
                where=where,
                rule="shapes follow from config.json",
            )
        needed = {*used, *copied, *self.left_out}
        if unused := [name for name in tensors if name not in needed and not OTHERS.search(name)]:
            raise UserError(
                f"{_counted(unused)} not part of the model",
                where=where,
                rule=f"every tensor must belong to a model of type {family.name}; others would be lost",
            )
        wrong_types(self._folder, iter([*used, *copied]))
        for copy, name in copied.items():
            if self._equal(copy, name):
                continue
            if copy == OUTPUT_LAYER:
                what = "to which config.json ties it"
                rule = "with tie_word_embeddings true"
                fix = f"tie_word_embeddings: false in {CONFIG}, to keep both; or remove {copy}"
            else:
                what = "of which it is a copy"
                rule = "in layers of multi-token prediction"
                fix = "model.mtp_num_layers=null, to leave these layers out"
            raise UserError(
                f"{copy} differs from {name}, {what}",
                where=str(self._folder.path),
                rule=f"{rule}, the two are the same weight; this one would be lost",
                fix=fix,
            )

    def _equal(self, copy: str, name: str) -> bool:
        first, second = (self._folder.tensors[each] for each in (copy, name))
        if first.shape != second.shape:
            return False
        rows = first.shape[0]
        parts = (slice(start, min(start + MEAN_ROWS, rows)) for start in range(0, rows, MEAN_ROWS))
        return all(torch.equal(*(self._part(each, (part,)).double() for each in (copy, name))) for part in parts)


def _whole(pair: Pair, part: torch.Tensor, model: Model) -> tuple[int, ...]:
    """Shape of a tensor of transformers of which a weight becomes a part."""
    experts = () if pair.expert is None else (model.num_moe_experts or 0,)
    return (*experts, *part.shape)


def _as_named(pair: Pair, family: Family, folder: Folder) -> Pair:
    """A pair by the names in the folder: files without an output layer leave out the prefix of all names."""
    short = tuple(name.removeprefix(family.prefix) for name in pair.theirs)
    complete = all(name in folder.tensors for name in pair.theirs)
    return pair if complete or not all(name in folder.tensors for name in short) else pair._replace(theirs=short)


def _rows(transform: Transform, rows: int, dimensions: int, model: Model) -> list[tuple[torch.Tensor, bool]]:
    numbers = torch.arange(rows)
    if dimensions == 1:
        return [(part.contiguous(), False) for part in transform.split(numbers, model)]
    parts = transform.split(numbers.view(rows, 1), model)
    # Of one column: what has become one row was transposed.
    return [(part.reshape(-1), part.shape[0] == 1 and rows > 1) for part in parts]


def _runs(
    rows: torch.Tensor, first: int, last: int
) -> Iterator[tuple[slice, slice | torch.Tensor, slice | torch.Tensor]]:
    """Neighbouring rows of a tensor that lie in a range of the weight's, and where in the range each lies.

    Yields:
        What is read, which of it is used, and its place in the range.
    """
    inside = ((rows >= first) & (rows < last)).nonzero().flatten()
    if not len(inside):
        return
    ends = (inside.diff() != 1).nonzero().flatten() + 1
    if len(ends) > MOST_RUNS:  # every second row: what lies between is read too
        yield slice(int(inside[0]), int(inside[-1]) + 1), inside - inside[0], rows[inside] - first
        return
    for run in inside.tensor_split(ends):
        taken = slice(int(run[0]), int(run[-1]) + 1)
        target = rows[taken] - first
        # Neighbours here as well: a copy, which is much faster than scattering rows.
        in_order = bool((target.diff() == 1).all())
        yield taken, slice(None), slice(int(target[0]), int(target[-1]) + 1) if in_order else target


def _counted(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN])
    hidden = len(names) - SHOWN
    if hidden > 0:
        return f"{shown} and {hidden} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def open_weights(path: Path, model: Model, ignored: Collection[str] = ()) -> FolderWeights:
    """Open the weights of a folder for a recipe's model.

    Args:
        path: the folder.
        model: model of the recipe.
        ignored: keys of config.json that the user says have no effect.

    Raises:
        UserError: as `reading.open_folder`, `match.section_of`, `match.require_same` and `FolderWeights`.
    """
    family, section = section_of(read_config(path), path, ignored, predicting=True)
    # A recipe without multi-token prediction trains the model without these layers.
    predicting = model.mtp_num_layers is not None
    require_same(model, section if predicting else section | {"mtp_num_layers": None}, str(path / CONFIG))
    folder = open_folder(path)
    try:
        return FolderWeights(folder, family, model, section)
    except KeyError as error:
        raise UserError(
            f"a model of type {family.name} does not have {error.args[0]}",
            where=str(path / CONFIG),
            rule="the keys of config.json must be consistent",
        ) from error


def predictions(section: Mapping[str, Any], folder: Folder) -> int | None:
    """Layers of multi-token prediction that a folder has, of those that its config.json says; None: none.

    Args:
        section: of its config.json, from `match.section_of` with these layers.
    """
    return section.get("mtp_num_layers") if further_layers(folder.tensors, section["num_layers"]) else None


class AsHuggingFace:
    """Weights of megatron-core by the names of transformers; see `TensorSource`.

    A tensor that becomes several is read once if these are read one after the other, and is in memory until then. One
    of all experts of a layer is put together in memory.

    Args:
        source: weights named as in `recipe.derived.weight_names.weights`.
        family: family of the model.
        model: model of its recipe.

    Raises:
        UserError: a weight of the model is missing, or has another shape.
    """

    def __init__(self, source: TensorSource, family: Family, model: Model) -> None:
        self._source = source
        self._model = model
        self._pairs: dict[str, list[tuple[Pair, int]]] = {}
        for pair in family.pairs(model):
            for index, name in enumerate(pair.theirs):
                self._pairs.setdefault(name, []).append((pair, index))
        self._last: tuple[Pair, list[torch.Tensor]] | None = None
        require_weights(source, model)
        self._pairs |= {copy: self._pairs[name] for copy, name in family.copied(model).items()}

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        pair, index = self._pairs[name][0]
        return self._shapes[pair.theirs[index]]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.dtype(self._pairs[name][0][0].ours)

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        parts = self._pairs[name]
        if parts[0][0].expert is None:
            return self._read(*parts[0]).contiguous()
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        for pair, index in parts:
            whole[pair.expert] = self._read(pair, index)
        return whole

    def _read(self, pair: Pair, index: int) -> torch.Tensor:
        if self._last is None or self._last[0] is not pair:
            self._last = None  # frees its memory before the next is read
            self._last = pair, pair.transform.split(self._source.read(pair.ours), self._model)
        part = self._last[1][index]
        if index == len(pair.theirs) - 1:
            self._last = None
        return part

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = weights(self._model)
        shapes: dict[str, tuple[int, ...]] = {}
        for pair in dict.fromkeys(parts[0][0] for parts in self._pairs.values()):
            parts = pair.transform.split(torch.empty(sizes[pair.ours], device="meta"), self._model)
            shapes |= {name: _whole(pair, part, self._model) for name, part in zip(pair.theirs, parts, strict=True)}
        return shapes


def require_weights(source: TensorSource, model: Model) -> None:
    """Check that a source has every weight of a model, named as in `recipe.derived.weight_names.weights`.

    Raises:
        UserError: one is missing, or has another shape.
    """
    names = set(source.names())
    wrong = []
    for name, size in weights(model).items():
        if name not in names:
            wrong.append(f"{name}: missing")
        elif source.shape(name) != size:
            wrong.append(f"{name}: expected {list(size)}, found {list(source.shape(name))}")
    if wrong:
        raise UserError(
            _lines("the weights do not match the recipe's model", wrong),
            rule="every weight of the recipe's model must exist, in its shape",
            fix="use the recipe it was trained with: recipe.yaml of the run",
        )


_SHOWN = 8


def _lines(what: str, lines: list[str]) -> str:
    hidden = len(lines) - _SHOWN
    return "\n    ".join([f"{what}:", *lines[:_SHOWN], *([f"and {hidden} more"] if hidden > 0 else [])])
