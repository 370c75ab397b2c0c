"""benchmarks/model.py replaces parts of a layer by the usual forms: they should still compute what the layer does."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from habitus.data.fields import Fields
from habitus.model import BehaviorModel, MaskedWindows, batch_tensors, layers
from habitus.model.attention import attend
from habitus.recipe import ModelRecipe


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("model_jobs")


@pytest.mark.parametrize(
    "owner, name, form",
    [
        (layers, "attend", lambda jobs: partial(jobs._attend_whole, 2)),
        (layers, "attend", lambda jobs: jobs._attend_rope),
        (layers.Block, "forward", lambda jobs: jobs._norms_weigh_rows),
    ],
    ids=["whole windows", "rope by PyTorch", "norms weigh rows"],
)
def test_forms_of_a_layer_give_its_queries(
    owner: Any, name: str, form: Callable[[Any], Any], jobs: Any, shaken: Callable[..., Any]
) -> None:
    fields = Fields(item=jobs.FIELDS.item, event=(), text_len=jobs.T)
    model = shaken(BehaviorModel(fields, ModelRecipe(joint_dim=16, width=32, depth=2, head_dim=16)))
    windows, events = batch_tensors(jobs.drawn_batch(2, 100, users=1)), torch.randn(2, jobs.L, 16)
    expected = model.queries(windows, events)
    with jobs._replaced(owner, name, form(jobs)):
        torch.testing.assert_close(model.queries(windows, events), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_windows_of_several_users_may_see(jobs: Any) -> None:
    windows, qkv = batch_tensors(jobs.drawn_batch(2, 100, users=4)), torch.randn(2 * jobs.L, 3, 1, 16)
    flexible = jobs.FlexWindows(windows.boundaries, 2, compiled=False)
    torch.testing.assert_close(flexible(qkv), attend(qkv, MaskedWindows.causal(windows.segments)), rtol=1e-4, atol=1e-5)
