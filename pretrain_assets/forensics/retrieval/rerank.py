"""Rankings made one: by reciprocal ranks, and by a cross-encoder that reads query and document together.

Invariant: a fused ranking depends on ranks alone, so that scores of different kinds are never added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pretrain_assets.curate.document_models import beginnings, find_model, require_package
from pretrain_assets.errors import ModelError, PretrainError

K = 60
"""Of reciprocal rank fusion: 1 / (K + rank). Cormack, Clarke and Buettcher 2009, who found the choice not critical;
also the default of lancedb's RRFReranker."""
READ_TOKENS = 512
"""Tokens of query and document that a cross-encoder reads; fewer where the model takes fewer."""
BATCH = 16


def fuse(rankings: Mapping[str, Sequence[int]]) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: ids and their scores, the highest first; of equals, the lower id.

    Args:
        rankings: Ids of each ranking, the best first.
    """
    scores: dict[int, float] = {}
    for ids in rankings.values():
        for rank, one in enumerate(ids, 1):
            scores[one] = scores.get(one, 0.0) + 1 / (K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def cross_scores(model: str, query: str, texts: Sequence[str | None]) -> list[float]:
    """What a cross-encoder says of the query with each text; higher is nearer.

    Args:
        model: Folder or hub name of a sentence-transformers CrossEncoder with one output.
        query: The query as typed.
        texts: The documents; their beginnings are read.

    Raises:
        ModelError: no such model, or not one with one output.
        ConfigError: sentence-transformers is not installed.
    """
    import pyarrow as pa

    require_package("sentence_transformers", "embed")
    from sentence_transformers import CrossEncoder

    found = find_model(model, fetch=False)
    try:
        encoder = CrossEncoder(found.folder, max_length=READ_TOKENS, local_files_only=True, trust_remote_code=False)
        if encoder.num_labels != 1:
            raise ModelError(f"{model} has {encoder.num_labels} outputs; reranking takes a cross-encoder with one.")
        pairs = [(query, text) for text in beginnings(pa.array(texts, pa.string()), READ_TOKENS)]
        scores = encoder.predict(pairs, batch_size=BATCH, show_progress_bar=False) if pairs else []
    except PretrainError:
        raise
    except Exception as error:  # the library raises what it likes about files it cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"sentence-transformers cannot rerank with {found.folder}: {reason}") from error
    return [float(score) for score in scores]
