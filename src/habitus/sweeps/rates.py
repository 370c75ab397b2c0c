"""Learning rates of a cell: how many, around which rule, and what comes next when the winner sits at an edge."""

from collections.abc import Mapping, Sequence

from habitus.errors import ConfigError

Rates = int | str | Sequence[float] | None


def rate_grid(asked: Rates, multiples: Sequence[float], rule: float) -> list[float]:
    """The learning rates of a cell, ascending.

    `asked` is None for the preset's multiples of the rule, a number of rates a factor of two apart around the
    rule, the rates themselves, or text as a user types it: `3`, `1e-3,2e-3` or `0.5x,1x,2x`.
    """
    if asked is None:
        rates = [rule * multiple for multiple in multiples]
    elif isinstance(asked, str):
        rates = _parsed(asked, rule)
    elif isinstance(asked, int):
        if asked < 1:
            raise ConfigError(f"{asked} learning rates", expected="1 or more")
        rates = [rule * 2.0 ** (number - (asked - 1) / 2) for number in range(asked)]
        if asked % 2 == 0:  # an even number leans towards the smaller side, so that the rule itself is there
            rates = [rate / 2**0.5 for rate in rates]
    else:
        rates = [float(rate) for rate in asked]
    if not rates or any(not 0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"learning rates {rates}", expected="one or more positive numbers")
    # Twelve digits: the same rate from two formulas must give the same hash.
    return sorted({float(f"{rate:.12g}") for rate in rates})


def _parsed(text: str, rule: float) -> list[float]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if len(parts) == 1 and parts[0].isdigit():
            return rate_grid(int(parts[0]), (), rule)
        return [rule * float(part[:-1]) if part.endswith("x") else float(part) for part in parts]
    except ValueError:
        raise ConfigError(
            f"learning rates {text!r}",
            expected="how many (3), the rates (1e-3,2e-3), or multiples of the √B rule (0.5x,1x,2x)",
        ) from None


def beyond_edge(losses: Mapping[float, float]) -> float | None:
    """The rate to try next: the best of two or more stands first or last; None where it is bracketed.

    `losses` maps each tried rate to its tail training loss; a failed run counts as infinitely bad. Where nothing
    succeeded there is no winner and no next rate.
    """
    rates = sorted(losses)
    finite = [rate for rate in rates if losses[rate] < float("inf")]
    if len(rates) < 2 or not finite:
        return None
    best = min(finite, key=lambda rate: losses[rate])
    if best == rates[-1]:
        return float(f"{best * best / rates[-2]:.12g}")
    if best == rates[0]:
        return float(f"{best * best / rates[1]:.12g}")
    return None
