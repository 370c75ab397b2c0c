"""Files out of a trained run: recommendations, vectors, ONNX, cards, folders for a hub."""

from habitus.exporting.card import write_card
from habitus.exporting.hub import export_hub
from habitus.exporting.onnx import export_onnx
from habitus.exporting.recommend import RecommendOptions, recommend_file
from habitus.exporting.results import RESULT_SUFFIXES, check_output, response_values
from habitus.exporting.vectors import export_items, export_users

__all__ = [
    "RESULT_SUFFIXES",
    "RecommendOptions",
    "check_output",
    "export_hub",
    "export_items",
    "export_onnx",
    "export_users",
    "recommend_file",
    "response_values",
    "write_card",
]
