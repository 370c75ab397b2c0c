"""The loop, the two stages, checkpoints."""
