"""The verbs in a row."""
