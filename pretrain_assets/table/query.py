"""SQL over one version of the table, answered as plain rows: for aggregates, whose answers are small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lance


def sql_rows(dataset: lance.LanceDataset, query: str) -> list[dict[str, Any]]:
    """The rows that a query over `dataset` gives, each by the names of its columns."""
    return [row for batch in dataset.sql(query).build().to_batch_records() for row in batch.to_pylist()]
