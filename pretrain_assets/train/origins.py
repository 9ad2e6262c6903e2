"""Where the tokens of held-out blocks come from: the source of the document that each belongs to.

Invariant: a token belongs to the document that the plan puts there, also where a block begins in the middle of one; an
end of text belongs to the document that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain_assets.loader.plan import EpochPlan, Int64Array
from pretrain_assets.loader.read import take_rows

if TYPE_CHECKING:
    import lance

COLUMN = "source"
UNKNOWN = "unknown"
"""Name of the source of rows that name none."""
ROWS_PER_READ = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Origins:
    """Sources of the tokens of a stream of one split."""

    sources: list[str]
    """Names of the sources; empty where the table names none."""
    seq_len: int
    """Tokens per block."""
    ends: Int64Array
    """Position in the stream just after each document and its end of text, shape (documents,)."""
    codes: npt.NDArray[np.int32]
    """Number of each document's source, shape (documents,): 4 bytes per row, beside the plan's 20."""

    def of(self, first: int, count: int) -> Int64Array:
        """Number of the source of every token of some blocks, 0 for padding; (count, seq_len)."""
        start, stop = first * self.seq_len, (first + count) * self.seq_len
        reach = slice(
            int(np.searchsorted(self.ends, start, side="right")),
            int(np.searchsorted(self.ends, stop, side="left")) + 1,
        )
        bounds: Int64Array = np.clip(self.ends[reach], start, stop) - start
        codes = np.repeat(self.codes[reach], bounds - np.concatenate([[0], bounds[:-1]]))
        found = np.zeros(count * self.seq_len, np.int64)
        found[: len(codes)] = codes
        return found.reshape(count, self.seq_len)


def read_origins(dataset: lance.LanceDataset, plan: EpochPlan, num_blocks: int) -> Origins:
    """Read the sources of the documents that the first blocks of a plan of one split reach."""
    count = int(plan.position(num_blocks).docs_consumed[0])
    numbers: dict[str, int] = {}
    codes = np.zeros(count, np.int32)
    for start in range(0, count if COLUMN in dataset.schema.names else 0, ROWS_PER_READ):
        row_ids = plan.rows.row_ids[plan.order[start : min(count, start + ROWS_PER_READ)]]
        storage_order = np.argsort(row_ids)
        column = take_rows(dataset, row_ids[storage_order], [COLUMN])[COLUMN].cast("string").fill_null(UNKNOWN)
        encoded = column.combine_chunks().dictionary_encode()
        known = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
        codes[start + storage_order] = np.array(known, np.int32)[encoded.indices.to_numpy()]
    return Origins(sources=list(numbers), seq_len=plan.seq_len, ends=plan.ends[:count], codes=codes)
