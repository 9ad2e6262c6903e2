"""Fault campaign: `kill -9` at random moments of a table's life; then every version must still be there and whole.

A life is a list of steps (`faults_actor`): ingests, fills, a deletion, compactions, clean-ups. An actor process does
them one by one; at a random moment of a step, drawn from the seed, its driver process is killed, and only that: its
workers must end by themselves. After every kill the newest version and every tagged one are read and compared with an
undisturbed life; then another actor goes on. Now and then a worker is killed instead: its driver has to go on. At the
end every column must hold what the undisturbed life holds, every lineage record must be there, and no staged file may
be left after maintenance.

Exit code 1 when anything was lost, changed or left behind.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import corpus, harness
from benchmarks.faults_actor import FULL_LIFE, QUICK_LIFE
from benchmarks.faults_check import Facts, digests, facts, left_behind, recorded, tagged
from benchmarks.faults_process import Actor, OrphanWatch, orphan_watch

if TYPE_CHECKING:
    from pretrain_assets.table.storage import Location

KILLS_PER_LIFE = 20
WORKER_KILL_SHARE = 0.3
"""Of the steps whose driver is left alone, how many lose a worker, if they have one at that moment."""
FAILURES_PER_STEP = 3
"""Times that a step may end with an error before its life is given up."""
STEP_SECONDS = 300.0
POOL_SECONDS = 1.0
"""Guess at what workers add to a fill before one was seen; it only decides when a kill comes."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a life is."""

    life: tuple[str, ...]
    """Steps."""
    files_per_batch: int
    """Files per ingest."""
    file_bytes: int
    """Bytes of text per file."""


FULL = Scale(life=FULL_LIFE, files_per_batch=4, file_bytes=2 << 20)
QUICK = Scale(life=QUICK_LIFE, files_per_batch=3, file_bytes=400 << 10)


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What a life is when nobody disturbs it."""

    seconds: list[float]
    """Per step."""
    after: list[Facts]
    """Newest version after each step."""
    tags: list[Counter[str]]
    """Tagged versions of each stage after each step."""
    records: Counter[str]
    """Lineage records of each stage at the end."""
    columns: dict[str, str]
    """Digest of every column at the end."""


@dataclass(kw_only=True)
class Findings:
    """What the campaign met, summed over all lives."""

    kills: int = 0
    kills_survived: int = 0
    missed_kills: int = 0
    worker_kills: int = 0
    lives: int = 0
    lives_equal: int = 0
    kills_by_step: Counter[str] = field(default_factory=Counter)
    kills_by_workers: Counter[str] = field(default_factory=Counter)
    rows_lost: int = 0
    versions_lost: int = 0
    versions_changed: int = 0
    records_lost: int = 0
    steps_failed: int = 0
    files_left_behind: int = 0
    workers_left_over: int = 0
    longest_orphan_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep what a person has to see."""
        harness.say(f"  FOUND {text}")
        self.notes.append(text)


