"""How models start: draws keyed by seed and name, sizes as documented, rates that scale with width."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.init import truncated_normals
from habitus.recipe import ModelRecipe

RECIPE = ModelRecipe(joint_dim=64, text_len=12, text_depth=2, width=128, depth=2, head_dim=32)


def test_a_seed_and_a_name_decide_a_parameter_and_nothing_else_does(samples: SimpleNamespace) -> None:
    one, again = BehaviorModel(samples.fields, RECIPE, seed=5), BehaviorModel(samples.fields, RECIPE, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    other = BehaviorModel(samples.fields, RECIPE, seed=6)
    assert not torch.equal(one.contextualizer.input.weight, other.contextualizer.input.weight)
    # A model with fewer fields and more layers shares the draws of every parameter it has in common.
    deeper = RECIPE.model_copy(update={"depth": 3})
    fewer = BehaviorModel(Fields(item=samples.fields.item[:1], event=(), text_len=12), deeper, seed=5)
    for name in ("embedder.text.tokens", "contextualizer.blocks.1.qkv.weight"):
        assert torch.equal(one.get_parameter(name), fewer.get_parameter(name))


def test_a_plain_start_has_one_deviation_for_every_matrix_and_table(samples: SimpleNamespace) -> None:
    """Residual branches too, scores as they come out, and no rate is scaled; other starts are left as they were."""
    plain = BehaviorModel(samples.fields, RECIPE.model_copy(update={"init": "plain"}), seed=5)
    default = BehaviorModel(samples.fields, RECIPE, seed=5)
    for name in ("contextualizer.blocks.1.mlp_out.weight", "contextualizer.output.weight", "embedder.text.tokens"):
        assert plain.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.05)
    assert default.get_parameter("contextualizer.blocks.1.mlp_out.weight").abs().max() == 0
    assert {info.parameter.mean().item() for info in plain.parameter_groups() if info.role in ("gain", "norm")} == {1.0}
    assert {info.lr_multiplier for info in plain.parameter_groups()} == {1.0}
    recipe = RECIPE.model_copy(update={"init": "plain"})
    assert recipe.to_values() == {**RECIPE.to_values(), "init": "plain"}


def test_draws_are_a_normal_cut_at_two_deviations_with_unit_variance() -> None:
    drawn = truncated_normals({"weight": 301_000}, 3, torch.device("cpu"))["weight"].double()
    assert drawn.std().item() == pytest.approx(1, abs=0.005)
    assert drawn.mean().item() == pytest.approx(0, abs=0.005)
    assert drawn.abs().max().item() == pytest.approx(2 / 0.8796, abs=0.01)
    kurtosis = ((drawn**4).mean() / (drawn**2).mean() ** 2).item()
    assert kurtosis == pytest.approx(2.3659, abs=0.02)  # a normal cut at two deviations, by integration
    assert len(drawn.unique()) > 300_000 * 0.99


def test_a_draw_depends_on_nothing_that_is_drawn_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    together = truncated_normals({"a": 10, "b": 4097, "c": 1, "d": 40}, 7, cpu)
    assert {name: len(drawn) for name, drawn in together.items()} == {"a": 10, "b": 4097, "c": 1, "d": 40}
    monkeypatch.setattr("habitus.model.init._CHUNK_ON_CPU", 100)  # blocks: several chunks, cut within "b"
    for name, drawn in together.items():
        assert torch.equal(truncated_normals({name: len(drawn)}, 7, cpu)[name], drawn)
    assert not torch.equal(together["a"], together["b"][:10])


def test_sizes_at_the_start(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    block = model.contextualizer.blocks[0]
    assert block.qkv.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert block.mlp_up.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    for branch in (block.attention_out, block.mlp_out, model.embedder.fusion.out):
        assert branch.weight.abs().max().item() == 0
    assert model.embedder.text.tokens.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.contextualizer.gain.item() == pytest.approx(0.1)


def test_the_group_table_says_what_an_optimizer_needs(samples: SimpleNamespace) -> None:
    expected = {
        "embedder.text.tokens": ("embedding", False, False, 1),
        "embedder.text.positions": ("embedding", False, False, 1),
        "embedder.text.missing": ("embedding", False, False, 1),
        "embedder.categories.weight": ("embedding", False, False, 1),
        "embedder.numbers.weight": ("embedding", True, False, 1),
        "embedder.vectors.weights.0": ("embedding", True, False, 1),
        "embedder.fusion.up.weight": ("hidden", True, True, 1),
        "embedder.text.blocks.1.qkv.weight": ("hidden", True, True, 3),
        "contextualizer.input.weight": ("hidden", True, True, 1),
        "contextualizer.blocks.0.mlp_out.weight": ("hidden", True, True, 1),
        "contextualizer.blocks.0.mlp_norm.weight": ("norm", False, False, 1),
        "contextualizer.events.categories.weight": ("embedding", False, False, 1),
        "contextualizer.output.weight": ("output", True, False, 1),
        "contextualizer.gain": ("gain", False, False, 1),
    }
    groups = {info.name: info for info in BehaviorModel(samples.fields, RECIPE).parameter_groups()}
    result = {n: (groups[n].role, groups[n].weight_decay, groups[n].muon, groups[n].stacked) for n in expected}
    assert result == expected
    assert all(info.parameter.ndim == 2 for info in groups.values() if info.muon)


@pytest.mark.parametrize(
    ("init", "up", "down", "output", "table"),
    [("default", 1, 1, 1, 1), ("mup_lr", 1 / 128, 1 / 512, 1 / 128, 1), ("mup", 1, 0.25, 1, 1)],
)
def test_rate_multipliers(
    samples: SimpleNamespace, init: str, up: float, down: float, output: float, table: float
) -> None:
    model = BehaviorModel(samples.fields, RECIPE.model_copy(update={"init": init}))
    rates = {info.name: info.lr_multiplier for info in model.parameter_groups()}
    assert rates["contextualizer.blocks.0.mlp_up.weight"] == up
    assert rates["contextualizer.blocks.0.mlp_out.weight"] == down
    assert rates["contextualizer.output.weight"] == output
    assert rates["embedder.text.tokens"] == rates["contextualizer.norm.weight"] == table


def chain_of_events(n: int, B: int, L: int) -> tuple[ItemFeatures, Batch]:
    """n items with text and a category; in B full windows every other event follows from the one before it."""
    rng = np.random.default_rng(0)
    groups = {"group": np.arange(n, dtype=np.int32)}
    features = ItemFeatures(rng.integers(1, 50, (n, 6)).astype(np.int32), groups)
    items = rng.integers(0, n, (B, L + 1))
    items[:, 1::2] = (items[:, 0:-1:2] * 7 + 3) % n
    batch = Batch(
        items=items[:, :-1],
        targets=items[:, 1:],
        positions=np.tile(np.arange(L, dtype=np.int32), (B, 1)),
        segments=np.zeros((B, L), np.int32),
        boundaries=np.arange(B + 1, dtype=np.int32) * L,
        users=np.arange(B)[:, None],
        fields={},
    )
    return features, batch


def movement(init: str, width: int, seed: int, steps: int = 3) -> dict[str, float]:
    """Mean |change| of activations by a few Adam steps, at several places in the model."""
    text, group = Field(name="text", kind="text", size=50), Field(name="group", kind="category", size=40)
    sizes = {"joint_dim": width, "text_len": 6, "text_depth": 1, "width": width, "depth": 2, "head_dim": 16}
    recipe = ModelRecipe(**sizes, init=init)  # type: ignore[arg-type]
    features, batch = chain_of_events(n=4, B=8, L=16)
    items, windows = item_tensors(features, recipe), batch_tensors(batch)
    model = BehaviorModel(Fields(item=(text, group), event=(), text_len=6), recipe, seed=seed)
    groups = [{"params": [g.parameter], "lr": 1e-3 * g.lr_multiplier} for g in model.parameter_groups()]
    optimizer = torch.optim.Adam(groups)
    seen: dict[str, torch.Tensor] = {}
    last = model.contextualizer.blocks[-1]
    places = {
        "text": model.embedder.text.blocks[0],
        "attention": last.attention_out,
        "mlp": last.mlp_out,
        "stream": last,
        "output": model.contextualizer.output,
    }
    for name, module in places.items():
        module.register_forward_hook(lambda _module, _inputs, out, name=name: seen.update({name: out.detach()}))
    first = {}
    for step in range(steps + 1):
        vectors = model.embed_items(items)
        scores = model.queries(windows, vectors[windows.items]) @ vectors.T
        seen["scores"] = scores.detach()
        if step == 0:
            first = dict(seen)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), windows.targets.flatten()).backward()
        optimizer.step()
    return {name: (seen[name] - first[name]).abs().mean().item() for name in seen}


def drifts(init: str) -> dict[str, float]:
    """Slope of ln(movement) against ln(width) over a factor 4 of width, by place; the mean of four starts."""
    widths, seeds = (128, 256, 512), (1, 2, 3, 4)
    logs = {width: [movement(init, width, seed) for seed in seeds] for width in widths}
    places = logs[widths[0]][0]
    means = {p: [np.mean([math.log(m[p]) for m in logs[w]]) for w in widths] for p in places}
    return {place: float(np.polyfit(np.log(widths), values, 1)[0]) for place, values in means.items()}


def test_under_mup_activations_do_not_drift_with_width() -> None:
    slopes = drifts("mup")
    assert max(abs(slope) for slope in slopes.values()) < 0.25, slopes


def test_under_the_default_they_do_so_the_check_can_fail() -> None:
    slopes = drifts("default")
    assert all(slopes[place] > 0.6 for place in ("text", "attention", "mlp")), slopes


def test_scaling_rates_alone_leaves_the_scores_drifting() -> None:
    """The paper's rule has no output multiplier: what `mup` adds to `mup_lr` is needed."""
    slopes = drifts("mup_lr")
    assert slopes["scores"] > 0.5, slopes
