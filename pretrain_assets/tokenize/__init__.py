"""The tokenization room: text to token ids, with a tokenizer whose identity travels with the column.

Invariant: a document's tokens depend on its text and the tokenizer's fingerprint alone; no document contains a special
token, whatever its text says.
"""

from pretrain_assets.tokenize.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
