"""Axes to recipes, the run store, its workers."""
