"""Asset keys in flow order, their group and their pools."""

from dagster import AssetKey

SOURCE_FILES = AssetKey(["source", "files"])
INGESTED = AssetKey(["corpus", "ingested"])
DEDUPED = AssetKey(["corpus", "deduped"])
TOKENIZED = AssetKey(["corpus", "tokenized"])
CHECKPOINT = AssetKey(["model", "checkpoint"])
INDEX = AssetKey(["forensics", "index"])

TABLE_POOL = "table_writer"
"""One writer per table at a time."""
TRAINING_POOL = "training"
"""Training runs wait for each other, not for the table."""

GROUP = "pretraining"
"""One group, so that the graph shows every asset at once: Dagster draws several groups as closed boxes."""
