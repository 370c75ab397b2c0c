"""Predictions and vectors out: files, ONNX."""

from habitus.exporting.onnx import export_onnx
from habitus.exporting.recommend import RecommendOptions, recommend_file
from habitus.exporting.results import RESULT_SUFFIXES, check_out, plain
from habitus.exporting.vectors import export_items, export_users

__all__ = [
    "RESULT_SUFFIXES",
    "RecommendOptions",
    "check_out",
    "export_items",
    "export_onnx",
    "export_users",
    "plain",
    "recommend_file",
]
