"""What a step without a finite loss trained on, for the error that stops the run.

Invariant: all ranks find the same words, and a table that cannot be read never hides the step.
"""

from __future__ import annotations

import logging

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import DivergenceError
from pretrain_assets.loader.exposure import documents
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.storage import Location

NAMED = 5
"""Documents named in the error; the command that it gives lists them all."""

_log = logging.getLogger(__name__)


def divergence(spec: RunSpec, schedule: Schedule, step: int, saved: int, what: str) -> DivergenceError:
    """The error that stops a run at a step, with the first documents of its batch.

    Args:
        spec: The run.
        schedule: Its steps.
        step: The step, from 1.
        saved: Step of the newest checkpoint; 0 for none.
        what: What is wrong, without a full stop.
    """
    ids = list(dict.fromkeys(exposure.doc_id for exposure in documents(schedule, step)))
    sources = _sources(spec, ids[:NAMED])
    named = ", ".join(f"{i} ({sources[i]})" if i in sources else str(i) for i in ids[:NAMED])
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return DivergenceError(
        f"{what}. The step trained on documents {named}{more}; `{seen_command(spec, step)}` shows them. "
        f"Nothing after {f'the checkpoint of step {saved}' if saved else 'the start'} was saved; lower "
        "train.learning_rate or train.grad_clip, raise train.warmup_steps, or leave the documents out with "
        "data.filter, and start again."
    )


def seen_command(spec: RunSpec, step: int) -> str:
    """The command that shows what the model saw at a step."""
    return f"pretrain seen {spec.run_dir} --step {step}"


def _sources(spec: RunSpec, ids: list[int]) -> dict[int, str]:
    """Sources of documents, as far as the table tells."""
    location = Location(database_uri=spec.database_uri, table_name=spec.table_name)
    try:
        rows = rows_by_id(location, Pin.parse(spec.pin), ids, ["source"])
    except Exception:
        _log.warning("the sources of the documents could not be read", exc_info=True)
        return {}
    return {i: row["source"] for i, row in rows.items() if row.get("source")}
