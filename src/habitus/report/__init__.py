"""Figures, tables, one page."""
