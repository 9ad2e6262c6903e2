"""A static embedding made from the corpus itself, so that the benchmark needs no network and no model's weights.

Invariant: a pure function of the texts. Words by TF-IDF, their vectors by a truncated singular value decomposition
(latent semantic analysis; Deerwester et al., JASIS 1990): documents that share words are near, in `dims` dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WORDS = 30_000
"""Of the vocabulary, by frequency."""
FITTED = 20_000
"""Texts that the vectors are fitted on, at most, spread over all."""
CHARS = 4_000
"""Read of each of them."""
UNKNOWN = "[UNK]"


def make(texts: Sequence[str], folder: Path, *, dims: int) -> Path:
    """Fit, and save as a model2vec model in a new folder."""
    import numpy as np
    import tokenizers
    from model2vec import StaticModel
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    chosen = [text[:CHARS] for text in texts[:: -(-len(texts) // FITTED)]]
    counts = TfidfVectorizer(max_features=WORDS, sublinear_tf=True, stop_words="english", token_pattern=r"\w+")
    fitted = TruncatedSVD(n_components=dims, n_iter=2, random_state=0).fit(counts.fit_transform(chosen))
    words = [UNKNOWN, *counts.get_feature_names_out()]
    vectors = np.zeros((len(words), dims), np.float32)
    vectors[1:] = fitted.components_.T * counts.idf_[:, None]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    StaticModel(vectors, tokenizer, {}).save_pretrained(folder)
    return folder
