"""From domain results to Dagster events: metadata, data versions, checks, and errors that people can mend."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from pretrain_assets.errors import PretrainError
from pretrain_assets.table.columns import COLUMNS
from pretrain_assets.table.lineage import LineageRecord, StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.verify import Finding

COLUMN_INPUTS: dict[str, tuple[str, ...]] = {
    "content_hash": ("text",),
    "dup_of": ("content_hash", "id"),
    "is_dup": ("content_hash", "id"),
    "minhash": ("text",),
    "near_dup_of": ("minhash", "id", "is_dup"),
    "near_dup_similarity": ("minhash", "near_dup_of"),
    "is_near_dup": ("near_dup_of",),
    "contamination_item": ("text",),
    "contamination_items": ("text",),
    "contamination_overlap": ("text",),
    "contamination_start": ("text",),
    "contamination_stop": ("text",),
    "contaminated": ("contamination_overlap",),
    **dict.fromkeys((column.name for column in COLUMNS if column.owner in ("quality", "masked")), ("text",)),
    "input_ids": ("text",),
    "n_tokens": ("input_ids",),
    "embedding": ("text",),
    "doc_id": ("text",),
    "n_chars": ("text",),
}
"""Which columns a computed column is made from."""
MEANINGS = {column.name: column.meaning for column in COLUMNS}


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error the user can mend into a Dagster failure with its plain message; retrying would not help."""
    try:
        yield
    except PretrainError as error:
        raise dg.Failure(description=str(error), allow_retries=False) from error


def stage_result(location: Location, result: StageResult, upstream: dg.AssetKey, plot: str) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """The materialization of a corpus stage: the record's facts as metadata, the pin as data version."""
    return dg.MaterializeResult(
        metadata={"plot": md(plot), "changed": result.changed, **record_metadata(location, result.record, upstream)},
        data_version=dg.DataVersion(str(result.pin)),
    )


def record_metadata(location: Location, record: LineageRecord, upstream: dg.AssetKey) -> dict[str, Any]:
    """Metadata that every asset on the table carries."""
    schema = open_dataset(location, record.version).schema
    return {
        "lance/version": record.version,
        "lance/tag": record.tag,
        "lance/table_id": record.table_id,
        "lance/pin": str(record.pin),
        "lance/uri": location.uri,
        "lance/inputs": list(record.inputs),
        "rows_written": record.rows,
        "bytes_added": record.bytes_added,
        "seconds": record.seconds,
        "ledger": record.ledger,
        "code_version": record.code_version,
        "parameters": record.parameters,
        "dagster/row_count": record.rows_total,
        "dagster/column_schema": dg.TableSchema(
            columns=[
                dg.TableColumn(f.name, str(f.type), description=MEANINGS.get(f.name), tags=_making(f.metadata))
                for f in schema
            ]
        ),
        "dagster/column_lineage": dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(asset_key=upstream, column_name=source) for source in COLUMN_INPUTS[name]]
                for name in record.columns
                if name in COLUMN_INPUTS
            }
        ),
    }


def _making(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Owner stage and code version of a column, from its field metadata."""
    wanted = ((b"pretrain.stage", "stage"), (b"pretrain.code_version", "code_version"))
    return {name: metadata[key].decode() for key, name in wanted if metadata and key in metadata}


def md(text: str) -> dg.MarkdownMetadataValue:
    """Markdown metadata."""
    return dg.MetadataValue.md(text)


def check_result(finding: Finding, key: dg.AssetKey, severity: dg.AssetCheckSeverity) -> dg.AssetCheckResult:
    """A finding as the result of the asset check of the same name."""
    return dg.AssetCheckResult(
        passed=finding.passed,
        asset_key=key,
        check_name=finding.name,
        severity=severity,
        description=finding.description,
        metadata={
            name: dg.MetadataValue.json(v) if isinstance(v, (list, dict)) else v for name, v in finding.details.items()
        },
    )
