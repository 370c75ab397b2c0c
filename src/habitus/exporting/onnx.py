"""The two parts of a model as ONNX files, for places without torch; each is checked against the original.

    n  items      T  text tokens      B  histories      L  slots      h  joint_dim

The embedder packs text without its padding, and the contextualizer several users into a window. Neither is needed
outside of training, so the exported graphs are plain: texts padded to T, one history per row padded at its end.
"""

import copy
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field as Described
from torch import Tensor, nn

from habitus.data import PADDING_TOKEN, Field, ItemFeatures
from habitus.errors import ConfigError, ModelError
from habitus.files import sha256_of, staged_folder
from habitus.model import (
    MASKED_COPY_SCORE,
    BatchTensors,
    BehaviorModel,
    Bundle,
    Contextualizer,
    Embedder,
    MaskedWindows,
    TextEncoder,
    batch_tensors,
    item_tensors,
)
from habitus.serving import History, packed
from habitus.typed import Typed

EMBEDDER, CONTEXTUALIZER, MANIFEST = "embedder.onnx", "contextualizer.onnx", "manifest.json"
TOLERANCE = 1e-4
OPSET = 18
EXTERNAL_BYTES = 1 << 30  # an ONNX file holds at most two gigabytes; larger weights lie beside it


class OnnxFiles(Typed):
    """manifest.json: what the graphs take and give, and how far they are from the original."""

    bundle_checksum: str
    embedder_inputs: dict[str, str] = Described(description="Type, shape and field by the graph's name.")
    contextualizer_inputs: dict[str, str]
    largest_difference: dict[str, float] = Described(description="From torch, over the inputs of the check.")
    files: dict[str, str] = Described(description="SHA-256 by name.")


class PaddedEmbedder(nn.Module):
    """The embedder over padded tokens [n, T] and one tensor per field; item vectors [n, h] out."""

    def __init__(self, embedder: Embedder, fields: Sequence[Field]) -> None:
        super().__init__()
        self.embedder = embedder
        self.names = [field.name for field in fields if field.kind != "text"]

    def forward(self, *inputs: Tensor) -> Tensor:
        values = list(inputs)
        text = self.embedder.text
        total = None if text is None else padded_text(text, values.pop(0))
        fields = dict(zip(self.names, values, strict=True))
        for encoder in (self.embedder.categories, self.embedder.numbers, self.embedder.vectors):
            if encoder is not None:
                part = encoder(fields).float()
                total = part if total is None else total + part
        vectors: Tensor = self.embedder.fusion(total)
        return vectors


def padded_text(encoder: TextEncoder, tokens: Tensor) -> Tensor:
    """What the text encoder makes of tokens [n, T] with padding at the end: [n, h]."""
    count, width = tokens.shape
    present = tokens != PADDING_TOKEN
    rows = nn.functional.embedding(tokens.flatten(), encoder.tokens)
    places = torch.arange(width, device=tokens.device).expand(count, width).flatten()
    # A text without tokens sees its first slot, so that its softmax is one of something; the result is not used.
    first = torch.arange(width, device=tokens.device) == 0
    mask = (present | first)[:, None, None, :].expand(count, 1, width, width)
    x = encoder.add_positions(rows, places)
    for block in encoder.blocks:
        x = block(x, MaskedWindows(mask))
    x = encoder.norm(x).float().unflatten(0, (count, width)) * present[:, :, None]
    lengths = present.sum(1)
    mean = x.sum(1) / lengths.clamp(min=1)[:, None]
    return torch.where(lengths[:, None] > 0, mean, encoder.missing.float())


