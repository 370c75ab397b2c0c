"""Scores over candidates: loss, entropy, gradients, ranks and top-k, without ever holding the scores."""
