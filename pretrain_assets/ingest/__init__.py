"""Documents into the table: parquet, JSON lines, Hugging Face, bundled or synthetic sources, one commit per ingest.

Invariant: a document that is in the table went in once, under an id that is never used again; a row that did not go in
is counted with its reason. This room writes only the columns that `ingested` owns and never rewrites an old file.
"""
