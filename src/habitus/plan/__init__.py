"""Budget and metric to recipe."""
