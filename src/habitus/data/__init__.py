"""The prepared dataset: catalogue, encoders, windows, batches."""

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.catalogue import item_file
from habitus.data.dataset import Dataset
from habitus.data.describe import Description, describe
from habitus.data.encoders import Encoders, as_category, as_list, as_number, load_tokenizer, vector_lengths
from habitus.data.fields import PADDING_TOKEN, UNKNOWN_CODE, Field, Fields
from habitus.data.from_world import prepare_world
from habitus.data.guess import guess_schema
from habitus.data.log import YEAR_1900_US, YEAR_2200_US
from habitus.data.prepare import PrepareOptions, prepare
from habitus.data.problems import quote_value
from habitus.data.sources import SourceTable, is_disk_full, open_table, quoted_path, require_columns
from habitus.data.windows import SEGMENT, pack

__all__ = [
    "PADDING_TOKEN",
    "SEGMENT",
    "UNKNOWN_CODE",
    "YEAR_1900_US",
    "YEAR_2200_US",
    "Batch",
    "Dataset",
    "Description",
    "Encoders",
    "Field",
    "Fields",
    "ItemFeatures",
    "PrepareOptions",
    "SourceTable",
    "as_category",
    "as_list",
    "as_number",
    "describe",
    "guess_schema",
    "is_disk_full",
    "item_file",
    "load_tokenizer",
    "open_table",
    "pack",
    "prepare",
    "prepare_world",
    "quote_value",
    "quoted_path",
    "require_columns",
    "vector_lengths",
]
