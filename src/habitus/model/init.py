"""Initial weights, and how an optimizer should treat each parameter.

The scale of the initial weights decides whether a run leaves the plateau at the popularity level: fan-in scaled
matrices, residual branches that begin at zero, small tables, and a small gain on the scores. The output matrix begins
as the input matrix, transposed: a query starts near the event that it follows, so that repeating items and finding
similar ones need not be learned from nothing.
"""

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from habitus.randomness import Stream, random_words
from habitus.recipe import ModelRecipe

Role = Literal["embedding", "hidden", "output", "norm", "gain"]

INITIAL_GAIN = 0.1
TABLE_STD = 0.02  # of token and position rows
FIELD_STD = 0.2  # of category rows and of what stands for missing
PLAIN_STD = 0.02  # of every matrix and table under `plain`
MUP_BASE_FAN_IN = 128  # the fan-in at which `mup` steps exactly as `default` does
MUP_BASE_JOINT_DIM = 64  # the joint_dim at which `mup` scores exactly as `default` does

_OUTPUT_WEIGHT = "contextualizer.output.weight"
_TRANSPOSED_FROM = {_OUTPUT_WEIGHT: "contextualizer.input.weight"}  # starts as another parameter's draw, transposed
_COPY_GATE = "contextualizer.copying.gate.weight"
_CATEGORY_TABLES = (".categories.weight", ".category_lists.weight")
_CUT = 2.0  # truncated normal: no draw beyond two standard deviations...
_CUT_STD = 0.8796256610342398  # ...which leaves it this standard deviation, divided out again
# Blocks of four numbers drawn at a time: a CPU's cache should hold the integers, a GPU is launched few times.
_CHUNK_ON_CPU, _CHUNK = 1 << 18, 1 << 22


@dataclass(frozen=True)
class ParameterInfo:
    """One trainable parameter, as an optimizer should treat it."""

    name: str
    parameter: nn.Parameter
    role: Role
    lr_multiplier: float
    weight_decay: bool
    muon: bool  # a hidden matrix, which Muon may orthogonalise
    stacked: int  # matrices stacked in this one along the first axis: 3 for queries, keys and values
    vocabulary: bool = False  # a table of tokens or categories, which decays only where a recipe says so


