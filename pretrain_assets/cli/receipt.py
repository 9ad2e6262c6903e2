"""The verb that answers for documents, and takes them out: receipt.

Invariant: nothing is deleted that was not shown and confirmed; exit code 0 only when what was asked for happened.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from pretrain_assets import project
from pretrain_assets.cli.common import as_json, check_folder
from pretrain_assets.errors import ConfigError
from pretrain_assets.plural import counted


@click.command()
@click.option("--doc", "docs", multiple=True, metavar="ID", help="The table's id (always, if a number), or a doc_id.")
@click.option("--where", help="Rows that satisfy this SQL predicate; named filters may stand in it.")
@click.option("--search", "words", help="The best hits of the full-text index for these words.")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="Hits of --search.")
@click.option("--with-duplicates", is_flag=True, help="Rows with the same content, too.")
@click.option("--delete", "deletes", is_flag=True, help="Delete them in one new version, and prove their absence.")
@click.option("--purge", is_flag=True, help="With --delete: free all that holds them and nothing pins.")
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
@click.option("--deleted-text", is_flag=True, help="Show how documents begin that only older versions still have.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the receipt here, as JSON.")
@click.option("--ids", type=click.Path(dir_okay=False, path_type=Path), help="Write the ids here, one per line.")
@as_json
@click.pass_obj
def receipt(
    obj: dict[str, Any],
    docs: tuple[str, ...],
    where: str | None,
    words: str | None,
    limit: int,
    with_duplicates: bool,
    deletes: bool,
    purge: bool,
    yes: bool,
    deleted_text: bool,
    output: Path | None,
    ids: Path | None,
    json_output: bool,
) -> None:
    """Where documents are, which models saw them, and what training without them costs; then take them out.

    --delete makes a version without them, and searches everything for what is left. --purge also frees the older
    versions, rewrites data files and indexes, and removes the unfinished work of killed stages. What a run or a
    person pins stays until it is released: the receipt lists it, with the command, and the exit code is 1.

    A number is the table's id and nothing else: a source's own doc_id that looks so is asked for by
    --where "doc_id = '3'".
    """
    from pretrain_assets.forensics.receipts.documents import Asked, find_documents
    from pretrain_assets.forensics.receipts.erasure import erase
    from pretrain_assets.forensics.receipts.receipt import receipt_of
    from pretrain_assets.report.receipt_text import receipt_text

    if purge and not deletes:
        raise ConfigError("--purge goes with --delete; `pretrain maintain --purge` frees storage without deleting rows")
    check_folder("--output", output)
    check_folder("--ids", ids)
    asked = Asked(docs=docs, where=where, search=words, limit=limit, with_duplicates=with_duplicates)

    location, runs = obj["location"], obj["runs"]
    documents = find_documents(location, asked, deleted_text=deleted_text)
    found = receipt_of(location, runs, asked, documents)
    if ids:
        ids.write_text("".join(f"{row}\n" for row in documents.ids))
    if deletes:
        if words is not None and (yes or not sys.stdin.isatty()):
            raise ConfigError("Hits of a search, and of the next one others: go on with --doc ID for those meant.")
        if not yes and (found.num_there or (purge and found.num_rows)):
            _confirm(receipt_text(found), counted(found.num_there, "document"), purge=purge)
        found = erase(location, runs, documents, found, purge=purge, project=str(project.home()))
    if output:
        output.write_text(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if json_output else receipt_text(found))
    if found.erasure is not None and not found.erasure.done:
        sys.exit(1)


def _confirm(shown: str, number: str, *, purge: bool) -> None:
    click.echo(shown, err=True)
    more = ", and free every older version that nothing pins" if purge else ""
    click.confirm(f"Delete {number}{more}?", abort=True, err=True)


VERBS = (receipt,)
