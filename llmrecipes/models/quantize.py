"""`llmrecipes quantize`: a run or a folder with weights of 8 or 4 bits, which transformers and vLLM load."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.process import peak_memory
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.quantize_options import QuantizeOptions
from llmrecipes.packages import find_spec
from llmrecipes.rundir import Run
from llmrecipes.untrusted import model_root, open_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from llmrecipes.data.folder.prepared import Prepared
    from llmrecipes.data.tokens.tokenizer import TextTokenizer
    from llmrecipes.hf.safetensors import SafetensorsFolder
    from llmrecipes.models.calibrate import ExpertMatrix
    from llmrecipes.models.quantized_weights import Changed, Scheme
    from llmrecipes.tracking.progress import Counted

LENGTH = 512
"""Tokens of a row of calibration text at most, unless the options say."""
PACKAGE = "compressed_tensors"
NUMBER = re.compile(r"\.(\d+)(?=\.)")
"""Of a layer, and then of an expert, in the name of a tensor."""


@dataclass(frozen=True)
class Quantized:
    """What was written.

    Attributes:
        path: the folder.
        source: folder or run.
        scheme: scheme of the matrices.
        method: how they were rounded.
        group: input channels that share a scale; None: all of a row.
        form: `format` of compressed-tensors.
        matrices: that were quantised.
        expert_matrices: those of them that are of experts.
        parameters: parameters of the model.
        quantized_parameters: parameters of these matrices.
        bytes: size in bytes of all tensors.
        bytes_before: size in bytes of all tensors of the source.
        calibration_tokens: 0 without calibration.
        unvisited_matrices: matrices of experts to which no token of a calibration went: they are rounded to nearest.
        largest_matrix_bytes: size in bytes of the largest one, as stored in the source.
        memory_before_bytes: memory in bytes of this process before it read a weight, at most.
        peak_memory_bytes: peak memory in bytes of this process, until the folder was written.
        seconds: duration.
    """

    path: str
    source: str
    scheme: str
    method: str
    group: int | None
    form: str
    matrices: int
    expert_matrices: int
    parameters: int
    quantized_parameters: int
    bytes: int
    bytes_before: int
    calibration_tokens: int
    unvisited_matrices: int
    largest_matrix_bytes: int
    memory_before_bytes: int
    peak_memory_bytes: int
    seconds: float


def quantize(
    reference: str,
    out: Path,
    runs_dir: Path,
    data_dir: Path,
    options: QuantizeOptions,
    progress: Counted | None = None,
    then: Callable[[Path, Path], None] | None = None,
) -> Quantized:
    """Write a model whose linear layers and experts have fewer bits.

    Embeddings, norms, routers and the output layer stay as they are. Without calibration (`rtn`), matrices are read,
    rounded and written one by one, each expert's too. Calibration holds the model, its text, and the inputs of one
    layer.

    Args:
        reference: `RUN`, `RUN@STEP`, or a folder in Hugging Face's form.
        out: the new folder.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizer.
        options: how.
        progress: shows tensors, or layers of a calibration.
        then: called with the original and the quantised folder before the latter is published, to measure them.

    Raises:
        UserError: the package is missing; a scheme, method or group size that do not go together or with the model,
            such as one with experts; a model that is quantised already; too little text. Nothing is left behind.
    """
    from llmrecipes.hf.safetensors import SafetensorsFolder, write, write_json

    started = time.monotonic()
    _require_options(options)
    from llmrecipes.models.quantized_weights import QuantizedSource

    require_absent(out, "another OUT")
    with published(out, "another OUT") as folder, _original(reference, folder, runs_dir, data_dir, options) as original:
        source = SafetensorsFolder(original)
        layers = linear_layers(original, source.names(), source.shape)
        _require_for_experts(options, layers)
        scheme = _scheme(options, layers, source)
        element = _element(options.dtype or ("bf16" if options.scheme == "nvfp4" else None))
        memory_before = peak_memory()
        QuantizedSource(source, scheme, layers.quantized, element)  # refuses what the scheme cannot divide
        text = partial(_rows, original, reference, runs_dir, data_dir, options)
        changed, tokens = _calibrated(original, text, options, scheme, layers, element, progress)
        made = QuantizedSource(source, scheme, layers.quantized, element, changed)
        config = {**source.config, "quantization_config": scheme.config()}
        kind = source.dtype(layers.quantized[0])
        written = write(made, config, folder, progress=progress)
        # What computes is in this type; `write` has said which one most bytes have.
        write_json(folder / "config.json", {**config, "dtype": str(element or kind).removeprefix("torch.")})
        _copy_others(original, folder)
        peak = peak_memory()
        if then is not None:
            then(original, folder)
    sizes = {name: _count(source.shape(name)) for name in source.names()}
    return Quantized(
        path=str(out),
        source=reference,
        scheme=options.scheme,
        method=options.method,
        group=scheme.group,
        form=scheme.kind.form,
        matrices=len(layers.quantized),
        expert_matrices=len(layers.experts),
        parameters=sum(sizes.values()),
        quantized_parameters=sum(sizes[name] for name in layers.quantized),
        bytes=written.bytes,
        bytes_before=sum(size * source.dtype(name).itemsize for name, size in sizes.items()),
        calibration_tokens=tokens,
        unvisited_matrices=sum(name not in changed for name in layers.experts) if tokens else 0,
        largest_matrix_bytes=max(sizes[name] * source.dtype(name).itemsize for name in layers.quantized),
        memory_before_bytes=memory_before,
        peak_memory_bytes=peak,
        seconds=round(time.monotonic() - started, 3),
    )


def _require_options(options: QuantizeOptions) -> None:
    if find_spec(PACKAGE) is None:
        raise UserError(
            "the package compressed-tensors is not installed",
            where="llmrecipes quantize",
            rule="it defines the formats and their arithmetic",
            fix="pip install 'llmrecipes[quantize]'",
        )
    from llmrecipes.models.quantized_weights import METHODS, SCHEMES

    if options.scheme not in SCHEMES:
        raise UserError(f"unknown scheme {options.scheme!r}", where="--scheme", rule=f"one of {', '.join(SCHEMES)}")
    if options.method not in METHODS:
        raise UserError(f"unknown method {options.method!r}", where="--method", rule=f"one of {', '.join(METHODS)}")
    methods = SCHEMES[options.scheme].methods
    if options.method not in methods:
        others = [name for name, kind in SCHEMES.items() if options.method in kind.methods]
        raise UserError(
            f"{options.method} does not support {options.scheme}",
            where="--method",
            rule=f"{options.method} supports {', '.join(others)}; {options.scheme} takes {', '.join(methods)}",
            fix=f"--method {methods[0]}",
        )
    if options.method == "rtn" and options.calibrate is not None:
        raise UserError(
            f"{options.calibrate} has no effect with --method rtn",
            where="--calibrate",
            rule="rtn needs no calibration text",
            fix=f"leave it out, or --method {methods[-1]}",
        )
    if options.scheme == "nvfp4" and options.dtype == "fp32":
        raise UserError(
            "fp32 is not supported with nvfp4", where="--dtype", rule="nvfp4 computes in bf16", fix="--dtype bf16"
        )
    if options.dtype not in (None, "fp32", "bf16"):
        raise UserError(f"unknown type {options.dtype!r}", where="--dtype", rule="fp32 or bf16")


@contextmanager
def _original(reference: str, folder: Path, runs_dir: Path, data_dir: Path, options: QuantizeOptions) -> Iterator[Path]:
    """The folder of a model in Hugging Face's form: itself, or the export of a run, until the block ends."""
    from llmrecipes.models.export import export
    from llmrecipes.models.export_options import ExportOptions

    path = Path(reference)
    if (path / "config.json").is_file() and not Run(path).exists():
        yield path
        return
    source = folder.with_name(f"{folder.name}-source")
    shutil.rmtree(source, ignore_errors=True)
    try:
        export(reference, source, runs_dir, data_dir, ExportOptions(dtype=options.dtype))
        yield source
    finally:
        shutil.rmtree(source, ignore_errors=True)


