"""The prepared dataset: catalogue, encoders, windows, batches."""

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.card import data_facts, write_dataset_card
from habitus.data.columns import COMMA_PATTERN, MICROSECONDS_PER_DAY, NUMBER_PATTERN, read_form, to_categories
from habitus.data.contexts import events_after, histories_before, history_reach
from habitus.data.dataset import Dataset
from habitus.data.describe import Description, describe
from habitus.data.encoders import Encoders, load_tokenizer
from habitus.data.event_columns import clock_fields
from habitus.data.fields import PADDING_TOKEN, UNKNOWN_CODE, Field, Fields, item_file
from habitus.data.from_world import prepare_world
from habitus.data.guess import guess_schema
from habitus.data.item_names import DISPLAY_FILE, to_display
from habitus.data.kinds import KINDS
from habitus.data.prepare import PrepareOptions, prepare, update
from habitus.data.problems import quote_value
from habitus.data.sources import SourceTable, is_disk_full, open_table, quoted_path, require_columns
from habitus.data.sql import TIME_UNIT_US, YEAR_1900_US, YEAR_2200_US
from habitus.data.structure import Structure, structure
from habitus.data.targets import candidate_values, find_candidates
from habitus.data.users_table import add_user_columns
from habitus.data.windows import SEGMENT, pack

__all__ = [
    "COMMA_PATTERN",
    "DISPLAY_FILE",
    "KINDS",
    "MICROSECONDS_PER_DAY",
    "NUMBER_PATTERN",
    "PADDING_TOKEN",
    "SEGMENT",
    "TIME_UNIT_US",
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
    "Structure",
    "add_user_columns",
    "candidate_values",
    "clock_fields",
    "data_facts",
    "describe",
    "events_after",
    "find_candidates",
    "guess_schema",
    "histories_before",
    "history_reach",
    "is_disk_full",
    "item_file",
    "load_tokenizer",
    "open_table",
    "pack",
    "prepare",
    "prepare_world",
    "quote_value",
    "quoted_path",
    "read_form",
    "require_columns",
    "structure",
    "to_categories",
    "to_display",
    "update",
    "write_dataset_card",
]
