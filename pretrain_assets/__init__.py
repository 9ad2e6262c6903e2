"""Pretraining on one LanceDB table: raw text to checkpoint to forensics, as a Dagster asset graph.

Importing this package is cheap on purpose: torch, lancedb and dagster are imported by the rooms that use them.
"""

__version__ = "0.1.0"