def _require_for_experts(options: QuantizeOptions, layers: LinearLayers) -> None:
    from llmrecipes.models.quantized_weights import SCHEMES

    if not layers.experts:
        return
    kind = SCHEMES[options.scheme]
    if not kind.experts:
        possible = [name for name, other in SCHEMES.items() if other.experts]
        raise UserError(
            f"{options.scheme} is not supported for models with experts",
            where="--scheme",
            rule=f"transformers unpacks experts in {', '.join(possible)} only",
            fix=f"--scheme {next(name for name in reversed(possible) if SCHEMES[name].bits == kind.bits)}",
        )
    if options.method not in ("rtn", "gptq"):
        raise UserError(
            f"{options.method} is not supported for models with experts",
            where="--method",
            rule="scales cannot be moved into the norm before experts: the router reads its output too",
            fix="--method gptq, or rtn",
        )


@dataclass(frozen=True)
class LinearLayers:
    """Matrices of a model that can have fewer bits, by their names in its files.

    Attributes:
        quantized: with `.weight`: those of linear layers in the order of the model, then those of experts.
        ignored: names of the layers that stay: the output layer, and routers. A router's scores decide which experts a
            token visits: a small difference selects others. Its matrices are a thousandth of the model.
        experts: those of `quantized` that are of experts, and where transformers has them.
    """

    quantized: tuple[str, ...]
    ignored: tuple[str, ...]
    experts: Mapping[str, ExpertMatrix]