class PaddedContextualizer(nn.Module):
    """The contextualizer over event vectors [B, L, h], lengths [B] and event fields [B, L].

    Queries [B, h] out; where the recipe has `copying`, also how much each event speaks for its own item [B, L].
    """

    def __init__(self, contextualizer: Contextualizer, fields: Sequence[Field]) -> None:
        super().__init__()
        self.contextualizer = contextualizer
        self.names = [field.name for field in fields]

    def forward(self, events: Tensor, lengths: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        count, width = events.shape[:2]
        slots = torch.arange(width, device=events.device).expand(count, width)
        # Attention never looks ahead, so what stands after a history's end is not seen by its last event.
        batch = BatchTensors(
            items=slots,
            targets=slots,
            positions=slots,
            segments=torch.zeros_like(slots),
            boundaries=slots,
            fields=dict(zip(self.names, fields, strict=True)),
        )
        read = self.contextualizer(batch, events)
        found = [read.queries] if read.copy_scores is None else [read.queries, read.copy_scores]
        last = (lengths - 1)[:, None, None]
        return tuple(part.gather(1, last.expand(count, 1, part.shape[2])).squeeze(1) for part in found)


@dataclass(frozen=True)
class _Part:
    """One graph to write: the plain module, its inputs, and the original that it must agree with."""

    module: nn.Module
    inputs: dict[str, Tensor]  # by the graph's name, in order
    axes: list[dict[int, str]]  # axes of free size
    fields: dict[str, str]  # graph's name -> field
    original: Callable[[list[Tensor]], tuple[Tensor, ...]]
    outputs: tuple[str, ...] = ("vectors",)


def export_onnx(bundle: Bundle, folder: str | Path) -> OnnxFiles:
    """Write both graphs to a folder, which must not exist, once onnxruntime has answered as the original does."""
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists already", next_step="remove it, or name another folder")
    _require()
    model = copy.deepcopy(bundle.model).to("cpu").float().eval()
    parts = {EMBEDDER: _embedder(model), CONTEXTUALIZER: _contextualizer(model, bundle.recipe.data.seq_len)}
    try:
        with staged_folder(folder) as stage:
            off = {name: _write(stage / name, part) for name, part in parts.items()}
            for name in ("encoders.json", "schema.toml", "tokenizer.json"):  # what turns raw values into inputs
                if (bundle.path / name).exists():
                    shutil.copyfile(bundle.path / name, stage / name)
            files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
            made = OnnxFiles(
                bundle_checksum=bundle.checksum,
                embedder_inputs=_described(parts[EMBEDDER]),
                contextualizer_inputs=_described(parts[CONTEXTUALIZER]),
                largest_difference=off,
                files=files,
            )
            made.write(stage / MANIFEST)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return made


def _embedder(model: BehaviorModel) -> _Part:
    fields = model.fields.item
    inputs, names = {}, {}
    for field in fields:
        if field.kind == "text":
            inputs["tokens"] = _tokens(7, model.recipe.text_len, field.size)
    for field in fields:
        if field.kind != "text":
            name = _graph_name(field.name, inputs)
            names[name], inputs[name] = field.name, _values(field, (7,))

    def original(values: list[Tensor]) -> tuple[Tensor, ...]:
        given = [value.numpy() for value in values]
        tokens = given.pop(0).astype(np.int32) if "tokens" in inputs else None
        features = ItemFeatures(tokens, dict(zip(names.values(), given, strict=True)))
        return (model.embed_items(item_tensors(features, model.recipe)),)

    return _Part(PaddedEmbedder(model.embedder, fields), inputs, [{0: "items"}] * len(inputs), names, original)


def _contextualizer(model: BehaviorModel, window: int) -> _Part:
    count, width = 3, min(5, window)
    fields = model.fields.event
    random = torch.Generator().manual_seed(0)
    events = torch.randn(count, width, model.recipe.joint_dim, generator=random)
    inputs = {"events": events, "lengths": torch.tensor([1, width, max(1, width - 2)])}
    axes, names = [{0: "histories", 1: "slots"}, {0: "histories"}], {}
    for field in fields:
        name = _graph_name(field.name, inputs)
        names[name], inputs[name] = field.name, _values(field, (count, width))
        axes.append({0: "histories", 1: "slots"})

    def original(values: list[Tensor]) -> tuple[Tensor, ...]:
        vectors, lengths = values[0], values[1].tolist()
        rows = np.arange(vectors.shape[0] * vectors.shape[1]).reshape(vectors.shape[:2])
        histories = [
            History(
                rows[number, :length],
                {f.name: column[number, :length].numpy() for f, column in zip(fields, values[2:], strict=True)},
                frozenset(),
                (),
            )
            for number, length in enumerate(lengths)
        ]
        batch, windows, slots = packed(histories, fields)
        looked_up = vectors.flatten(0, 1)[torch.from_numpy(batch.items)]
        read = model.contextualize(batch_tensors(batch), looked_up)
        queries = read.queries[torch.from_numpy(windows), torch.from_numpy(slots)]
        if read.copy_scores is None:
            return (queries,)
        said = torch.full(vectors.shape[:2], MASKED_COPY_SCORE)
        for number, (window, slot, length) in enumerate(zip(windows, slots, lengths, strict=True)):
            said[number, :length] = read.copy_scores[window, slot, slot + 1 - length : slot + 1]
        return queries, said

    outputs = ("vectors",) if model.contextualizer.copying is None else ("vectors", "copying")
    return _Part(PaddedContextualizer(model.contextualizer, fields), inputs, axes, names, original, outputs)


def _graph_name(field: str, taken: Mapping[str, Any]) -> str:
    """A name that ONNX allows, and that no other input has."""
    name = "field_" + re.sub(r"[^A-Za-z0-9_]", "_", field)
    while name in taken:
        name += "_"
    return name


def _tokens(count: int, width: int, size: int) -> Tensor:
    """Texts of all lengths, the empty one among them."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, size, (count, width), generator=random)
    return tokens * (torch.arange(width) < torch.arange(count)[:, None] * width // max(count - 1, 1))


def _values(field: Field, shape: tuple[int, ...]) -> Tensor:
    """Values of a field, missing ones among them."""
    random = torch.Generator().manual_seed(2)
    if field.kind == "category":
        return torch.randint(0, field.size, shape, generator=random)
    size = (*shape, field.size) if field.kind == "vector" else shape
    values = torch.randn(size, generator=random) * field.std + field.mean
    values.view(shape[0], -1)[0] = torch.nan
    return values


def _write(path: Path, part: _Part) -> float:
    """Export one part and compare; returns the largest difference seen."""
    shapes = tuple({axis: torch.export.Dim(name) for axis, name in one.items()} for one in part.axes)
    fixed, free = (shapes[:2], shapes[2:]) if isinstance(part.module, PaddedContextualizer) else ((), shapes)
    size = sum(parameter.nbytes for parameter in part.module.parameters())
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of axes, and about packages that are not needed
        torch.onnx.export(
            part.module.eval(),
            tuple(part.inputs.values()),
            str(path),
            input_names=list(part.inputs),
            output_names=list(part.outputs),
            dynamic_shapes=(*fixed, free) if free else fixed,  # a model without event fields has no more inputs
            opset_version=OPSET,
            dynamo=True,
            external_data=size > EXTERNAL_BYTES,
            verbose=False,
        )
    return max(_difference(path, part, times) for times in (1, 3))


def _difference(path: Path, part: _Part, times: int) -> float:
    """The largest difference between onnxruntime and the original on the inputs, repeated; a large one is an error."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    repeated = {name: one.repeat(times, *([1] * (one.ndim - 1))) for name, one in part.inputs.items()}
    found = session.run(None, {name: one.numpy() for name, one in repeated.items()})
    with torch.no_grad():
        expected = [one.numpy() for one in part.original(list(repeated.values()))]
    off = max(float(np.abs(np.asarray(one) - truth).max()) for one, truth in zip(found, expected, strict=True))
    if not off <= TOLERANCE:
        raise ModelError(
            f"{path.name} differs from the model by {off:.2g}",
            expected=f"at most {TOLERANCE:g}",
            next_step="report this with the versions of torch, onnx and onnxruntime",
        )
    return off


def _described(part: _Part) -> dict[str, str]:
    """Type, shape and field of each input, in words."""
    found = {}
    for (name, one), free in zip(part.inputs.items(), part.axes, strict=True):
        shape = ", ".join(free.get(axis, str(size)) for axis, size in enumerate(one.shape))
        field = f" of {part.fields[name]!r}" if name in part.fields else ""
        found[name] = f"{str(one.dtype).removeprefix('torch.')} [{shape}]{field}"
    return found


def _require() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed", next_step="pip install onnx onnxruntime onnxscript"
        ) from error
