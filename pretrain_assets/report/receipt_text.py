"""Text of a receipt: the documents, the versions that hold them, the models that saw them, and the proof of absence.

Invariant: prints what it is given and looks up nothing; what is not known is printed as unknown, what is not shown as a
number.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named
from pretrain_assets.report.text import megabytes
from pretrain_assets.table.storage import join

if TYPE_CHECKING:
    from pretrain_assets.forensics.receipts.absence import Check
    from pretrain_assets.forensics.receipts.erasure import Erasure
    from pretrain_assets.forensics.receipts.receipt import Receipt
    from pretrain_assets.forensics.receipts.witnesses import Saved, Witness

SHOWN = 10
"""Rows and ids shown; --json has more."""
FEW = 5
"""Ids that are written into a command one by one."""
STAGES = 2
WIDTH = 110


def receipt_text(receipt: Receipt) -> str:
    """The whole receipt."""
    parts = [
        f"receipt for {counted(receipt.num_rows, 'document')} of {receipt.table}, {receipt.num_there:,} of them in its "
        f"newest version ({receipt.pin})",
        *_documents(receipt),
        _versions(receipt),
        "\n\n".join(_models(receipt)),
    ]
    if receipt.erasure is not None:
        parts.append("\n".join(_erasure(receipt.erasure)))
    parts += [f"note: {note}" for note in receipt.notes]
    parts.append(f"receipt digest {receipt.digest}")
    return clean("\n\n".join(part for part in parts if part))


def _documents(receipt: Receipt) -> Iterator[str]:
    rows = [
        [
            row.id,
            named(row.doc_id),
            named(row.source),
            "-" if row.n_tokens is None else f"{row.n_tokens:,}",
            row.ingested,
            row.deleted or "in the table",
            (row.preview or "-")[:48],
        ]
        for row in receipt.rows[:SHOWN]
    ]
    headers = ["id", "doc_id", "source", "tokens", "came with", "deleted by", "it begins"]
    if rows:
        yield tabulate(rows, headers=headers, disable_numparse=True)
    lines = []
    if receipt.num_rows > len(rows):
        lines.append(f"and {receipt.num_rows - len(rows):,} more; --json lists up to {len(receipt.rows)} of them")
    if receipt.num_copies:
        lines.append(
            f"{counted(receipt.num_copies, 'other row')} of the same content: id {_ids(receipt.copies)}; "
            "--with-duplicates takes them in"
        )
    if receipt.near_copies:
        lines.append(f"near duplicates, not the same text: id {_ids(receipt.near_copies)}")
    if receipt.unhashed:
        lines.append(
            f"{counted(receipt.unhashed, 'row')} never compared with others, so there may be copies: run "
            "`pretrain dedup`"
        )
    if lines:
        yield "\n".join(lines)


def _versions(receipt: Receipt) -> str:
    if not receipt.versions:
        return "no version that is there has any of them"
    rows = [[f"v{one.version}", f"{one.rows:,}", _kept(one.reasons)] for one in receipt.versions]
    headers = ["version that has them", "rows", "kept by"]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=["left", "right", "left"])


def _kept(reasons: Sequence[str]) -> str:
    """Reasons in short: of many stages of which a version is the newest, the number."""
    stages = [reason for reason in reasons if reason.startswith("newest ") and reason != "newest version"]
    others = [reason for reason in reasons if reason not in stages]
    named = stages if len(stages) <= STAGES else [f"newest of {len(stages)} stages"]
    return "; ".join([*others, *named]) or "nothing: `pretrain maintain` frees it"


def _models(receipt: Receipt) -> Iterator[str]:
    saw = [one for one in receipt.witnesses if one.saw or one.unknown]
    clean = [one for one in receipt.witnesses if not one.saw and not one.unknown]
    if not saw:
        yield f"no model saw them: {counted(len(receipt.witnesses), 'run')} on this table in {receipt.runs}"
    for one in saw:
        yield "\n".join(_witness(one, receipt))
    if clean:
        yield "\n".join(
            ["runs that saw none of them:", *(f"  {one.run} ({_why(one)})" for one in clean[:SHOWN])]
            + ([f"  and {len(clean) - SHOWN:,} more"] if len(clean) > SHOWN else [])
        )


def _why(one: Witness) -> str:
    reasons = list(dict.fromkeys(seen.reason for _, seen in one.seen)) or [
        f"version {one.pin.rpartition('@')[2]} has none of them"
    ]
    more = f", and {len(reasons) - 2} other reasons" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _witness(one: Witness, receipt: Receipt) -> Iterator[str]:
    total = f" of {one.total_steps:,}" if one.total_steps else ""
    state = f"{', in progress' if one.goes_on else ''}{f', a replay of {one.replay_of}' if one.replay_of else ''}"
    yield f"run {one.run}: recipe {one.recipe}, step {one.step:,}{total}{state}, trained on {one.pin}"
    if one.unknown:
        yield f"  what it saw is not known: {one.unknown}"
        yield "  so no checkpoint of it counts as clean"
        return
    often = "once" if one.times == one.num_seen else f"{one.times:,} times"
    yield (
        f"  saw {one.num_seen:,} of them, {often}, {counted(one.tokens, 'token')}, from step {one.first_step:,} to "
        f"{one.last_step:,}"
    )
    if receipt.num_rows > 1:
        for row, seen in one.seen[:SHOWN]:
            yield f"    id {row}: {seen.describe()}"
    yield (
        f"  checkpoints that saw them: {_steps([c for c in one.checkpoints if c.saw])}; "
        f"clean: {_steps([c for c in one.checkpoints if not c.saw])}"
    )
    for export in one.exports:
        yield f"  {export.name} {'has seen them' if export.saw else 'is clean' if export.saw is False else 'unknown'}"
    start = f"step {one.clean_step:,}" if one.clean_step else "none: a replay begins at the start"
    took = "" if one.retrain_seconds is None else f", {one.retrain_seconds:,.0f} s at its own speed"
    cost = f"{counted(one.retrain_steps, 'step')}, {counted(one.retrain_tokens, 'token')}{took}"
    yield f"  last clean checkpoint: {start}"
    yield f"  to train again from there: {cost}"
    if any(c.saw for c in one.checkpoints):
        few = len(receipt.rows) <= FEW and receipt.num_rows == len(receipt.rows)
        chosen = " ".join(f"--id {row.id}" for row in receipt.rows) if few else "--without ids.txt"
        hint = "" if few else "    # ids.txt: this receipt with --ids ids.txt"
        yield f"  pretrain replay {join(receipt.runs, one.run)} {chosen}{hint}"


def _steps(saved: Sequence[Saved]) -> str:
    return f"step {', '.join(f'{one.step:,}' for one in saved)}" if saved else "none"


def _ids(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > SHOWN else ""
    return ", ".join(map(str, ids[:SHOWN])) + more


def _erasure(done: Erasure) -> Iterator[str]:
    if done.deleted:
        yield f"{done.deleted}: {counted(done.rows, 'row')} deleted"
    else:
        yield "nothing to delete: the newest version has none of them; searched for them all the same"
    if done.purged and done.bytes_before is not None and done.bytes_after is not None:
        freed = ", ".join(f"v{version}" for version in done.versions_freed) or "none"
        yield (f"storage {megabytes(done.bytes_before)} -> {megabytes(done.bytes_after)}; versions freed: {freed}")
    elif done.purged:
        yield "nothing to free: no version and no file of the table has any of them"
    yield from (f"keeps its version: {one}, then this command again" for one in done.waiting)
    yield ""
    yield "absence from the newest version"
    yield from _checks(done.absence.newest)
    yield "storage"
    yield from _checks(done.absence.stored)
    yield "not searched"
    yield from (textwrap.fill(f"- {place}", WIDTH, subsequent_indent="  ") for place in done.absence.not_searched)
    yield ""
    if done.absence.everywhere:
        yield "ABSENT: no query gives any of them, and nothing that was searched holds any of them"
    elif done.absence.nothing_found:
        yield "NOT FOUND: no query gives any of them, and nothing holds what could be looked for; NOT PROVEN: see above"
    elif done.absence.in_newest:
        then = "" if done.purged else "; --purge frees what nothing pins"
        yield f"ABSENT from the newest version; STILL HELD by what is named above{then}"
    else:
        yield "NOT ABSENT: the newest version still gives what is named above"


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        answer = "FOUND " if check.found else "partly" if check.unproven else "absent"
        yield textwrap.fill(f"{answer} {check.place}: {check.method}", WIDTH, subsequent_indent="       ")
        for found in check.found[:SHOWN]:
            yield textwrap.fill(f"  - {found}", WIDTH, initial_indent="     ", subsequent_indent="         ")
        if len(check.found) > SHOWN:
            yield f"       - and {len(check.found) - SHOWN:,} more"
        if check.found:
            yield textwrap.fill(check.remedy, WIDTH, initial_indent="       -> ", subsequent_indent="          ")
        for one in check.unproven[:SHOWN]:
            yield textwrap.fill(f"not proven: {one}", WIDTH, initial_indent="       ", subsequent_indent="         ")
        if len(check.unproven) > SHOWN:
            yield f"       not proven: and {len(check.unproven) - SHOWN:,} more"
