"""The prepared dataset: catalogue, encoders, windows, batches."""
