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
from typing import Any, cast

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
    EventText,
    MaskedWindows,
    TextEncoder,
    batch_tensors,
    item_tensors,
)
from habitus.serving import EncodedHistory, pack_histories
from habitus.typed import Typed

_EMBEDDER, _CONTEXTUALIZER, _MANIFEST = "embedder.onnx", "contextualizer.onnx", "manifest.json"
_TOLERANCE = 1e-4
_OPSET = 18
_EXTERNAL_BYTES = 1 << 30  # an ONNX file holds at most two gigabytes; larger weights go into a second file


class OnnxFiles(Typed):
    """manifest.json: inputs and outputs of the graphs, and how far they are from the original."""

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
        total = None if text is None else _encode_padded_text(text, values.pop(0))
        fields = dict(zip(self.names, values, strict=True))
        parts = self.embedder
        for encoder in (parts.categories, parts.category_lists, parts.numbers, parts.vectors):
            if encoder is not None:
                part = encoder(fields).float()
                total = part if total is None else total + part
        vectors: Tensor = self.embedder.fusion(total)
        return vectors


def _encode_padded_text(encoder: TextEncoder, tokens: Tensor) -> Tensor:
    """The text encoder over tokens [n, T] with padding at the end: [n, h]."""
    count, width = tokens.shape
    present = tokens != PADDING_TOKEN
    rows = nn.functional.embedding(tokens.flatten(), encoder.tokens)
    places = torch.arange(width, device=tokens.device).expand(count, width).flatten()
    # A text without tokens attends to its first slot, so that its softmax is not empty; the result is not used.
    first = torch.arange(width, device=tokens.device) == 0
    mask = (present | first)[:, None, None, :].expand(count, 1, width, width)
    x = encoder.add_positions(rows, places)
    for block in encoder.blocks:
        x = block(x, MaskedWindows(mask))
    x = encoder.norm(x).float().unflatten(0, (count, width)) * present[:, :, None]
    lengths = present.sum(1)
    mean = x.sum(1) / lengths.clamp(min=1)[:, None]
    return torch.where(lengths[:, None] > 0, mean, encoder.missing.float())


class PaddedEventText(nn.Module):
    """A text field of events over tokens [B, L, T], every slot by itself: [B, L, w] out."""

    def __init__(self, text: EventText) -> None:
        super().__init__()
        self.name, self.text = text.name, text

    def forward(self, tokens: Tensor, encoder: TextEncoder | None, _: object) -> Tensor:
        flat = tokens[..., : self.text.text_len].flatten(0, 1).long()
        if self.text.project is None or encoder is None:
            vectors = self.text.mean(flat)
        else:
            vectors = self.text.project(_encode_padded_text(encoder, flat))
        present = (flat != PADDING_TOKEN).any(1, keepdim=True)
        return torch.where(present, vectors, self.text.missing).unflatten(0, tokens.shape[:2])


