"""The two-part model: embedder, contextualizer, the two together, and their initial weights."""

from habitus.model.attention import MaskedWindows
from habitus.model.behavior import BehaviorModel
from habitus.model.bundle import (
    Bundle,
    BundleManifest,
    autocast,
    bundle_in_memory,
    chosen_run,
    load_bundle,
    save_bundle,
)
from habitus.model.cache import (
    CACHE_DTYPES,
    CACHE_MANIFEST,
    EMBED_ROWS,
    STORED_TYPES,
    CacheManifest,
    EmbeddingCache,
    StoredType,
    build_cache,
    check_same_fields,
    embed_features,
    embed_rows,
)
from habitus.model.contextualizer import Contextualizer, ContextualizerOutput
from habitus.model.copying import MASKED_COPY_SCORE, CopyMass, copy_mass, copying_loss
from habitus.model.dropout import (
    DropoutMask,
    ItemDropout,
    draw_dropout_mask,
    draw_item_dropout,
    drop_entries,
    drop_features,
)
from habitus.model.embed_table import embed_table
from habitus.model.embedder import Embedder, TextEncoder
from habitus.model.event_text import EventText
from habitus.model.init import ParameterInfo
from habitus.model.packing import TextCapacity, pack_text
from habitus.model.tensors import BatchTensors, ItemTensors, batch_tensors, item_tensors

__all__ = [
    "CACHE_DTYPES",
    "CACHE_MANIFEST",
    "EMBED_ROWS",
    "MASKED_COPY_SCORE",
    "STORED_TYPES",
    "BatchTensors",
    "BehaviorModel",
    "Bundle",
    "BundleManifest",
    "CacheManifest",
    "Contextualizer",
    "ContextualizerOutput",
    "CopyMass",
    "DropoutMask",
    "Embedder",
    "EmbeddingCache",
    "EventText",
    "ItemDropout",
    "ItemTensors",
    "MaskedWindows",
    "ParameterInfo",
    "StoredType",
    "TextCapacity",
    "TextEncoder",
    "autocast",
    "batch_tensors",
    "build_cache",
    "bundle_in_memory",
    "check_same_fields",
    "chosen_run",
    "copy_mass",
    "copying_loss",
    "draw_dropout_mask",
    "draw_item_dropout",
    "drop_entries",
    "drop_features",
    "embed_features",
    "embed_rows",
    "embed_table",
    "item_tensors",
    "load_bundle",
    "pack_text",
    "save_bundle",
]
