"""The two parts together: items to vectors, histories to queries; a score is their dot product.

Letters: B windows, L slots, n items, h joint_dim.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from habitus.data import Fields
from habitus.errors import ModelError
from habitus.model.contextualizer import Contextualizer, ContextualizerOutput
from habitus.model.embedder import Embedder, TextEncoder, check_item_fields
from habitus.model.event_text import check_shared
from habitus.model.features import Categories
from habitus.model.init import ParameterInfo, init_weights, parameter_info, query_scale
from habitus.model.tensors import BatchTensors, ItemTensors
from habitus.recipe import ModelRecipe


class BehaviorModel(nn.Module):
    """Embedder and contextualizer for the fields of a dataset, at the sizes of a recipe.

    The caller embeds each unique item of a step once, looks up the vectors of the events, computes queries
    and scores them against the vectors of the candidates. Without a seed the weights are left uninitialised, to be
    loaded.
    """

    def __init__(self, fields: Fields, recipe: ModelRecipe, *, seed: int | None = 0) -> None:
        super().__init__()
        check_item_fields(fields)
        if recipe.joint_dim % 4:
            raise ModelError(
                f"joint_dim = {recipe.joint_dim} is not a multiple of 4",
                expected="a multiple of 4, of 8 from 64 on where speed matters",
                next_step=f"take joint_dim = {max(4, round(recipe.joint_dim / 4) * 4)}",
            )
        self.fields = fields
        self.recipe = recipe
        self.embedder = Embedder(fields.item, recipe)
        check_shared(fields.event, recipe, self.embedder.text is not None)
        self.contextualizer = Contextualizer(fields.event, recipe, query_scale(recipe))
        if seed is not None:
            init_weights(self, seed, recipe.init)

    def embed_items(self, items: ItemTensors) -> Tensor:
        """Item vectors [n, h], float32, of unit RMS; the same whatever the order and padding of the items."""
        self._check_tokens(items)
        vectors: Tensor = self.embedder(items)
        return vectors

    def queries(self, batch: BatchTensors, event_embeddings: Tensor) -> Tensor:
        """Queries [B, L, h], float32, for the item after each slot, from the vectors of the events [B, L, h]."""
        return self.contextualize(batch, event_embeddings).queries

    def contextualize(self, batch: BatchTensors, event_embeddings: Tensor) -> ContextualizerOutput:
        """The same queries and, where the recipe has copying, copy scores."""
        expected = (*batch.positions.shape, self.recipe.joint_dim)
        if event_embeddings.shape != expected:
            raise ModelError(
                f"event embeddings have shape {tuple(event_embeddings.shape)}",
                expected=f"[B, L, joint_dim] = {expected}",
                next_step="look up embed_items' rows for batch.items",
            )
        output: ContextualizerOutput = self.contextualizer(batch, event_embeddings, self.shared_text)
        return output

    @property
    def shared_text(self) -> TextEncoder | None:
        """The items' text encoder where events share it."""
        return self.embedder.text if self.recipe.event_text == "shared" else None

    def twin(self) -> "BehaviorModel":
        """A model of the same parameters, the very tensors, that may be compiled without this one."""
        return cast("BehaviorModel", _twin_of(self))

    @torch.no_grad()
    def begin_with(self, other: "BehaviorModel") -> "BehaviorModel":
        """This model with the weights of one of the same recipe, whose categories may have fewer values."""
        for ours, theirs in zip(self.modules(), other.modules(), strict=True):
            if isinstance(ours, Categories) and isinstance(theirs, Categories):
                ours.weight.copy_(ours.rows_from(theirs))
                continue
            for name, parameter in ours.named_parameters(recurse=False):
                parameter.copy_(theirs.get_parameter(name))
        return self

    def freeze(self) -> "BehaviorModel":
        """This model with an embedder that no longer learns: stage 2."""
        self.embedder.requires_grad_(False)
        return self

    def parameter_groups(self) -> list[ParameterInfo]:
        """Every parameter that is still trained, as an optimizer should treat it."""
        return parameter_info(self, self.recipe)

    def compile_blocks(self) -> "BehaviorModel":
        """This model compiled piece by piece: each distinct layer once, whatever the depth, and what is around.

        Worth it on CUDA. On CPU it costs half a minute and gains little, so nothing does it by default.
        Table lookups stay as they are: compiled, their gradients would add in no fixed order.
        """
        embedder, contextualizer = self.embedder, self.contextualizer
        # A contextualizer has one shape per recipe, so its sizes are compiled in: left to itself, PyTorch turns the
        # rows of a second model in one process into symbols. Texts do come in several sizes.
        fixed: list[nn.Module | None] = [*contextualizer.blocks, contextualizer.copying]
        varying: list[nn.Module | None] = [] if embedder.text is None else [*embedder.text.blocks]
        # Few and large pieces: each costs a compiler's start, and waits for its own kernels.
        methods: list[tuple[nn.Module, str, bool | None]] = [
            (contextualizer, "prepare_inputs", False),
            (contextualizer, "project_out", False),
            (embedder, "fuse_fields", None),
        ]
        methods += [] if embedder.text is None else [(embedder.text, "add_positions", None)]
        for pieces, dynamic in ((fixed, False), (varying, None)):
            for piece in pieces:
                if piece is not None:
                    piece.compile(dynamic=dynamic)
        for owner, name, dynamic in methods:
            setattr(owner, name, torch.compile(getattr(owner, name), dynamic=dynamic))
        # All models of a process share the code of their layers, and beyond this many shapes it would run uncompiled.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 64)
        return self

    def _check_tokens(self, items: ItemTensors) -> None:
        """Refuse unknown tokens where the check is free: on CUDA it would make the device wait."""
        text, encoder = items.text, self.embedder.text
        if text is None or encoder is None or text.tokens.device.type != "cpu" or not text.tokens.numel():
            return
        largest, num_tokens = int(text.tokens.max()), encoder.tokens.shape[0]
        if largest >= num_tokens or int(text.tokens.min()) < 0:
            raise ModelError(
                f"token {largest if largest >= num_tokens else int(text.tokens.min())} is not in the vocabulary",
                expected=f"tokens from 0 to {num_tokens - 1}",
                next_step="encode the text with the tokenizer that the model was trained with",
            )


def _twin_of(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = {name: part if part is None else _twin_of(part) for name, part in module._modules.items()}
    return twin
