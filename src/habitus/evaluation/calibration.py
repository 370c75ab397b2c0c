"""How far a model's probabilities can be believed, and the temperature at which they can be best.

At a temperature T scores are divided by T. With β = 1/T the mean loss L and the mean entropy H of the predictions obey
β·dL/dβ = L - H, and L is convex in β: the temperature with the least loss is where the two are equal.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation.evaluation import EvaluateOptions, catalogue_subset, query_set
from habitus.evaluation.metrics import means
from habitus.evaluation.model_scorer import ModelScorer
from habitus.store import Calibration, Reliability, ReliabilityBin

CALIBRATED_ITEMS = (1, 10)  # the first k of every list whose probabilities are judged
_NUM_BINS = 15
_FIT_QUERIES = 5_000
_WIDEST = math.log(8.0)  # temperatures from 1/8 to 8


def calibrate(dataset: Dataset, scorer: ModelScorer, options: EvaluateOptions) -> Calibration:
    """A model's reliability on the queries of the options, with a temperature fitted on validation queries.

    Over the catalogue, or over the batch's pool where the options have no other regime.
    """
    check_calibration(scorer, options)
    fitting = replace(options, side="validation", queries=min(options.queries, _FIT_QUERIES))
    temperature = fit_temperature(dataset, scorer, fitting)
    plain, scaled = (_reliability(dataset, scorer, options, one) for one in (1.0, temperature))
    return Calibration(
        temperature=temperature,
        fitted_side="validation",
        fitted_queries=query_set(dataset, fitting).num_queries,
        plain=plain,
        scaled=scaled,
    )


def check_calibration(scorer: ModelScorer, options: EvaluateOptions) -> None:
    """Refuse what cannot be calibrated, before anything is scored."""
    if options.exclude_history:
        raise ConfigError(
            "probabilities are judged over all candidates", next_step="omit --exclude-history, or --calibrate"
        )
    if scorer.bundle.recipe.data.include_validation:
        raise ConfigError(
            f"{scorer.name} was trained on the validation events too, on which its temperature would be fitted",
            expected="a run that has not seen them",
            next_step="calibrate the run that it was refitted from, or omit --calibrate",
        )


def fit_temperature(dataset: Dataset, scorer: ModelScorer, options: EvaluateOptions) -> float:
    """The temperature between 1/8 and 8 with the least mean loss on the queries of the options."""
    from scipy.optimize import brentq

    def excess(log_temperature: float) -> float:
        """How much surprise exceeds what the predictions announce."""
        values = _predict(dataset, scorer, options, math.exp(log_temperature), k=0)
        return values.loss - values.entropy

    # Overconfident at the highest temperature, or modest at the lowest: the end is the best that is allowed.
    if excess(_WIDEST) > 0:
        return math.exp(_WIDEST)
    if excess(-_WIDEST) < 0:
        return math.exp(-_WIDEST)
    return float(math.exp(brentq(excess, -_WIDEST, _WIDEST, xtol=1e-3)))


def reliability_bins(
    log_probs: np.ndarray, hits: np.ndarray, users: np.ndarray, num_bins: int = _NUM_BINS
) -> tuple[ReliabilityBin, ...]:
    """Listed items [Q, k] in bins of rising probability, with about as many items each; errors are over users."""
    probabilities, came = np.exp(log_probs).ravel(), hits.ravel().astype(np.float64)
    owners = np.repeat(users, log_probs.shape[1])
    order = np.argsort(probabilities, kind="stable")
    bins = []
    for part in np.array_split(order, min(num_bins, len(order))):
        [observed] = means(came[None, part], owners[part])
        bins.append(
            ReliabilityBin(
                predicted=float(probabilities[part].mean()), observed=observed.value, se=observed.se, listed=len(part)
            )
        )
    return tuple(bins)


def expected_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """The expected calibration error: |predicted - observed|, mean over the listed items."""
    return sum(one.listed * abs(one.predicted - one.observed) for one in bins) / sum(one.listed for one in bins)


@dataclass(frozen=True)
class _Predictions:
    loss: float
    entropy: float
    log_probs: np.ndarray  # [Q, k]
    hits: np.ndarray  # bool [Q, k]
    users: np.ndarray


def _reliability(dataset: Dataset, scorer: ModelScorer, options: EvaluateOptions, temperature: float) -> Reliability:
    values = _predict(dataset, scorer, options, temperature, k=max(CALIBRATED_ITEMS))
    bins = {k: reliability_bins(values.log_probs[:, :k], values.hits[:, :k], values.users) for k in CALIBRATED_ITEMS}
    return Reliability(
        temperature=temperature,
        loss=values.loss,
        entropy=values.entropy,
        expected_error={str(k): expected_error(one) for k, one in bins.items()},
        bins=bins[max(CALIBRATED_ITEMS)],
    )


def _predict(
    dataset: Dataset, scorer: ModelScorer, options: EvaluateOptions, temperature: float, k: int
) -> _Predictions:
    queries = query_set(dataset, options)
    candidates = catalogue_subset(dataset, queries, options)
    losses, entropies, log_probs, hits, users = [], [], [], [], []
    with scorer.at_temperature(temperature):
        for batch in queries:
            pool = candidates if "catalogue" in options.regimes else batch.pool
            scores = scorer.score(batch, pool, k)
            assert scores.loss is not None and scores.entropy is not None and scores.top_log_probs is not None
            losses.append(scores.loss)
            entropies.append(scores.entropy)
            log_probs.append(scores.top_log_probs)
            hits.append(scores.top == batch.targets[:, None])
            users.append(batch.users)
    return _Predictions(
        loss=float(np.concatenate(losses).mean()),
        entropy=float(np.concatenate(entropies).mean()),
        log_probs=np.concatenate(log_probs),
        hits=np.concatenate(hits),
        users=np.concatenate(users),
    )
