"""Text of a document's neighbours, and of a table's near duplicates and clusters.

Invariant: prints what it is given; a number of a sample is marked as one.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

if TYPE_CHECKING:
    from pretrain_assets.forensics.retrieval.clusters import Clusters
    from pretrain_assets.forensics.retrieval.neighbours import NeighboursOf

WIDTH = 100
SHOWN = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
"""Thresholds of the curve that are printed; the plot and the JSON document have all."""
PREVIEW = 70
"""Characters of a document in a line."""


def neighbours_text(found: NeighboursOf) -> str:
    """The document, then its neighbours, nearest first."""
    seen = f", {found.seen.describe()}" if found.seen else ""
    lines = [
        f"id {found.id} ({named(found.source)}){seen}; {found.pin}, {found.method.describe()}",
        textwrap.indent(textwrap.fill(found.preview, WIDTH), "   "),
    ]
    if not found.has_vector:
        lines.append("It has no word that the model knows: its vector is zero, and near to nothing.")
    elif not found.neighbours:
        lines.append("No other document has a vector, or satisfies the condition.")
    for place, near in enumerate(found.neighbours, 1):
        known = ", known to deduplication" if near.known else ""
        seen = f", {near.seen.describe()}" if near.seen else ""
        lines.append(f"{place}. id {near.id} ({named(near.source)}), similarity {near.similarity:.4f}{known}{seen}")
        lines.append(textwrap.indent(textwrap.fill(near.preview, WIDTH), "   "))
    return clean("\n".join(lines))


def clusters_text(found: Clusters) -> str:
    """What was asked, the curve, the clusters at the threshold, and what deduplication knew."""
    return clean("\n\n".join([_head(found), _curve(found), _agreement(found), _clusters(found)]))


def _head(found: Clusters) -> str:
    asked = "all" if found.asked == found.rows else f"a sample of {found.asked:,} of"
    where = f" where {found.where}" if found.where else ""
    lines = [f"{found.pin}, {found.method.describe()}", f"asked: {asked} {counted(found.rows, 'document')}{where}"]
    if found.zero:
        lines.append(f"{found.zero:,} of them have the zero vector (no word that the model knows): nobody's neighbours")
    if found.missing:
        lines.append(
            f"{found.missing:,} of them have no vector yet: `pretrain embed {found.method.model}` embeds new rows"
        )
    return "\n".join(lines)


def _curve(found: Clusters) -> str:
    sampled = found.asked < found.rows
    rows = [
        [
            f"{point.threshold:g}{' *' if point.threshold == found.threshold else ''}",
            f"{point.share:.2%}" + (f" ±{point.error:.2%}" if sampled else ""),
            f"{point.documents:,}",
            f"{point.documents_new:,}",
            f"{point.pairs:,}",
            f"{point.lists_full:,}",
        ]
        for point in found.curve
        if point.threshold in (*SHOWN, found.threshold)
    ]
    pairs = "pairs in the table, estimated" if sampled else "pairs"
    headers = [
        "similarity",
        "share with a neighbour",
        "documents",
        "new to dedup",
        pairs,
        f"with {found.limit} or more",
    ]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=["right"] * len(headers))


def _agreement(found: Clusters) -> str:
    """What deduplication knew of the neighbours at the threshold."""
    agreement, near = found.agreement, f"At {found.threshold:g}"
    if not agreement.columns:
        return f"{near}: whether deduplication knew is not known; run `pretrain dedup` and `pretrain near-dedup`."
    lines = [
        f"{near}: of {agreement.neighbours_known + agreement.neighbours_new:,} neighbours listed, deduplication knew "
        f"{agreement.neighbours_known:,}; {agreement.neighbours_new:,} are new (paraphrases, templates, editions).",
        f"Of {counted(agreement.flagged, 'document')} asked that it flagged, {agreement.flagged_found:,} have a known "
        "copy among these neighbours.",
    ]
    if "near_dup_of" not in agreement.columns:
        lines.append("Only exact duplicates are known so far: run `pretrain near-dedup`.")
    return "\n".join(lines)


def _clusters(found: Clusters) -> str:
    """How many, how large, and the largest with their members."""
    if not found.num_clusters:
        return "No clusters at this threshold."
    sizes = ", ".join(f"{count:,} of {size}" for size, count in found.sizes.items())
    lines = [
        f"{counted(found.num_clusters, 'cluster')} of {found.clustered:,} documents (by size: {sizes}). With one "
        f"document of each kept, {found.agreement.clustered_beyond:,} more would go than are flagged."
    ]
    for cluster in found.largest:
        alike = f"mean similarity {cluster.mean_similarity:.3f}"
        lines += ["", f"{cluster.size:,} documents, {cluster.flagged:,} of them flagged, {alike}"]
        rows = [
            [member.id, named(member.source), "flagged" if member.flagged else "", member.preview[:PREVIEW]]
            for member in cluster.members
        ]
        lines.append(
            tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=["right", "left", "left", "left"])
        )
        if cluster.size > len(rows):
            lines.append(f"and {cluster.size - len(rows):,} more")
    return "\n".join(lines)
