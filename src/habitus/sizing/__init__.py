"""Parameters, FLOPs and bytes: how many, how much, and which cell a budget buys."""
