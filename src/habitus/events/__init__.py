"""The event log: its schema, and the synthetic world with its oracle."""
