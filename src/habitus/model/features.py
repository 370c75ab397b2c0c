"""Encoders of categories, numbers and vectors; what is missing has a learned vector of its own.

Letters: ... any leading shape (n items, or B windows of L slots), C categories, F numbers, h width of the output.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from habitus.data import UNKNOWN_CODE, Field
from habitus.errors import ModelError
from habitus.model.layers import unit_rms
from habitus.sizing import NUMBER_FEATURES, NUMBER_FREQUENCIES, ONE_HOT_ROWS


class Categories(nn.Module):
    """The sum of one table row per category field. All tables lie in one matrix, one below the other."""

    def __init__(self, fields: Sequence[Field], h: int) -> None:
        super().__init__()
        self.names = tuple(field.name for field in fields)
        self.sizes = tuple(field.size for field in fields)
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), h))
        self.limits: Tensor  # [C]
        self.offsets: Tensor  # [C]: where each table begins
        self.register_buffer("limits", torch.tensor(self.sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([0, *accumulate(self.sizes)][:-1]), persistent=False)
        # A lookup's gradient would add many thousand events into a handful of rows; a product's does not.
        self.one_hot = sum(self.sizes) <= ONE_HOT_ROWS

    def rows_from(self, other: "Categories") -> Tensor:
        """The other's rows for these tables; a category that is new begins where it stood as an unknown one."""
        tables = zip(other.weight.split(other.sizes), self.sizes, strict=True)
        return torch.cat([torch.cat((rows, rows[:1].expand(size - len(rows), -1))) for rows, size in tables])

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        """[..., h]. A code beyond its table, from a newer catalogue perhaps, counts as unknown."""
        codes = torch.stack([column(values, name) for name in self.names], -1).long()  # [..., C]
        in_table = (codes >= 0) & (codes < self.limits)
        rows = torch.where(in_table, codes, UNKNOWN_CODE) + self.offsets
        if not self.one_hot:
            return F.embedding(rows, self.weight).sum(-2)
        every_row = torch.arange(self.weight.shape[0], device=rows.device)
        return (rows[..., None] == every_row).any(-2).to(self.weight.dtype) @ self.weight


class CategoryLists(Categories):
    """The sum over fields of the mean row of an item's categories, whose codes come as [..., width] for each field."""

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        """[..., h]. Zeros after the last code and codes beyond a table do not count; without any other, the item is
        unknown."""
        fields = zip(self.names, self.sizes, self.offsets, strict=True)
        parts = [self._mean_row(column(values, name).long(), size, first) for name, size, first in fields]
        return torch.stack(parts).sum(0)

    def _mean_row(self, codes: Tensor, size: int, first: Tensor) -> Tensor:
        present = (codes > UNKNOWN_CODE) & (codes < size)  # [..., width]
        count = present.sum(-1, keepdim=True)
        is_first = torch.arange(codes.shape[-1], device=codes.device) == 0
        weights = (present | (is_first & (count == 0))).to(self.weight.dtype) / count.clamp(min=1)
        rows = torch.where(present, codes, UNKNOWN_CODE) + first
        if not self.one_hot:
            return (F.embedding(rows, self.weight) * weights[..., None]).sum(-2)
        every_row = torch.arange(self.weight.shape[0], device=rows.device)
        return ((rows[..., None] == every_row) * weights[..., None]).sum(-2) @ self.weight


class Numbers(nn.Module):
    """A linear map of periodic features of each number, standardised as it is and by its logarithm."""

    def __init__(self, fields: Sequence[Field], h: int) -> None:
        super().__init__()
        self.names = tuple(field.name for field in fields)
        self.weight = nn.Parameter(torch.empty(h, NUMBER_FEATURES * len(self.names)))
        self.missing = nn.Parameter(torch.empty(len(self.names), h))
        centres = torch.tensor([(field.mean, field.log_mean) for field in fields])
        scales = torch.tensor([(field.std, field.log_std) for field in fields])
        self.centres: Tensor  # [F, 2]: of the numbers and of their logarithms
        self.scales: Tensor
        self.register_buffer("centres", centres, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.frequencies: Tensor  # angles per unit
        frequencies = 2 * torch.pi * 2.0 ** torch.arange(NUMBER_FREQUENCIES) / 32
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        """[..., h]. NaN is missing."""
        numbers = torch.stack([column(values, name).float() for name in self.names], -1)  # [..., F]
        absent = numbers.isnan()
        present = self.periodic(numbers.nan_to_num()) * ~absent[..., None]  # [..., F, features]
        return F.linear(present.flatten(-2), self.weight) + absent.to(self.missing.dtype) @ self.missing

    def periodic(self, x: Tensor) -> Tensor:
        """Sines and cosines [..., F, 32] of numbers: periods of 32 to 1/4 standard deviations, plain and log."""
        both = (torch.stack((x, x.sign() * x.abs().log1p()), -1) - self.centres) / self.scales
        # Beyond half the longest period on either side the slowest wave would repeat itself.
        angles = both.clamp(-16, 16)[..., None] * self.frequencies
        return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)


class Vectors(nn.Module):
    """The sum of one projection per vector field, each vector brought to unit RMS first."""

    def __init__(self, fields: Sequence[Field], h: int) -> None:
        super().__init__()
        self.names = tuple(field.name for field in fields)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(h, field.size)) for field in fields)
        self.missing = nn.Parameter(torch.empty(len(self.names), h))

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        """[..., h]. A vector with a NaN anywhere is missing."""
        total: Tensor | None = None
        for number, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            vector = column(values, name)
            absent = vector.isnan().any(-1, keepdim=True)
            projected = F.linear(unit_rms(vector.nan_to_num()), weight)
            part = torch.where(absent, self.missing[number].to(projected.dtype), projected)
            total = part if total is None else total + part
        assert total is not None, "built without vector fields"
        return total


def column(values: dict[str, Tensor], name: str) -> Tensor:
    """One field's values, or the error that says which were given."""
    if name not in values:
        raise ModelError(
            f"field {name!r} is not among the values given: {', '.join(sorted(values)) or 'none'}",
            expected="every field that the model was built for; missing values are NaN or code 0",
            next_step="make the values with the dataset (or encoders) that the model was trained on",
        )
    return values[name]


def fields_of_kind(fields: Sequence[Field], kind: str) -> list[Field]:
    return [field for field in fields if field.kind == kind]
