"""Rows that every process makes and all of them read, with gradients that find their way back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gathered_rows(rows: Tensor, stride: int, world: int) -> Tensor:
    """The rows of all processes [world · stride, h] in rank order, each process's filled up with zeros.

    What comes back to them is summed over the processes and handed to the one that made the row.
    """
    if world == 1:
        return rows
    table: Tensor = _Gather.apply(rows, stride, world)
    return table


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, stride: int, world: int) -> Tensor:
        ctx.count, ctx.stride = len(rows), stride
        filled = rows.new_zeros(stride, rows.shape[1])
        filled[: len(rows)] = rows
        table = rows.new_empty(world * stride, rows.shape[1])
        dist.all_gather(list(table.chunk(world)), filled)
        return table

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        first = dist.get_rank() * ctx.stride
        return total[first : first + ctx.count], None, None


@torch.no_grad()
def summed_gradients(parameters: list[nn.Parameter]) -> None:
    """Every gradient becomes the sum over the processes; one message for all of them."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()