class PaddedContextualizer(nn.Module):
    """The contextualizer over event vectors [B, L, h], lengths [B] and event fields [B, L]; tokens of texts [B, L, T].

    Queries [B, h] out; where the recipe has `copying`, also the copy score of each event for its own item [B, L].
    """

    def __init__(
        self, contextualizer: Contextualizer, fields: Sequence[Field], text_encoder: TextEncoder | None
    ) -> None:
        super().__init__()
        self.contextualizer = contextualizer
        self.names = [field.name for field in fields]
        self.text_encoder = text_encoder  # that of the items, where events share it
        texts = [cast(EventText, text) for text in contextualizer.events.texts]
        contextualizer.events.texts = nn.ModuleList(PaddedEventText(text) for text in texts)

    def forward(self, events: Tensor, lengths: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        count, width = events.shape[:2]
        slots = torch.arange(width, device=events.device).expand(count, width)
        # Attention is causal, so the last event of a history does not see what stands after it.
        batch = BatchTensors(
            items=slots,
            targets=slots,
            positions=slots,
            segments=torch.zeros_like(slots),
            boundaries=slots,
            fields=dict(zip(self.names, fields, strict=True)),
        )
        output = self.contextualizer(batch, events, self.text_encoder)
        parts = [output.queries] if output.copy_scores is None else [output.queries, output.copy_scores]
        last = (lengths - 1)[:, None, None]
        return tuple(part.gather(1, last.expand(count, 1, part.shape[2])).squeeze(1) for part in parts)


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
    """Write both graphs to a new folder, once onnxruntime gives the same results as the original."""
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists already", next_step="remove it, or name another folder")
    _require_onnx()
    model = copy.deepcopy(bundle.model).to("cpu").float().eval()
    parts = {_EMBEDDER: _embedder_part(model), _CONTEXTUALIZER: _contextualizer_part(model, bundle.recipe.data.seq_len)}
    try:
        with staged_folder(folder) as stage:
            differences = {name: _write(stage / name, part) for name, part in parts.items()}
            for name in ("encoders.json", "schema.toml", "tokenizer.json"):  # what turns raw values into inputs
                if (bundle.path / name).exists():
                    shutil.copyfile(bundle.path / name, stage / name)
            files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
            manifest = OnnxFiles(
                bundle_checksum=bundle.checksum,
                embedder_inputs=_describe_inputs(parts[_EMBEDDER]),
                contextualizer_inputs=_describe_inputs(parts[_CONTEXTUALIZER]),
                largest_difference=differences,
                files=files,
            )
            manifest.write(stage / _MANIFEST)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return manifest


def _embedder_part(model: BehaviorModel) -> _Part:
    fields = model.fields.item
    inputs, names = {}, {}
    for field in fields:
        if field.kind == "text":
            inputs["tokens"] = _random_tokens(7, model.recipe.text_len, field.size)
    for field in fields:
        if field.kind != "text":
            name = _graph_name(field.name, inputs)
            names[name], inputs[name] = field.name, _random_values(field, (7,))

    def original(values: list[Tensor]) -> tuple[Tensor, ...]:
        arrays = [value.numpy() for value in values]
        tokens = arrays.pop(0).astype(np.int32) if "tokens" in inputs else None
        features = ItemFeatures(tokens, dict(zip(names.values(), arrays, strict=True)))
        return (model.embed_items(item_tensors(features, model.recipe)),)

    return _Part(PaddedEmbedder(model.embedder, fields), inputs, [{0: "items"}] * len(inputs), names, original)


def _contextualizer_part(model: BehaviorModel, window: int) -> _Part:
    count, width = 3, min(5, window)
    fields = model.fields.event
    random = torch.Generator().manual_seed(0)
    events = torch.randn(count, width, model.recipe.joint_dim, generator=random)
    inputs = {"events": events, "lengths": torch.tensor([1, width, max(1, width - 2)])}
    axes, names = [{0: "histories", 1: "slots"}, {0: "histories"}], {}
    for field in fields:
        name = _graph_name(field.name, inputs)
        names[name], inputs[name] = field.name, _random_values(field, (count, width), model.recipe.text_len)
        axes.append({0: "histories", 1: "slots"})

    def original(values: list[Tensor]) -> tuple[Tensor, ...]:
        vectors, lengths = values[0], values[1].tolist()
        rows = np.arange(vectors.shape[0] * vectors.shape[1]).reshape(vectors.shape[:2])
        columns = {
            f.name: _as_stored(f, value.numpy(), model.fields.text_len)
            for f, value in zip(fields, values[2:], strict=True)
        }
        histories = [
            EncodedHistory(rows[number, :length], {name: column[number, :length] for name, column in columns.items()})
            for number, length in enumerate(lengths)
        ]
        batch, windows, slots = pack_histories(histories, model.fields)
        event_vectors = vectors.flatten(0, 1)[torch.from_numpy(batch.items)]
        output = model.contextualize(batch_tensors(batch), event_vectors)
        queries = output.queries[torch.from_numpy(windows), torch.from_numpy(slots)]
        if output.copy_scores is None:
            return (queries,)
        copy_scores = torch.full(vectors.shape[:2], MASKED_COPY_SCORE)
        for number, (window, slot, length) in enumerate(zip(windows, slots, lengths, strict=True)):
            copy_scores[number, :length] = output.copy_scores[window, slot, slot + 1 - length : slot + 1]
        return queries, copy_scores

    outputs = ("vectors",) if model.contextualizer.copying is None else ("vectors", "copying")
    module = PaddedContextualizer(copy.deepcopy(model.contextualizer), fields, model.shared_text)
    return _Part(module, inputs, axes, names, original, outputs)


def _as_stored(field: Field, values: np.ndarray, text_len: int) -> np.ndarray:
    """Values as datasets hold them: of texts more tokens, perhaps, than the model reads."""
    if field.kind != "text":
        return values
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, text_len - values.shape[-1])])


