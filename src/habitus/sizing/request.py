"""What the solver can be asked for, and which requests make no sense."""

from dataclasses import dataclass

from habitus.errors import ConfigError

MAX_COUNT = 1 << 31  # of slots, tokens, layers or widths; beyond it nothing is buildable
# The search takes seconds at 10²² FLOPs, minutes at 10²⁴, and grows with the root of the budget.
_LARGEST = {"flops": 1e25, "steps": 1e12, "data_ratio": 1e12}
_LEAST_DATA_RATIO = 1e-6


@dataclass(frozen=True)
class CellRequest:
    """What is fixed; the solver chooses what is None.

    One of `share` and `joint_dim` sizes the embedder. Two of `flops`, `data_ratio`, `steps` and the pair
    (`width`, `depth`) fix the rest; `width` or `depth` alone narrows the choice.
    """

    batch_sequences: int
    flops: float | None = None
    share: float | None = None
    joint_dim: int | None = None
    data_ratio: float | None = None
    steps: int | None = None
    width: int | None = None
    depth: int | None = None
    head_dim: int | None = None
    seq_len: int = 256
    text_len: int = 24
    text_depth: int = 4
    copying: bool = False
    attention: bool = False  # count attention's own term

    @property
    def shape_given(self) -> bool:
        return self.width is not None and self.depth is not None

    def targets(self) -> dict[str, float]:
        """The targets that the solver may miss by a little."""
        values = {
            "flops": self.flops,
            "embedder_share": self.share,
            "data_ratio": self.data_ratio,
            "steps": self.steps,
        }
        return {name: float(value) for name, value in values.items() if value is not None}


def check_request(request: CellRequest) -> None:
    """Refuse a request that cannot be meant, before any search."""
    _check_values(request)
    if (request.share is None) == (request.joint_dim is None):
        which = "neither" if request.share is None else "both"
        raise ConfigError(
            f"{which} of share and joint_dim given",
            expected="exactly one: either sizes the embedder",
            next_step="give share = 0.02, for example, or joint_dim = 64",
        )
    fixed = {
        "flops": request.flops is not None,
        "data_ratio": request.data_ratio is not None,
        "steps": request.steps is not None,
        "width and depth": request.shape_given,
    }
    names = [name for name, is_fixed in fixed.items() if is_fixed]
    if len(names) < 2:
        raise ConfigError(
            f"only {names[0]} given" if names else "neither a budget nor a size given",
            expected="two of: " + ", ".join(fixed),
            next_step="add data_ratio = 15, for example, to flops",
        )
    if {"flops", "data_ratio", "steps"} <= set(names):
        raise ConfigError(
            "flops, data_ratio and steps together leave nothing to solve",
            expected="two of: " + ", ".join(fixed),
            next_step="drop steps: the budget and the ratio decide it",
        )


def _check_values(request: CellRequest) -> None:
    if request.share is not None and not 0 < request.share < 1:
        raise ConfigError(
            f"share = {request.share:g} is not a share of a model with two parts",
            expected="a number above 0 and below 1, as in 0.02",
            next_step="for the smallest embedder give joint_dim = 4; for percent divide by 100",
        )
    counts = {
        name: getattr(request, name)
        for name in (
            "batch_sequences joint_dim steps width depth head_dim seq_len text_len text_depth flops data_ratio"
        ).split()
    }
    for name, value in counts.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} = {value:g} is not positive", expected="a number above 0")
        largest = _LARGEST.get(name, MAX_COUNT)
        if value is not None and value > largest:
            raise ConfigError(f"{name} = {value:.6g} is out of range", expected=f"at most {largest:g}")
    if request.data_ratio is not None and request.data_ratio < _LEAST_DATA_RATIO:
        raise ConfigError(
            f"data_ratio = {request.data_ratio:g} is out of range", expected=f"at least {_LEAST_DATA_RATIO:g}"
        )
    if request.joint_dim is not None and request.joint_dim < 4:
        raise ConfigError(f"joint_dim = {request.joint_dim} is too small", expected="4 or more")
    if request.head_dim is not None and request.head_dim % 2:
        raise ConfigError(
            f"head_dim = {request.head_dim} is odd", expected="an even number: rotary positions rotate pairs"
        )
    if request.width is not None and request.head_dim is not None and request.width % request.head_dim:
        raise ConfigError(
            f"width = {request.width} is not a multiple of head_dim = {request.head_dim}",
            expected="heads that fill the width",
            next_step=f"take width = {max(1, round(request.width / request.head_dim)) * request.head_dim}",
        )
