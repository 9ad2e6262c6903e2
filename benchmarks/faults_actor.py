"""The process that the fault campaign kills: does one step of a table's life whenever its standard input names one.

`python -m benchmarks.faults_actor WORKERS` reads lines `{"database": ..., "sources": ..., "step": ...}` and answers
each with one JSON line. Bounds are small, so that ranges, parts and journals all come up in a few megabytes of text.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain_assets.table.storage import Location

RANGE_BYTES = 256 << 10
PART_SECONDS = 0.15
UNIT_BYTES = 1 << 20
DELETED = "id % 11 = 3"
PERSONS_TAG = "a-person-keeps-this"

FULL_LIFE = (
    "ingest 0",
    "dedup",
    "tokenize gpt2",
    "tag",
    "ingest 1",
    "delete",
    "dedup",
    "tokenize gpt2",
    "compact",
    "ingest 2",
    "dedup",
    "tokenize gpt2",
    "compact",
    "clean",
    "tokenize byte",
    "ingest 3",
    "dedup",
    "tokenize byte",
    "compact",
    "clean",
)
"""Steps in order. Each can be run again after it was killed, and running it twice changes nothing."""
QUICK_LIFE = (
    "ingest 0",
    "dedup",
    "tokenize gpt2",
    "tag",
    "ingest 1",
    "delete",
    "dedup",
    "tokenize byte",
    "compact",
    "clean",
)


@dataclass(frozen=True, kw_only=True)
class Life:
    """One table and how it is worked on."""

    location: Location
    """The table."""
    sources: Path
    """Folder with one folder of parquet files per ingest."""
    workers: int
    """Worker processes of a fill."""

    def run(self, step: str) -> None:
        """Do one step."""
        verb, _, argument = step.partition(" ")
        does: dict[str, Callable[[str], Any]] = {
            "ingest": self._ingest,
            "dedup": self._dedup,
            "tokenize": self._tokenize,
            "tag": self._tag,
            "delete": self._delete,
            "compact": self._compact,
            "clean": self._clean,
        }
        does[verb](argument)

    def _ingest(self, batch: str) -> None:
        from pretrain_assets.config import IngestConfig
        from pretrain_assets.ingest.append import ingest

        ingest(self.location, IngestConfig(sources=(str(self.sources / batch / "*.parquet"),), batch_bytes=1 << 20))

    def _dedup(self, _: str) -> None:
        from pretrain_assets.config import DedupConfig, EngineConfig
        from pretrain_assets.curate.dedup import dedup
        from pretrain_assets.table.versions import find_record

        pin = find_record(self.location, "ingested").pin
        config = DedupConfig(batch_bytes=256 << 10)
        dedup(self.location, config, input_pin=pin, engine=EngineConfig(workers=self.workers))

    def _tokenize(self, tokenizer: str) -> None:
        from pretrain_assets.config import EngineConfig, TokenizeConfig
        from pretrain_assets.table.versions import find_record
        from pretrain_assets.tokenize.columns import tokenize

        pin = find_record(self.location, "deduped").pin
        config = TokenizeConfig(tokenizer=tokenizer, batch_bytes=128 << 10)
        tokenize(self.location, config, input_pin=pin, engine=EngineConfig(workers=self.workers))

    def _tag(self, _: str) -> None:
        """A person keeps a version."""
        from pretrain_assets.table.storage import open_dataset
        from pretrain_assets.table.versions import find_record

        dataset = open_dataset(self.location)
        if PERSONS_TAG not in dataset.tags.list():
            dataset.tags.create(PERSONS_TAG, find_record(self.location, "tokenized").version)

    def _delete(self, _: str) -> None:
        from pretrain_assets.table.delete import Request, delete

        delete(self.location, Request(where=DELETED))

    def _compact(self, _: str) -> None:
        """Merge fragments and drop deleted rows; every version stays."""
        self._maintain(keep_last=1_000, older_than_seconds=7 * 86_400, merge_factor=2, max_deleted_share=0.05)

    def _clean(self, _: str) -> None:
        """Keep the newest version of each stage, and what is tagged or pinned; rewrite nothing."""
        self._maintain(keep_last=1, older_than_seconds=0, target_bytes=1, max_deleted_share=1.0)

    def _maintain(self, **settings: Any) -> None:
        from pretrain_assets.config import MaintainConfig
        from pretrain_assets.table.storage import open_dataset
        from pretrain_assets.table.upkeep.maintain import maintain
        from pretrain_assets.table.versions import records

        pinned = records(open_dataset(self.location), "deduped")[0].version  # as if a run had been trained on it
        config = MaintainConfig(keep_unfinished_seconds=0, **settings)
        maintain(self.location, config, pinned_by_runs={pinned: ("a training run",)})


def main(workers: str) -> None:
    """Answer steps until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # not inherited: workers must not keep the campaign waiting
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    from pretrain_assets.curate import dedup  # noqa: F401  import now what the steps use
    from pretrain_assets.ingest import append, journal  # noqa: F401
    from pretrain_assets.table import delete  # noqa: F401
    from pretrain_assets.table.filler import tasks
    from pretrain_assets.table.filler.engines import local  # noqa: F401
    from pretrain_assets.table.storage import Location
    from pretrain_assets.table.upkeep import maintain  # noqa: F401
    from pretrain_assets.tokenize import columns  # noqa: F401

    __import__("lance.file")
    tasks.RANGE_BYTES, tasks.PART_SECONDS, journal.UNIT_BYTES = RANGE_BYTES, PART_SECONDS, UNIT_BYTES
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        location = Location(database_uri=order["database"])
        life = Life(location=location, sources=Path(order["sources"]), workers=int(workers))
        logging.info("%s %s, %s worker(s)", Path(order["database"]).name, order["step"], workers)
        try:
            life.run(order["step"])
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(json.dumps({"error": f"{order['step']}: {reason}"}), file=answers)
            sys.exit(1)
        print(json.dumps({"done": order["step"]}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
