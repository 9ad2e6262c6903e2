"""Whether a filter reads columns that were made anew since the version that it is asked at.

Invariant: only columns made by other code or parameters count; rows that came later do not: a pin leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain_assets.curate.sql import columns_in
from pretrain_assets.errors import FilterError
from pretrain_assets.table.schema import making_changes
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin, records

if TYPE_CHECKING:
    from pretrain_assets.config import Recipe
    from pretrain_assets.table.lineage import LineageRecord


def check_current(location: Location, recipe: Recipe, record: LineageRecord) -> None:
    """Refuse to train by columns that a later version has made anew.

    Args:
        location: The table.
        recipe: Its filters are plain SQL.
        record: The version that is trained on, as the newest of its stage.

    Raises:
        FilterError: a filter reads such a column.
    """
    newest = open_dataset(location)
    pinned, now = open_pin(location, record.pin).schema, newest.schema
    data = recipe.data
    predicates = [data.filter, data.held_out_filter, *(part.predicate for part in data.mixture)]
    both = [name for name in pinned.names if name in now.names]
    for name in dict.fromkeys(name for predicate in predicates for name in columns_in(predicate, both)):
        changes = making_changes(pinned.field(name), now.field(name))
        if changes:
            later = [other.tag for other in records(newest) if name in other.columns and other.version > record.version]
            raise FilterError(
                f"The filter reads {name}, which {later[-1] if later else 'a later version'} has made anew since "
                f"{record.tag} ({'; '.join(changes)[:200]}). Run `pretrain tokenize` to train with it, or give "
                f"--tag {record.tag} to train as it was."
            )