class Campaign:
    """Lives of tables, with kills."""

    def __init__(self, folder: Path, scale: Scale, *, seed: int, workers: list[int]):
        self.findings = Findings()
        self._folder, self._life, self._seed, self._workers = folder, scale.life, seed, workers
        self._sources, self._log = folder / "sources", folder / "actors.log"
        for number in range(sum(step.startswith("ingest") for step in scale.life)):
            first = number * scale.files_per_batch
            into = self._sources / str(number)
            corpus.write_files(into, num_files=scale.files_per_batch, file_bytes=scale.file_bytes, first=first)
        self._starts = 0
        self._spare = self._start()
        self._typical: dict[tuple[int, int], float] = {}
        """Seconds of a step with a number of workers, as last seen undisturbed."""
        self.undisturbed = self._live_undisturbed(workers[0])
        if scale is FULL:
            for others in workers[1:]:
                again = self._live_undisturbed(others)
                if again.columns != self.undisturbed.columns or again.after != self.undisturbed.after:
                    self.findings.versions_changed += 1
                    self.findings.note(f"undisturbed lives with {workers[0]} and {others} workers differ")

    def run(self, kills: int) -> None:
        """Live until there were as many kills."""
        found = self.findings
        with orphan_watch() as watch:
            while found.kills < kills:
                life, database = found.lives, self._folder / f"life-{found.lives}"
                found.lives += 1
                planned = self._planned(life, min(KILLS_PER_LIFE, kills - found.kills))
                if self._live(life, database, planned, watch) and self._equal_at_the_end(life, _location(database)):
                    found.lives_equal += 1
                if not found.notes:
                    shutil.rmtree(database)
        self._spare.discard()
        found.workers_left_over += len(watch.left_over)
        found.longest_orphan_seconds = round(watch.longest_seconds, 2)
        for text in watch.left_over:
            found.note(text)

    def _start(self) -> Actor:
        """An actor; numbers of workers take turns."""
        actor = Actor(self._workers[self._starts % len(self._workers)], self._log)
        self._starts += 1
        return actor

    def _take(self) -> Actor:
        """An actor that had time to start, while the next one starts."""
        actor, self._spare = self._spare, self._start()
        return actor

    def _planned(self, life: int, kills: int) -> list[int]:
        """How many kills each step of a life gets: half of them at different steps, half wherever chance has it."""
        chance, steps = random.Random(f"{self._seed} {life}"), range(len(self._life))
        apart = chance.sample(steps, min(kills - kills // 2, len(steps)))
        counts = Counter([*apart, *(chance.choice(steps) for _ in range(kills - len(apart)))])
        return [counts[step] for step in steps]

    def _live_undisturbed(self, workers: int) -> Undisturbed:
        database = self._folder / f"undisturbed-{workers}"
        location, seconds, after, tags = _location(database), [], [], []
        actor = Actor(workers, self._log)
        for step, name in enumerate(self._life):
            actor.begin(database, self._sources, name)
            started = time.monotonic()
            answer = actor.wait(STEP_SECONDS)
            if answer != {"done": name}:
                raise RuntimeError(f"undisturbed, step {step} ({name}) failed: {answer}; see {self._log}")
            seconds.append(time.monotonic() - started)
            self._typical[step, workers] = seconds[-1]
            after.append(facts(_newest(location)))
            tags.append(_stages(tagged(location)))
            harness.say(f"undisturbed  {step:2d} {name:<15} {seconds[-1]:6.2f} s  {after[-1].rows:,} rows")
        actor.end()
        for name in left_behind(location):
            self.findings.files_left_behind += 1
            self.findings.note(f"undisturbed: left behind {name}")
        newest = _newest(location)
        return Undisturbed(seconds=seconds, after=after, tags=tags, records=recorded(newest), columns=digests(newest))

    def _typical_seconds(self, step: int, workers: int) -> float:
        is_fill = self._life[step].startswith(("dedup", "tokenize"))
        guess = self.undisturbed.seconds[step] + (POOL_SECONDS if is_fill and workers > 1 else 0.0)
        return self._typical.get((step, workers), guess)

    def _live(self, life: int, database: Path, planned: list[int], watch: OrphanWatch) -> bool:
        """One life from the first step to the last; False when a step cannot be brought to its end."""
        known: dict[str, tuple[int, Facts]] = {}
        actor: Actor | None = None
        step, attempt, failures = 0, 0, 0
        while step < len(self._life):
            chance = random.Random(f"{self._seed} {life} {step} {attempt}")
            actor = actor or self._take()
            typical = self._typical_seconds(step, actor.workers)
            # A kill that comes too late goes to the next step, so at the last one it must not come late.
            moment = chance.random() * typical * (1.0 if step + 1 < len(self._life) else 0.5)
            actor.begin(database, self._sources, self._life[step])
            started = time.monotonic()
            kills_worker = not planned[step] and actor.workers > 1 and chance.random() < WORKER_KILL_SHARE
            answer = actor.wait(moment if planned[step] or kills_worker else STEP_SECONDS)
            if answer is None and kills_worker:  # the driver lives, and has to bring the step to its end
                self.findings.worker_kills += actor.kill_worker(chance)
                answer = actor.wait(STEP_SECONDS)
            attempt += 1
            if answer is None:
                workers = actor.children()
                is_hit = actor.kill()
                watch.add(workers)
                if is_hit:
                    planned[step] -= 1
                    harness.say(
                        f"kill {self.findings.kills + 1:4d}  life {life}  {step:2d} {self._life[step]:<15} "
                        f"at {moment:6.3f} of {typical:6.3f} s, {actor.workers} worker(s)"
                    )
                    self.findings.kills_by_workers[str(actor.workers)] += 1
                    self._survive(f"life {life} step {step} killed at {moment:.3f} s", step, _location(database), known)
                else:
                    self.findings.missed_kills += 1
                actor = None  # the step begins again: done or not, it may be run twice
            elif "done" in answer:
                self._typical[step, actor.workers] = time.monotonic() - started
                self.findings.missed_kills += planned[step] > 0
                if step + 1 < len(self._life):
                    planned[step + 1] += planned[step]
                step, attempt, failures = step + 1, 0, 0
            else:
                actor, failures = None, failures + 1
                self.findings.steps_failed += 1
                self.findings.note(f"life {life} step {step} attempt {attempt}: {answer['error']}")
                if failures >= FAILURES_PER_STEP:
                    return False
        assert actor is not None
        actor.end()
        return True

    def _survive(self, when: str, step: int, location: Location, known: dict[str, tuple[int, Facts]]) -> None:
        """Count a kill, and look at what it left."""
        from pretrain_assets.table.storage import exists

        found, before = self.findings, len(self.findings.notes)
        found.kills += 1
        found.kills_by_step[self._life[step]] += 1
        if step or exists(location):
            self._look(when, step, location, known)
        found.kills_survived += len(found.notes) == before

    def _look(self, when: str, step: int, location: Location, known: dict[str, tuple[int, Facts]]) -> None:
        """The newest version must be one of before or after the step; no tagged version may be gone or changed."""
        found, allowed = self.findings, self.undisturbed.after[max(0, step - 1) : step + 1]
        try:
            now = facts(_newest(location))
        except Exception as error:
            found.rows_lost += allowed[0].rows
            found.note(f"{when}: the newest version cannot be read: {type(error).__name__}: {error}")
            return
        if now not in allowed:
            found.rows_lost += max(0, min(one.rows for one in allowed) - now.rows)
            found.versions_changed += 1
            found.note(f"{when}: the newest version holds {now}, expected one of {allowed}")
        tags = tagged(location)
        before = self.undisturbed.tags[step - 1] if step else Counter()
        missing = (before & self.undisturbed.tags[step]) - _stages(tags)
        if missing:
            found.versions_lost += missing.total()
            found.note(f"{when}: tagged versions of {dict(missing)} are gone")
        for tag in list(known):
            if tag not in tags:
                del known[tag]
        for tag, version in tags.items():
            self._look_at_tag(when, tag, version, location, known)

    def _look_at_tag(
        self, when: str, tag: str, version: int, location: Location, known: dict[str, tuple[int, Facts]]
    ) -> None:
        from pretrain_assets.table.storage import open_dataset

        before = known.get(tag)
        try:
            known[tag] = (version, facts(open_dataset(location, tag)))
        except Exception as error:
            self.findings.versions_lost += 1
            self.findings.rows_lost += before[1].rows if before else 0
            self.findings.note(f"{when}: tag {tag} cannot be read: {type(error).__name__}: {error}")
            return
        if before is not None and known[tag] != before:
            self.findings.versions_changed += 1
            self.findings.rows_lost += max(0, before[1].rows - known[tag][1].rows)
            self.findings.note(f"{when}: tag {tag} was {before}, is {known[tag]}")

    def _equal_at_the_end(self, life: int, location: Location) -> bool:
        found, wanted, when = self.findings, self.undisturbed, f"life {life} at its end"
        noted, newest = len(found.notes), _newest(location)
        columns = digests(newest)
        if columns != wanted.columns:
            found.versions_changed += 1
            found.rows_lost += max(0, wanted.after[-1].rows - newest.count_rows())
            differ = {name for name, _ in columns.items() ^ wanted.columns.items()}
            found.note(f"{when}: columns differ from an undisturbed life: {', '.join(sorted(differ))}")
        if missing := wanted.tags[-1] - _stages(tagged(location)):
            found.versions_lost += missing.total()
            found.note(f"{when}: tagged versions of {dict(missing)} do not exist")
        if missing := wanted.records - recorded(newest):
            found.records_lost += missing.total()
            found.note(f"{when}: lineage records of {dict(missing)} do not exist")
        left = left_behind(location)
        found.files_left_behind += len(left)
        for name in left:
            found.note(f"{when}: left behind {name}")
        return len(found.notes) == noted


def _location(database: Path) -> Location:
    from pretrain_assets.table.storage import Location

    return Location(database_uri=str(database))


def _newest(location: Location) -> Any:
    from pretrain_assets.table.storage import open_dataset

    return open_dataset(location)


def _stages(tags: dict[str, int]) -> Counter[str]:
    """Tagged versions by stage; the tags of people and runs by their name."""
    return Counter(name.rpartition("-v")[0] or name for name in tags)


def campaign(kills: int, *, seed: int, workers: list[int], scale: Scale) -> tuple[Findings, Undisturbed]:
    """Run a campaign in a scratch folder, which stays when something was found."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    run = Campaign(folder, scale, seed=seed, workers=workers)
    run.run(kills)
    if run.findings.notes:
        harness.say(f"tables and the actors' log stay in {folder}")
    else:
        shutil.rmtree(folder)
    return run.findings, run.undisturbed


def report(found: Findings, undisturbed: Undisturbed, *, seed: int, workers: list[int]) -> harness.Report:
    """The findings under the contract of all benchmarks."""
    lost = found.rows_lost + found.versions_lost + found.versions_changed + found.records_lost
    ratios = {
        "kills_survived_share": found.kills_survived / max(1, found.kills),
        "lives_equal_to_undisturbed_share": found.lives_equal / max(1, found.lives),
        "nothing_lost_or_changed": float(lost == 0),
        "no_step_failed": float(found.steps_failed == 0),
        "nothing_left_behind": float(found.files_left_behind + found.workers_left_over == 0),
    }
    return harness.Report(
        name="faults",
        measurements={
            **asdict(found),
            "kills_by_step": dict(sorted(found.kills_by_step.items())),
            "kills_by_workers": dict(sorted(found.kills_by_workers.items())),
            "seed": seed,
            "workers": workers,
            "steps_per_life": len(undisturbed.seconds),
            "undisturbed_life_seconds": round(sum(undisturbed.seconds), 2),
            "rows_at_the_end": undisturbed.after[-1].rows,
        },
        ratios=ratios,
        targets=dict.fromkeys(ratios, 1.0),
    )


def main() -> None:
    """Run a campaign; exit code 1 when a target is missed."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, help="kills that count (default 200; with --quick 10)")
    parser.add_argument("--seed", type=int, default=1, help="decides which steps are killed, and when (default 1)")
    parser.add_argument("--workers", choices=("1", "2", "both"), default="both", help="workers of each fill")
    options = parser.parse_args()
    workers = [1, 2] if options.workers == "both" else [int(options.workers)]
    kills = options.kills or (10 if options.quick else 200)
    found, undisturbed = campaign(kills, seed=options.seed, workers=workers, scale=QUICK if options.quick else FULL)
    result = report(found, undisturbed, seed=options.seed, workers=workers)
    harness.say(
        f"\nkills survived {found.kills_survived} of {found.kills}, rows lost {found.rows_lost}, versions lost "
        f"{found.versions_lost}"
    )
    harness.finish(result, options)
    sys.exit(0 if all(result.met.values()) else 1)


if __name__ == "__main__":
    main()