def linear_layers(folder: Path, names: Any, shape: Callable[[str], tuple[int, ...]]) -> LinearLayers:
    """The linear layers and experts of a model in Hugging Face's form, without its weights.

    Args:
        folder: with config.json.
        names: names of the tensors in its files.
        shape: shape of a tensor.

    Raises:
        UserError: transformers does not know the model, or it has other matrices.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmrecipes.hf.reading import further_layers

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # unknown types and keys: transformers raises several kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"transformers cannot build this model: {reason[:300]}",
            where=str(folder / "config.json"),
            rule="it must have a model_type of transformers, without custom code",
        ) from error
    # Layers of multi-token prediction stay as they are.
    further = further_layers(names, config.num_hidden_layers)
    names = [name for name in names if name not in further]
    present = set(names)
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    experts, routers = _experts(model, names, shape)
    ignored = tuple(name for name, module in linear.items() if module is output) + routers
    ignored += tuple(rf"re:model\.layers\.{number}\..*" for number in dict.fromkeys(further.values()))
    quantized = (*(f"{name}.weight" for name in linear if name not in ignored), *experts)
    known = {*quantized, *(f"{name}.weight" for name in ignored)}
    known |= {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    others = [name for name in names if len(shape(name)) > 1 and name not in known]
    others.sort(key=lambda name: -len(shape(name)))  # stacked experts before the router beside them
    missing = [name for name in quantized if name not in present]
    if others or missing:
        raise UserError(
            f"{(others or missing)[0]} is not the matrix of a linear layer or of one expert",
            where=str(folder),
            rule="every matrix must be one; files with all experts of a layer in one tensor are not supported",
            fix="llmrecipes export --to gguf or --to onnx",
        )
    return LinearLayers(quantized, ignored, experts)


def _experts(
    model: PreTrainedModel, names: Sequence[str], shape: Callable[[str], tuple[int, ...]]
) -> tuple[dict[str, ExpertMatrix], tuple[str, ...]]:
    """Matrices of experts in a file, and names of the layers that route tokens to them.

    transformers 5 has the experts of a layer as tensors [experts, out, in], and stacks the matrices of a file when it
    loads them. With quantised weights it unpacks them first, if the names that it stacks end with `.weight`
    (`HfQuantizer.update_weight_conversions`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

    from llmrecipes.models.calibrate import ExpertMatrix

    state = model.state_dict()
    if not any(value.dim() == 3 for value in state.values()):
        return {}, ()
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    stacking = {
        pattern: place
        for each in converters
        if isinstance(each.operations[0], MergeModulelist) and all(p.endswith(".weight") for p in each.source_patterns)
        for place, pattern in enumerate(each.source_patterns)
    }
    matrices = [name for name in names if len(shape(name)) == 2]
    becomes = {
        name: rename_source_key(name, renamings, converters, model.base_model_prefix, state) for name in matrices
    }
    experts = {
        name: ExpertMatrix(target, int(NUMBER.findall(name)[-1]), stacking[pattern] * shape(name)[0], shape(name)[0])
        for name, (target, pattern) in becomes.items()
        if pattern in stacking and target in state
    }
    counts = {becomes[name][0].rsplit(".", 2)[0]: state[becomes[name][0]].size(0) for name in experts}
    routers: list[str] = []
    for name in matrices:
        layer = becomes[name][0].removesuffix(".weight")
        block = layer.rpartition(".")[0]
        # Beside the experts: a row for each, or one for a shared expert. vLLM has the name in the file.
        if block in counts and shape(name)[0] in (1, counts[block]):
            routers += {name.removesuffix(".weight"): None, layer: None}
    return experts, tuple(routers)


def _scheme(options: QuantizeOptions, layers: LinearLayers, source: SafetensorsFolder) -> Scheme:
    from llmrecipes.models.quantized_weights import GROUPS, Scheme

    group = options.group_size
    if group is None and options.scheme == "int4":
        rows = [source.shape(name)[-1] for name in layers.quantized]
        # None where no group divides all rows: the scheme's own group then names the matrix that has no such rows.
        group = next((size for size in GROUPS if all(row % size == 0 for row in rows)), None)
    return Scheme(options.scheme, group, layers.ignored)


def _element(dtype: str | None) -> torch.dtype | None:
    from llmrecipes.hf.safetensors import ELEMENT_TYPES

    return None if dtype is None else ELEMENT_TYPES[dtype]


def _calibrated(
    folder: Path,
    text: Callable[[], torch.Tensor],
    options: QuantizeOptions,
    scheme: Scheme,
    layers: LinearLayers,
    element: torch.dtype | None,
    progress: Counted | None,
) -> tuple[Mapping[str, Changed], int]:
    """What a calibration changes, and the tokens that it read."""
    if options.method == "rtn":
        return {}, 0
    import transformers

    from llmrecipes.models.calibrate import CalibrationData, calibrate

    rows = text()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=False, use_safetensors=True
    ).eval()
    widest = max(module.in_features for name, module in model.named_modules() if f"{name}.weight" in layers.quantized)
    if options.method == "gptq" and rows.numel() < widest:
        raise UserError(
            f"{rows.numel():,} tokens are too few",
            where="--samples",
            rule=f"gptq needs at least as many as the widest layer has inputs, {widest:,}",
            fix=f"--samples {-(-widest // rows.size(1))}",
        )
    linears = frozenset(layers.quantized).difference(layers.experts)
    work = CalibrationData(model, rows, scheme, linears, element, progress, layers.experts)
    changed = calibrate(options.method, work)
    return changed, rows.numel()


