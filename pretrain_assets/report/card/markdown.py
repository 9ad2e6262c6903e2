"""The run card as markdown: the same facts as the page, short enough to stand in a repository or in Dagster's UI.

Invariant: everything printed comes from the card given, and no text of a document or name of a source is ever markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from pretrain_assets.forensics.card.lineage import DataLineage, Node
from pretrain_assets.forensics.card.run_card import RunCard
from pretrain_assets.report.card import words
from pretrain_assets.report.clean import clean
from pretrain_assets.report.contamination_in_time_text import verdict as stands
from pretrain_assets.report.curation_text import lines_of, percent, readable
from pretrain_assets.table.lineage import Pin

SOURCES, EVALUATIONS = 20, 10
"""Sources, and evaluations, in a table: the largest, and the last ones."""
_MARKUP = re.compile(r"([\\`*_\[\]#|~])")


def run_card_markdown(card: RunCard) -> str:
    """The whole card."""
    sections = [
        ("Training", _training(card)),
        ("Evaluation", _evaluation(card)),
        ("Data lineage", _lineage(card)),
        ("Filter", _filter(card)),
        ("Sources", _sources(card)),
        ("Ledger", _ledger(card)),
        ("Exposures", _exposures(card)),
        ("Contamination", _contamination(card)),
        ("A sample and where it may come from", _sample(card)),
        ("Ask further", _questions(card)),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)
    return f"# {card.recipe.name}, {words.progress_of(card)}\n\n{_facts(card)}\n\n{body}\n"


def _facts(card: RunCard) -> str:
    epochs, seen = words.epochs_of(card), sum(seen.documents for seen in card.exposures if seen.high)
    rows = [
        ["run", f"`{card.run}`, {card.status or 'unfinished'}"],
        ["data", f"version {Pin.parse(card.pin).version} of {_md(card.table)}, tag `{card.tag}`, pin `{card.pin}`"],
        ["checkpoint", f"`{card.digest}`, pretrain_assets {card.code_version}"],
        ["tokens seen", f"{card.tokens_seen:,}" + (f", {epochs}" if epochs else "")],
        ["documents seen", f"{seen:,} of {sum(seen.documents for seen in card.exposures):,} that the filter keeps"],
        [
            "validation loss",
            f"{words.loss(card.val_loss)}, {words.measured(card.val_loss, card.val_loss_step, card.step)}",
        ],
        ["training loss", words.loss(card.train_loss)],
        ["parameters", f"{card.num_parameters:,}"],
    ]
    if replay := words.replay_of(card):
        rows.append(["replay", replay])
    return _table(["", "run card"], rows)


def _training(card: RunCard) -> str:
    rows = [[name, value, note] for name, value, note in words.speeds_of(card)]
    parts = [_table(["", "", ""], rows)] if rows else []
    return _joined([*parts, *words.events_of(card), _missing(card, "metrics")])


def _evaluation(card: RunCard) -> str:
    found, parts = words.evaluated_of(card), [f"Held out: {_code(readable(card.recipe.data.held_out_filter))}"]
    if found:
        curve = [[f"{e.step:,}", words.loss(e.loss), words.perplexity(e.loss)] for e in card.history.evaluations]
        parts.append(_table(["step", "validation loss", "perplexity"], curve[-EVALUATIONS:]))
        headers = [
            "source",
            f"loss at step {found.first_step:,}",
            f"at step {found.last_step:,}",
            "change",
            "perplexity",
        ]
        parts.append(_table(headers, [[_md(row[0]), *row[1:]] for row in found.rows]))
    return _joined([*parts, _missing(card, "evaluation")])


def _lineage(card: RunCard) -> str:
    if card.lineage is None:
        return _missing(card, "lineage")
    deletions = [f"`{tag}` deleted {rows:,} rows before this version." for tag, rows in card.lineage.deletions]
    stages = [
        [stage.stage, f"`{stage.tag}`", stage.code_version, _parameters(stage.parameters)]
        for stage in card.lineage.stages
    ]
    return _joined([_graph(card.lineage), *deletions, _table(["stage", "version", "code", "parameters"], stages)])


def _graph(lineage: DataLineage) -> str:
    """A line per node, with the nodes that it reads."""
    rows = []
    names = {node.key: node.tag or node.title for node in lineage.nodes}
    for node in lineage.nodes:
        reads = [names[edge.start] for edge in lineage.edges if edge.end == node.key]
        rows.append([_md(_name(node)), words.rows_of(node), ", ".join(words.marks_of(node)), _md(", ".join(reads))])
    return _table(["from files to model", "rows", "left out or marked", "made from"], rows)


def _name(node: Node) -> str:
    return {"files": f"files: {node.title}", "checkpoint": f"checkpoint of {node.title}"}.get(node.kind, str(node.tag))


def _parameters(parameters: Mapping[str, object]) -> str:
    return _md("; ".join(f"{name} {value}" for name, value in words.parameters_of(parameters)))


def _filter(card: RunCard) -> str:
    asked = f"Trained on {_code(readable(card.recipe.data.filter))}"
    if card.funnel is None:
        return _joined([asked, _missing(card, "funnel")])
    found = card.funnel
    rows = [["all rows", "", "", "", f"{found.total.rows:,}", f"{found.total.amount:,}"]]
    for depth, step in lines_of(found.steps):
        indent = "&emsp;" * depth
        if isinstance(step, str):
            rows.append([indent + step, "", "", "", "", ""])
            continue
        counts = [step.removes.rows, step.only.rows, step.in_order.rows, step.left.rows, step.left.amount]
        rows.append([f"{indent}{_md(readable(step.text, 80))}", *(f"{count:,}" for count in counts)])
    headers = ["term", "removes", "only it", "in order", "rows left", f"{found.unit} left"]
    return _joined([asked, _table(headers, rows)])


def _sources(card: RunCard) -> str:
    if not card.sources:
        return _missing(card, "sources")
    licensed = any(source.license for source in card.sources)
    rows = [
        [
            _md(source.name),
            *([_md(source.license or "unknown")] if licensed else []),
            *(f"{source.rows:,}", f"{source.tokens:,}", percent(source.share)),
        ]
        for source in card.sources[:SOURCES]
    ]
    more = len(card.sources) - SOURCES
    headers = ["source", *(["licence"] if licensed else []), "documents", "tokens", "share"]
    note = [] if licensed else ["The table says nothing about licences."]
    return _joined([_table(headers, rows), *([f"And {more:,} more."] if more > 0 else []), *note])


def _ledger(card: RunCard) -> str:
    if card.ledger is None:
        return _missing(card, "ledger")
    closes = "It closes: what came in is what is accounted for." if not card.ledger.gaps else "**It does not close.**"
    rows = [
        [
            _md(section.name),
            account.unit,
            f"{sum(account.came.values()):,}",
            _md(", ".join(f"{name} {count:,}" for name, count in words.became(account.went))),
        ]
        for section in card.ledger.sections
        for account in section.accounts
    ]
    return _joined([closes, *(f"- {_md(gap)}" for gap in card.ledger.gaps), _table(["", "unit", "in", "became"], rows)])


def _exposures(card: RunCard) -> str:
    total = sum(seen.documents for seen in card.exposures)
    rows = [[words.times_of(seen), f"{seen.documents:,}", percent(seen.documents / total)] for seen in card.exposures]
    return _table(["seen", "documents", "share"], rows)


def _contamination(card: RunCard) -> str:
    if card.contamination is None:
        return _missing(card, "contamination")
    rows = [
        [
            _md(one.name),
            f"**{stands(one)}**",
            f"{one.searched:,} of {one.items:,}",
            f"{one.found:,}",
            _at(one.first_step, "never"),
            _at(one.newest_clean, "none"),
            ", ".join(f"{step:,}: {seen:,}" for step, seen, _ in words.by_step(one, card.contamination.steps)),
        ]
        for one in card.contamination.sets
    ]
    headers = ["set", "score", "items searched", "in the table", "first seen", "last clean checkpoint"]
    headers.append("items seen by saved checkpoints")
    return _table(headers, rows)


def _sample(card: RunCard) -> str:
    if card.sample is None:
        return _missing(card, "sample")
    sources = [
        f"- document {source.id} ({_md(source.source or 'unknown source')}): {source.covered_tokens:,} tokens of the "
        f"sample stand in it; {_md(source.seen.describe())}. {_md(source.preview or '')}"
        for source in card.sample.attribution.sources
    ]
    text = _fenced(clean(card.sample.prompt + card.sample.text))
    return _joined(
        [_md(card.sample.attribution.verdict), text, "\n".join(sources), *map(_told, card.sample.attribution.notes)]
    )


def _at(step: int | None, never: str) -> str:
    return never if step is None else f"step {step:,}"


def _questions(card: RunCard) -> str:
    return _table(["question", "command"], [[one.asks, f"`{one.command}`"] for one in card.questions])


def _missing(card: RunCard, part: str) -> str:
    return _told(card.missing.get(part, ""))


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _code(text: str) -> str:
    """Text as code, on one line: between more backticks than it has."""
    line = clean(" ".join(text.split())).replace("|", "\\|")
    runs = [len(run) for run in re.findall("`+", line)]
    fence = "`" * (max(runs, default=0) + 1)
    return f"{fence} {line} {fence}" if runs else f"{fence}{line}{fence}"


def _fenced(text: str) -> str:
    """Text as a block of code."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}text\n{text}\n{fence}"


def _told(sentence: str) -> str:
    """A sentence with what stands between backticks as code."""
    return "".join(_code(part) if at % 2 else _md(part) for at, part in enumerate(sentence.split("`")))


def _md(text: str) -> str:
    """Text that is no markup: what steers is escaped, and so is what markdown and HTML read as theirs."""
    safe = clean(re.sub(r"\s+", " ", text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", safe)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)
