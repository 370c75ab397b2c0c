"""Two regimes, one set of metrics."""
