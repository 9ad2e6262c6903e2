"""What all assets on the table share: one writer at a time, retries, a group, where the table is."""

from collections.abc import Callable, Iterable
from typing import Any

import dagster as dg

from pretrain_assets.assets.keys import GROUP, RETRY, TABLE_POOL
from pretrain_assets.assets.resources import table_metadata


def table_asset(
    key: dg.AssetKey, *, deps: Iterable[dg.AssetKey], code_version: str, description: str, **more: Any
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """The decorator of an asset that writes to the table; `more` is for `dagster.asset`."""
    decorator: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.asset(
        key=key,
        deps=list(deps),
        code_version=code_version,
        description=description,
        group_name=GROUP,
        pool=TABLE_POOL,
        retry_policy=RETRY,
        metadata=table_metadata(),
        **{"kinds": {"table"}, **more},
    )
    return decorator
