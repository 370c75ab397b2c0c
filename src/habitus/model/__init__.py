"""The embedder, the contextualizer and the two together."""