def _graph_name(field: str, taken: Mapping[str, Any]) -> str:
    """A name that ONNX allows, and that no other input has."""
    name = "field_" + re.sub(r"[^A-Za-z0-9_]", "_", field)
    while name in taken:
        name += "_"
    return name


def _random_tokens(count: int, width: int, size: int) -> Tensor:
    """Texts of all lengths, the empty one among them."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, size, (count, width), generator=random)
    return tokens * (torch.arange(width) < torch.arange(count)[:, None] * width // max(count - 1, 1))


def _random_values(field: Field, shape: tuple[int, ...], text_len: int = 0) -> Tensor:
    """Values of a field, missing ones among them."""
    random = torch.Generator().manual_seed(2)
    size = (*shape, *field.row_shape(text_len))
    if field.kind == "text":
        return _random_tokens(shape[0] * shape[1], text_len, field.size).unflatten(0, shape)
    if field.is_coded:
        return torch.randint(0, field.size, size, generator=random)
    values = torch.randn(size, generator=random) * field.std + field.mean
    values.view(shape[0], -1)[0] = torch.nan
    return values


def _write(path: Path, part: _Part) -> float:
    """Export one part and compare; returns the largest difference."""
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
            opset_version=_OPSET,
            dynamo=True,
            external_data=size > _EXTERNAL_BYTES,
            verbose=False,
        )
    return max(_measure_difference(path, part, times) for times in (1, 3))


def _measure_difference(path: Path, part: _Part, times: int) -> float:
    """The largest difference between onnxruntime and the original on the inputs, repeated; a large one is an error."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    repeated = {name: one.repeat(times, *([1] * (one.ndim - 1))) for name, one in part.inputs.items()}
    results = session.run(None, {name: one.numpy() for name, one in repeated.items()})
    with torch.no_grad():
        expected = [one.numpy() for one in part.original(list(repeated.values()))]
    difference = max(
        float(np.abs(np.asarray(result) - truth).max()) for result, truth in zip(results, expected, strict=True)
    )
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"{path.name} differs from the model by {difference:.2g}",
            expected=f"at most {_TOLERANCE:g}",
            next_step="report this with the versions of torch, onnx and onnxruntime",
        )
    return difference


def _describe_inputs(part: _Part) -> dict[str, str]:
    """Type, shape and field of each input, as text."""
    inputs = {}
    for (name, one), free in zip(part.inputs.items(), part.axes, strict=True):
        shape = ", ".join(free.get(axis, str(size)) for axis, size in enumerate(one.shape))
        field = f" of {part.fields[name]!r}" if name in part.fields else ""
        inputs[name] = f"{str(one.dtype).removeprefix('torch.')} [{shape}]{field}"
    return inputs


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", next_step="pip install 'habitus[onnx]'") from error