def _rows(folder: Path, reference: str, runs_dir: Path, data_dir: Path, options: QuantizeOptions) -> torch.Tensor:
    """Calibration text as token ids [rows, length]: documents one after another, with an end token between them.

    Raises:
        UserError: no source is named, or it has too little text.
    """
    import torch

    from llmrecipes.evaluation.texts import Texts

    tokenizer, prepared, positions = text_of(folder, reference, runs_dir, data_dir)
    if options.calibrate is None and prepared is None:
        raise UserError(
            "not set",
            where="--calibrate",
            rule=f"{options.method} needs calibration text",
            fix="--calibrate text:FILE, jsonl:FILE or stdlib; or --method rtn",
        )
    length = options.length or min(LENGTH, positions)
    if length > positions:
        raise UserError(f"{length} is too long", where="--length", rule=f"at most the model's {positions} positions")
    texts = Texts.parse(options.calibrate or "train", text_key=options.text_key)
    texts.require(prepared)
    wanted = options.samples * length
    ids: list[int] = []
    for text in texts.documents(tokenizer, prepared):
        ids += [*tokenizer.prefix, *text.tokens, tokenizer.eod]
        if len(ids) >= wanted:
            break
    rows = len(ids) // length
    if rows < options.samples:
        raise UserError(
            f"{texts.name} has {rows} rows of {length} tokens",
            where="--calibrate",
            rule=f"--samples asks for {options.samples} rows",
            fix=f"more text, or --samples {max(1, rows)}" + ("" if rows else f" --length {max(2, len(ids))}"),
        )
    return torch.tensor(ids[:wanted]).view(options.samples, length)


def text_of(folder: Path, reference: str, runs_dir: Path, data_dir: Path) -> tuple[TextTokenizer, Prepared | None, int]:
    """The tokenizer of a model, the data of its run (None for a folder), and its positions.

    Args:
        folder: folder of the model in Hugging Face's form.
        reference: the run, or the folder.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.

    Raises:
        UserError: there is no tokenizer, or config.json does not say how many positions there are.
    """
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.models.inference_worker import folder_tokenizer, sizes
    from llmrecipes.workflow.model_source import find_checkpoint

    positions, _ = sizes(folder)
    if (Path(reference) / "config.json").is_file() and not Run(Path(reference)).exists():
        return folder_tokenizer(folder), None, positions
    run, entry = find_checkpoint(reference, runs_dir)
    prepared = open_prepared(Run(run).recipe_of(entry.step), data_dir)
    return prepared.tokenizer(), prepared, positions


def _copy_others(original: Path, folder: Path) -> None:
    """Tokenizer, model card and what else is beside the weights, without code and weights in other forms.

    Raises:
        UserError: a file is a link out of the folder.
    """
    from llmrecipes.hf.reading import OTHER_WEIGHTS, PICKLES

    weights = {path for pattern in ("*.safetensors", *PICKLES, *OTHER_WEIGHTS) for path in original.glob(pattern)}
    for path in sorted(set(original.iterdir()) - weights):
        skipped = path.suffix in (".py", ".pt2") or path.name.endswith(".index.json") or path.name.startswith(".")
        if path.is_file() and not skipped and not (folder / path.name).exists():
            with open_file(path, root=model_root(original)) as source, (folder / path.name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