def init_weights(model: nn.Module, seed: int, init: str = "default") -> None:
    """Fill every parameter, each from its own counter stream: neither order nor device changes a draw, except that
    another device may round the last digit differently."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    rule, transposed = (_plain_distribution, {}) if init == "plain" else (_distribution, _TRANSPOSED_FROM)
    distributions = {name: rule(name, parameter) for name, parameter in parameters.items()}
    random = [name for name, (_, std) in distributions.items() if std and name not in transposed]
    drawn = truncated_normals({name: parameters[name].numel() for name in random}, seed, device)
    with torch.no_grad():
        for name, parameter in parameters.items():
            constant, std = distributions[name]
            if name in transposed:
                parameter.copy_(drawn[transposed[name]].view(parameter.T.shape).T * std)
            elif std:
                parameter.copy_(drawn[name].view(parameter.shape) * std)
            else:
                parameter.fill_(constant)


def parameter_info(model: nn.Module, recipe: ModelRecipe) -> list[ParameterInfo]:
    """Every parameter that is still trained, with its role, rate multiplier, decay and whether Muon may take it."""
    return [
        ParameterInfo(
            name=name,
            parameter=parameter,
            role=(role := role_of(name)),
            lr_multiplier=lr_multiplier(role, parameter, recipe.init),
            # Rows of tables are left alone between visits, and vectors hold scales: neither should shrink.
            weight_decay=parameter.ndim == 2 and not _is_table(name),
            muon=role == "hidden",
            stacked=3 if name.endswith("qkv.weight") else 1,
            vocabulary=name.endswith((".tokens", *_CATEGORY_TABLES)),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def role_of(name: str) -> Role:
    """What a parameter is to the width-scaling rules.

    `embedding` is everything that reads the outside world: tables, and projections of numbers and vectors,
    whose fan-in does not grow with the model.
    """
    if name.endswith("gain"):
        return "gain"
    if name.endswith("norm.weight"):
        return "norm"
    if name in (_OUTPUT_WEIGHT, _COPY_GATE):
        return "output"
    if name.endswith((".missing", ".tokens", ".positions", ".lags")) or any(
        part in name for part in (".categories.", ".category_lists.", ".numbers.", ".vectors.")
    ):
        return "embedding"
    return "hidden"


def lr_multiplier(role: Role, parameter: Tensor, init: str) -> float:
    """1 under `default` and `plain`; under `mup_lr` 1/fan_in for matrices inside the model (the paper's rule, to the
    letter); under `mup` 128/fan_in, the same rule anchored at a fan-in of 128."""
    if init in ("default", "plain") or role not in ("hidden", "output"):
        return 1.0
    fan_in = parameter.shape[1]
    return 1.0 / fan_in if init == "mup_lr" else MUP_BASE_FAN_IN / fan_in


def query_scale(recipe: ModelRecipe) -> float:
    """The output multiplier: under `mup` a score is a mean over joint_dim rather than a sum."""
    return MUP_BASE_JOINT_DIM / recipe.joint_dim if recipe.init == "mup" else 1.0


def _distribution(name: str, parameter: Tensor) -> tuple[float, float]:
    """(constant, standard deviation) of a parameter's initial values; the constant counts where std is 0."""
    role = role_of(name)
    if role == "gain":
        return INITIAL_GAIN, 0.0
    if role == "norm":
        return 1.0, 0.0
    if name.endswith(("attention_out.weight", "mlp_out.weight", "fusion.out.weight")):
        return 0.0, 0.0  # a residual branch begins as nothing, at any depth
    if name.endswith(("copying.ask.weight", "copying.gate.weight", "copying.lags")):
        return 0.0, 0.0  # an event of the past begins with the weight of a candidate that scores 0
    if name.endswith((".tokens", ".positions")):
        return 0.0, TABLE_STD
    if _is_table(name):
        return 0.0, FIELD_STD
    return 0.0, parameter.shape[1] ** -0.5


def _plain_distribution(name: str, parameter: Tensor) -> tuple[float, float]:
    """The same for `plain`, the usual start of language models: one standard deviation for all that is multiplied or
    looked up, residual branches included, and scores as they come out."""
    role = role_of(name)
    if role in ("gain", "norm"):
        return 1.0, 0.0
    return (0.0, 0.0) if ".copying." in name else (0.0, PLAIN_STD)


def _is_table(name: str) -> bool:
    return name.endswith((".missing", ".tokens", ".positions", *_CATEGORY_TABLES))


def truncated_normals(counts: dict[str, int], seed: int, device: torch.device) -> dict[str, Tensor]:
    """So many numbers of unit variance for each name, keyed by (seed, name), drawn on a device.

    All names at once: a generator is a hundred small operations, which take as long for one name as for all.
    """
    sizes = [-(-count // 4) for count in counts.values()]  # in blocks of four
    keys = torch.tensor([zlib.crc32(name.encode()) for name in counts], device=device)
    begins = torch.tensor([0, *accumulate(sizes)], device=device)
    edge = torch.special.erf(torch.tensor(_CUT / 2**0.5, dtype=torch.float64, device="cpu")).item()
    flat = torch.empty(4 * sum(sizes), device=device)
    chunk = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK
    for begin in range(0, sum(sizes), chunk):
        block = torch.arange(begin, min(begin + chunk, sum(sizes)), device=device)
        owner = torch.searchsorted(begins, block, right=True) - 1
        drawn = torch.stack(random_words(seed, Stream.INIT, keys[owner], block - begins[owner]), 1).flatten()
        uniform = (drawn.double() + 0.5) * 2.0**-32
        flat[4 * begin : 4 * (begin + len(block))] = ((2 * uniform - 1) * edge).erfinv().float() * (2**0.5 / _CUT_STD)
    parts = flat.split([4 * size for size in sizes])
    return {name: part[:count] for (name, count), part in zip(counts.items(), parts, strict=True)}
