"""Counters and histograms of the service, in the text form that Prometheus reads."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Telemetry:
    """One registry per service, so that two of them in a process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "habitus_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "habitus_request_seconds", "From headers to answer.", ["endpoint"], buckets=_SECONDS, registry=self.registry
        )
        self.batch_sizes = Histogram(
            "habitus_batch_size", "Requests computed together.", ["lane"], buckets=_SIZES, registry=self.registry
        )
        self.batch_seconds = Histogram(
            "habitus_batch_seconds", "Computation of a batch.", ["lane"], buckets=_SECONDS, registry=self.registry
        )
        self.errors = Counter("habitus_errors", "Answers of status 500.", registry=self.registry)
        self.swaps = Counter("habitus_swaps", "Runs swapped in.", ["outcome"], registry=self.registry)
        self.items = Gauge("habitus_items", "Items in the catalogue.", registry=self.registry)
        self.waiting = Gauge("habitus_waiting_requests", "Requests in the queue.", registry=self.registry)
        self.in_flight = Gauge("habitus_in_flight_requests", "Requests not yet answered.", registry=self.registry)

    def note_batch(self, lane: str, size: int, seconds: float) -> None:
        self.batch_sizes.labels(lane).observe(size)
        self.batch_seconds.labels(lane).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
