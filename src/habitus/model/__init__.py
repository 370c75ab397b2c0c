"""The two-part model: embedder, contextualizer, the two together, and how they start."""

from habitus.model.behavior import BehaviorModel
from habitus.model.bundle import Bundle, BundleManifest, autocast, bundle_in_memory, load_bundle, save_bundle
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
from habitus.model.contextualizer import Contextualizer, Reading
from habitus.model.copying import UNSEEN, Mass, mass_of, with_copying
from habitus.model.dropout import Noise, row_noise
from habitus.model.embed_table import embed_table
from habitus.model.embedder import Embedder, TextEncoder
from habitus.model.init import ParameterInfo
from habitus.model.layouts import MaskedWindows
from habitus.model.packing import pack_text
from habitus.model.tensors import BatchTensors, ItemTensors, batch_tensors, item_tensors

__all__ = [
    "CACHE_DTYPES",
    "CACHE_MANIFEST",
    "EMBED_ROWS",
    "STORED_TYPES",
    "UNSEEN",
    "BatchTensors",
    "BehaviorModel",
    "Bundle",
    "BundleManifest",
    "CacheManifest",
    "Contextualizer",
    "Embedder",
    "EmbeddingCache",
    "ItemTensors",
    "MaskedWindows",
    "Mass",
    "Noise",
    "ParameterInfo",
    "Reading",
    "StoredType",
    "TextEncoder",
    "autocast",
    "batch_tensors",
    "build_cache",
    "bundle_in_memory",
    "check_same_fields",
    "embed_features",
    "embed_rows",
    "embed_table",
    "item_tensors",
    "load_bundle",
    "mass_of",
    "pack_text",
    "row_noise",
    "save_bundle",
    "with_copying",
]
