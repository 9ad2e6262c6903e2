"""Asset keys in flow order, and what all assets share: group, pools, retries."""

from dagster import AssetKey, Backoff, RetryPolicy

SOURCE_FILES = AssetKey(["source", "files"])
EVAL_SETS = AssetKey(["source", "eval_sets"])
INGESTED = AssetKey(["corpus", "ingested"])
DEDUPED = AssetKey(["corpus", "deduped"])
NEAR_DEDUPED = AssetKey(["corpus", "near_deduped"])
QUALITY = AssetKey(["corpus", "quality"])
DECONTAMINATED = AssetKey(["corpus", "decontaminated"])
MASKED = AssetKey(["corpus", "masked"])
TOKENIZED = AssetKey(["corpus", "tokenized"])
EMBEDDED = AssetKey(["corpus", "embedded"])
DOCUMENT_LOSS = AssetKey(["corpus", "document_loss"])
MODEL_SCORED = AssetKey(["corpus", "model_scored"])
CURATION_REPORT = AssetKey(["corpus", "curation_report"])
CHECKPOINT = AssetKey(["model", "checkpoint"])
EXPORT = AssetKey(["model", "export"])
INDEX = AssetKey(["forensics", "index"])
CONTAMINATION_IN_TIME = AssetKey(["forensics", "contamination"])
REPORT = AssetKey(["forensics", "report"])
MAINTENANCE = AssetKey(["corpus", "maintenance"])

TABLE_POOL = "table_writer"
"""One writer per table at a time."""
TRAINING_POOL = "training"
"""Training runs wait for each other, not for the table."""

RETRY = RetryPolicy(max_retries=2, delay=5, backoff=Backoff.EXPONENTIAL)
"""For what may pass, such as a store that does not answer; a mistake that the user can mend is never tried again."""

GROUP = "pretraining"
"""One group, so that the graph shows every asset at once: Dagster draws several groups as closed boxes."""
