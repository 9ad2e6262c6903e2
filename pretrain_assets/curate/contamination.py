"""Contamination: evaluation items that stand in documents, by overlap of word n-grams, with item, share and span.

Invariant: a row's values depend on its text, the content of the eval sets and the settings alone, and never say more
than was compared word by word. Documents stay; `NOT contaminated` leaves them out.

What counts as a word is in `plain_words`, what as an n-gram in `ngrams`. Each field of an item is searched for apart,
so that a question without its answer is found; an item's share is that of the field of which most was found.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import ContaminationConfig, EngineConfig, to_dict
from pretrain_assets.curate.eval_sets import EvalSet, read_eval_sets
from pretrain_assets.errors import InputError
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

    from pretrain_assets.curate.ngram_search import Found
    from pretrain_assets.curate.ngrams import Index

STAGE = "decontaminated"
CODE_VERSION = "1"
"""Raised when the same sets and settings would give other columns."""


def decontaminate(
    location: Location,
    config: ContaminationConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill the contamination columns for the rows that lack them: one new version, or none.

    Args:
        location: The table.
        config: Eval sets and limits. Sets with other content, or other limits, recompute every row in one new version.
        input_pin: Version to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where documents are searched; None: processes on this machine.

    Raises:
        ConfigError: an eval set is written wrongly.
        InputError: an eval set is missing, cannot be read, or lacks what is to be searched.
    """
    return fill(location, _fill(config), input_pin=input_pin, run_id=run_id, engine=engine)


def searching(config: ContaminationConfig, fingerprints: tuple[str, ...], worker: Worker) -> BatchFunction:
    """The function that makes the contamination columns from `text`.

    Raises:
        InputError: the eval sets are others where the worker runs.
    """
    from pretrain_assets.curate.ngram_search import find, scratch
    from pretrain_assets.curate.plain_words import letters
    from pretrain_assets.curate.words import text_bytes

    del worker  # one thread
    sets = read_eval_sets(config.eval_sets)
    if tuple(one.fingerprint for one in sets) != fingerprints:
        raise InputError(
            f"The eval sets {', '.join(config.eval_sets)} are not, for this worker, those that the stage was started "
            "with: put the same files on every node, and run it again if they were just changed."
        )
    index, item_ids = index_of(sets, config), _item_ids(sets)
    memory, table = scratch(index), letters()

    def contamination_columns(batch: pa.RecordBatch) -> list[pa.Array]:
        data, offsets = text_bytes(batch.column(0))
        return _arrays(find(data, offsets, table, index, memory, config.min_overlap), item_ids)

    return contamination_columns


def index_of(sets: list[EvalSet], config: ContaminationConfig) -> Index:
    """The n-grams of all searched texts; items are numbered through the sets."""
    import numpy as np
    import pyarrow as pa

    from pretrain_assets.curate.ngrams import build_index
    from pretrain_assets.curate.plain_words import letters, plain_words
    from pretrain_assets.curate.words import text_bytes

    items = [item for one in sets for item in one.items]
    texts = pa.array([text for item in items for text in item.texts], pa.large_string())
    words, firsts = plain_words(*text_bytes(texts), letters())
    owners = np.repeat(np.arange(len(items)), [len(item.texts) for item in items])
    settings = {"ngram": config.ngram, "min_words": config.min_words, "max_items": config.max_items}
    return build_index(words, firsts, owners, **settings)


def describe_sets(sets: list[EvalSet], index: Index) -> list[dict[str, Any]]:
    """Name, fingerprint and counts of items of every set: searched for, too short, and nothing but boilerplate."""
    import numpy as np

    num_items = sum(len(one.items) for one in sets)
    long_enough, searched = np.zeros(num_items, bool), np.zeros(num_items, bool)
    long_enough[index.items[index.num_windows > 0]] = True
    searched[index.items[index.totals > 0]] = True
    described, at = [], 0
    for one in sets:
        part = slice(at, at + len(one.items))
        counts = {
            "items": len(one.items),
            "searched": int(searched[part].sum()),
            "too_short": int((~long_enough[part]).sum()),
            "boilerplate": int((long_enough[part] & ~searched[part]).sum()),
        }
        described.append({"name": one.name, "fingerprint": one.fingerprint, **counts})
        at += len(one.items)
    return described


def _fill(config: ContaminationConfig) -> Fill:
    import pyarrow as pa

    sets = read_eval_sets(config.eval_sets)
    parameters: dict[str, Any] = {
        "ngram": config.ngram,
        "min_words": config.min_words,
        "max_items": config.max_items,
        "min_overlap": config.min_overlap,
        "eval_sets": describe_sets(sets, index_of(sets, config)),
    }
    making: dict[str, Any] = {"stage": STAGE, "code_version": CODE_VERSION, "parameters": parameters}
    types = {
        "contamination_item": pa.string(),
        "contamination_items": pa.list_(pa.string()),
        "contamination_overlap": pa.float32(),
        "contamination_start": pa.int32(),
        "contamination_stop": pa.int32(),
        "contaminated": pa.bool_(),
    }
    return Fill(
        stage=STAGE,
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field(name, kind, **making) for name, kind in types.items()]),
                inputs=("text",),
                nullable=("contamination_item", "contamination_items", "contamination_start", "contamination_stop"),
                make=partial(searching, config, tuple(one.fingerprint for one in sets)),
                worker_bytes=256 << 20,  # 100 MB/s on one core
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        facts={"settings": to_dict(config)},
        limits={"contaminated_share": config.max_share_contaminated},
        summarize=_summarize,
    )


def _item_ids(sets: list[EvalSet]) -> pa.Array:
    import pyarrow as pa

    return pa.array([item.id for one in sets for item in one.items], pa.string())


def _arrays(found: Found, item_ids: pa.Array) -> list[pa.Array]:
    """The columns, in the order of the outputs."""
    import numpy as np
    import pyarrow as pa

    nothing, counts = found.best < 0, np.diff(found.item_firsts)
    items = pa.ListArray.from_arrays(
        pa.array(found.item_firsts, pa.int32()), item_ids.take(pa.array(found.found_items)), mask=pa.array(counts == 0)
    )
    return [
        item_ids.take(pa.array(found.best, mask=nothing)),
        items,
        pa.array(found.overlap),
        pa.array(found.start, mask=nothing),
        pa.array(found.stop, mask=nothing),
        pa.array(counts > 0),
    ]


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    contaminated = read("contaminated")
    count = pc.sum(contaminated, min_count=0).as_py()
    return {"in": len(contaminated), "not_contaminated": len(contaminated) - count, "contaminated": count}
