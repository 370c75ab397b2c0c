"""Optimizers against PyTorch's AdamW, a float64 twin of Muon, and themselves on shards."""

import copy
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from habitus.data.fields import Field, Fields
from habitus.errors import ModelError
from habitus.model import BehaviorModel
from habitus.model.init import ParameterInfo
from habitus.recipe import ModelRecipe, TrainRecipe
from habitus.training.optimizers import MOMENTUM, Optimizer, build_optimizer, clip_gradients, orthogonalize

FIELDS = Fields(
    item=(Field(name="title", kind="text", size=30), Field(name="brand", kind="category", size=9)),
    event=(Field(name="hours", kind="number"),),
    text_len=6,
)


def model_of(init: str = "default", seed: int = 0) -> BehaviorModel:
    recipe = ModelRecipe.model_validate(
        {"joint_dim": 8, "text_len": 6, "text_depth": 2, "width": 16, "depth": 2, "head_dim": 8, "init": init}
    )
    return BehaviorModel(FIELDS, recipe, seed=seed)


def recipe_of(optimizer: str = "adamw", **changes: object) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {"batch_sequences": 8, "steps": 20, "learning_rate": 1e-3, "optimizer": optimizer, **changes}
    )


def fill_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1


@pytest.mark.parametrize("init", ["default", "mup"])
def test_adamw_is_pytorchs(init: str) -> None:
    model = model_of(init)
    twin = copy.deepcopy(model)
    ours = build_optimizer(model, recipe_of(weight_decay=0.1))
    groups = [
        {"params": [i.parameter], "lr": i.lr_multiplier, "weight_decay": 0.1 * i.weight_decay}
        for i in twin.parameter_groups()
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for step in range(12):
        rate = 1e-2 / (1 + step)
        fill_gradients(list(model.parameters()), step)
        fill_gradients(list(twin.parameters()), step)
        for group, info in zip(theirs.param_groups, twin.parameter_groups(), strict=True):
            group["lr"] = rate * info.lr_multiplier
        theirs.step()
        ours.step(rate if step % 2 else torch.tensor(rate))
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_part_decays_at_its_own_rate(optimizer: str) -> None:
    """Without a gradient a step of rate 0.1 shrinks a weight by 0.1 times its decay and does nothing else."""
    decays = {"weight_decay": 0.1, "embedder_weight_decay": 0.5, "table_weight_decay": 0.2}
    for changes in ({"weight_decay": 0.1}, decays):
        model = model_of()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        ours = build_optimizer(model, recipe_of(optimizer, **changes))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ours.step(0.1)
        for name, parameter in model.named_parameters():
            decay = 0.0
            if name in ("embedder.text.tokens", "embedder.categories.weight"):
                decay = changes.get("table_weight_decay", 0.0)
            elif parameter.ndim == 2 and not name.endswith((".positions", ".missing")):
                decay = changes.get("embedder_weight_decay", 0.1) if name.startswith("embedder.") else 0.1
            torch.testing.assert_close(
                parameter.detach(), before[name] * (1 - 0.1 * decay), rtol=1e-6, atol=0, msg=name
            )


def test_decays_of_parts_stand_in_a_recipe_only_where_they_say_something() -> None:
    assert {"embedder_weight_decay", "table_weight_decay"}.isdisjoint(recipe_of().to_values())
    assert recipe_of(embedder_weight_decay=0).to_values()["embedder_weight_decay"] == 0


def muon_twin(start: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    """One matrix, in float64, step by step as the formula says."""
    weight, momentum = start.astype(np.float64), np.zeros(start.shape)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.95 * momentum + 0.05 * gradient
        x = ahead / np.linalg.norm(ahead)
        x = x if x.shape[0] <= x.shape[1] else x.T
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        x = x if ahead.shape[0] <= ahead.shape[1] else x.T
        weight = weight * (1 - rate * decay) - rate * 0.2 * max(start.shape) ** 0.5 * x
    return weight


def test_muon_is_its_float64_twin_and_adamw_does_the_rest() -> None:
    model, plain = model_of(), model_of()
    muon = build_optimizer(model, recipe_of("muon"))
    adam = build_optimizer(plain, recipe_of("adamw"))
    before = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    gradients: dict[str, list[np.ndarray]] = {name: [] for name in before}
    rates = [0.02 / (1 + step) for step in range(5)]
    for step, rate in enumerate(rates):
        fill_gradients(list(model.parameters()), step)
        fill_gradients(list(plain.parameters()), step)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name].append(parameter.grad.numpy().copy())
        muon.step(rate)
        adam.step(rate)
    hidden = {info.name: info for info in model.parameter_groups() if info.muon}
    assert {"contextualizer.blocks.0.qkv.weight", "contextualizer.input.weight"} <= hidden.keys()
    assert "contextualizer.output.weight" not in hidden
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in hidden:
            torch.testing.assert_close(parameter, others[name], rtol=0, atol=0)
            continue
        parts = hidden[name].stacked
        expected = np.concatenate(
            [
                muon_twin(
                    np.split(before[name], parts)[part], [np.split(g, parts)[part] for g in gradients[name]], rates, 0.1
                )
                for part in range(parts)
            ]
        )
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_orthogonalize_keeps_the_singular_vectors_and_levels_the_values() -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(3, 12, 40, generator=generator) * torch.tensor([1.0, 1e-6, 1e3])[:, None, None]
    result = orthogonalize(matrices)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    rotated = left.mT @ result.double() @ right.mT
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4
    assert not orthogonalize(torch.zeros(1, 3, 5)).any()


def test_an_update_of_muon_is_as_large_as_one_of_adamw() -> None:
    weight = nn.Parameter(torch.zeros(96, 32))
    info = ParameterInfo("w", weight, "hidden", 1.0, True, True, 3)
    optimizer = Optimizer([info], recipe_of("muon"))
    fill_gradients([weight], 0)
    optimizer.step(1.0)
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_loaded_state_continues_to_the_same_bits(name: str) -> None:
    model = model_of()
    optimizer = build_optimizer(model, recipe_of(name))
    for step in range(3):
        fill_gradients(list(model.parameters()), step)
        optimizer.step(0.01)
    twin = copy.deepcopy(model)
    other = build_optimizer(twin, recipe_of(name))
    other.load_state_tensors({key: value.clone() for key, value in optimizer.state_tensors().items()})
    for one, rule in ((model, optimizer), (twin, other)):
        fill_gradients(list(one.parameters()), 7)
        rule.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizer.state_tensors()["count"].item() == 4


def test_another_optimizers_state_is_refused() -> None:
    model = model_of()
    adam, muon = build_optimizer(model, recipe_of("adamw")), build_optimizer(model, recipe_of("muon"))
    with pytest.raises(ModelError, match="state differs"):
        muon.load_state_tensors(adam.state_tensors())
    odd = {name: torch.zeros(3) for name in adam.state_tensors()}
    with pytest.raises(ModelError, match=r"has shape \(3,\)"):
        adam.load_state_tensors(odd)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_frozen_embedder_and_missing_gradients_are_left_alone(name: str) -> None:
    model = model_of().freeze()
    optimizer = build_optimizer(model, recipe_of(name))
    assert not any("embedder" in state for state in optimizer.state_tensors())
    before = copy.deepcopy(model.state_dict())
    optimizer.step(0.1)  # no gradient anywhere
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    block = model.contextualizer.blocks[0]
    block.qkv.weight.grad = torch.ones_like(block.qkv.weight)
    optimizer.step(0.1)
    moved = [key for key, value in model.state_dict().items() if not torch.equal(before[key], value)]
    assert moved == ["contextualizer.blocks.0.qkv.weight"]


def test_zero_grad_forgets_or_clears_in_place() -> None:
    model = model_of()
    optimizer = build_optimizer(model, recipe_of())
    fill_gradients(list(model.parameters()), 0)
    memory = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(model.parameters(), memory, strict=True))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_clipped_to_the_norm_of_all_together() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients([a, b, c], 5.0).item() == 5.0
    assert a.grad.tolist() == [3.0, 0.0]
    assert clip_gradients([a, b, c], 1.0).item() == 5.0
    torch.testing.assert_close(a.grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(b.grad, torch.tensor([0.0, 0.8]))
    assert clip_gradients([c], 1.0).item() == 0.0
    a.grad[0] = torch.inf
    assert not clip_gradients([a, b], 1.0).isfinite()


def sharded_step(rank: int, folder: str, name: str) -> None:
    """Two steps on row shards (one matrix shard of unequal height); rank 0 keeps the result."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}-meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    infos = plain_infos()
    shards = [
        ParameterInfo(**{**vars(i), "parameter": nn.Parameter(distribute_tensor(i.parameter.data, mesh, [Shard(0)]))})
        for i in infos
    ]
    optimizer = Optimizer(shards, recipe_of(name))
    norms = []
    for step in range(2):
        fill_gradients([i.parameter for i in infos], step)
        for info, shard in zip(infos, shards, strict=True):
            assert info.parameter.grad is not None
            shard.parameter.grad = distribute_tensor(info.parameter.grad, mesh, [Shard(0)])
        norms.append(clip_gradients([shard.parameter for shard in shards], 0.5))
        optimizer.step(0.1)
    full: dict[str, Any] = {shard.name: shard.parameter.full_tensor().detach() for shard in shards}  # type: ignore[attr-defined]
    if rank == 0:
        torch.save({**full, "norms": torch.stack(norms)}, f"{folder}/{name}.pt")
    dist.barrier()  # nobody may leave while another still reads
    dist.destroy_process_group()


def plain_infos() -> list[ParameterInfo]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"stacked": (12, 4), "tall": (9, 5), "wide": (4, 7), "vector": (5,)}
    return [
        ParameterInfo(
            name,
            nn.Parameter(torch.randn(shape, generator=generator)),
            "hidden" if len(shape) == 2 else "norm",
            1.0,
            len(shape) == 2,
            len(shape) == 2,
            3 if name == "stacked" else 1,
        )
        for name, shape in shapes.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_two_ranks_with_shards_step_as_one_does(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=sharded_step, args=(rank, str(tmp_path), name)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    weights = torch.load(tmp_path / f"{name}.pt", weights_only=True)
    infos = plain_infos()
    optimizer = Optimizer(infos, recipe_of(name))
    norms = []
    for step in range(2):
        fill_gradients([info.parameter for info in infos], step)
        norms.append(clip_gradients([info.parameter for info in infos], 0.5))
        optimizer.step(0.1)
    torch.testing.assert_close(weights.pop("norms"), torch.stack(norms))
    for info in infos:
        torch.testing.assert_close(weights[info.name], info.parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_captured_step_is_the_one_on_cpu(name: str) -> None:
    here, there = model_of(), model_of().cuda()
    on_cpu, on_cuda = build_optimizer(here, recipe_of(name)), build_optimizer(there, recipe_of(name))
    rate = torch.zeros((), device="cuda")
    for parameter in there.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        clip_gradients(there.parameters(), 1.0)
        on_cuda.step(rate)

    side = torch.cuda.Stream()
    saved = copy.deepcopy(there.state_dict())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    there.load_state_dict(saved)
    on_cuda.load_state_tensors({key: torch.zeros_like(value) for key, value in on_cuda.state_tensors().items()})
    for number in range(5):
        fill_gradients(list(here.parameters()), number)
        for parameter, other in zip(there.parameters(), here.parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None
            parameter.grad.copy_(other.grad)
        rate.fill_(0.01)
        graph.replay()
        clip_gradients(here.parameters(), 1.0)
        on_cpu.step(0.01)
    for parameter, other in zip(there.parameters(), here.parameters(), strict=True):
        # bfloat16 products move Muon's singular values by about a hundredth of an update of 0.2·0.01 per entry.
        torch.testing.assert_close(parameter.cpu(), other, rtol=1e-4, atol=1e-6 if name == "adamw" else 2e-3)
    assert on_cuda.count.item() == 5
    assert MOMENTUM == 0.95
