"""Files out of a trained run: recommendations, vectors, ONNX, cards, folders for a hub."""

from habitus.exporting.card import write_card
from habitus.exporting.hub import export_hub
from habitus.exporting.moments import Moments, find_users, parse_time, read_columns, read_times, time_column
from habitus.exporting.onnx import export_onnx
from habitus.exporting.recommend import SHARED_CONDITIONS, RecommendOptions, recommend_file
from habitus.exporting.results import RESULT_SUFFIXES, check_output, response_values
from habitus.exporting.vectors import embed_users, export_items, export_users, mean_item_vectors

__all__ = [
    "RESULT_SUFFIXES",
    "SHARED_CONDITIONS",
    "Moments",
    "RecommendOptions",
    "check_output",
    "embed_users",
    "export_hub",
    "export_items",
    "export_onnx",
    "export_users",
    "find_users",
    "mean_item_vectors",
    "parse_time",
    "read_columns",
    "read_times",
    "recommend_file",
    "response_values",
    "time_column",
    "write_card",
]
