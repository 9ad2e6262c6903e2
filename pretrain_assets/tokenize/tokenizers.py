"""Tokenizers behind one small protocol: `gpt2` (bundled, tiktoken), `byte`, and `hf:<name or local directory>`.

Each knows its identity: a fingerprint of vocabulary, merges and special tokens, and an end-of-text id. A tokenizer
without an end-of-text token is an error, never a silent stand-in. Text that spells a special token is ordinary text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretrain_assets.config import TokenizerIdentity
from pretrain_assets.errors import TokenizerError
from pretrain_assets.tokenize.bytelevel import GPT2_PATTERN, ByteLevel, byte_level, byte_of_character, check_merges
from pretrain_assets.tokenize.engines import FastokensEngine, ReferenceEngine, TiktokenEngine, concatenate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pretrain_assets.tokenize.engines import Encode

GPT2_EOS = "<|endoftext|>"


class Tokenizer(Protocol):
    """Turns documents into token ids."""

    @property
    def identity(self) -> TokenizerIdentity:
        """Name, fingerprint, vocabulary size and special ids."""

    def encode_batch(
        self, texts: Sequence[str], num_threads: int = 1
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Token ids of all texts in one array, and offsets (len(texts) + 1) of each text's first id."""

    @property
    def has_engines(self) -> bool:
        """Whether there is more than one way to encode."""

    def engine(self, name: str) -> Encode:
        """What encodes as `encode_batch` does: `fastokens`, `tiktoken` or `transformers`.

        Raises:
            TokenizerError: this tokenizer cannot be run so.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of UTF-8 that each id stands for, 0 for special tokens, shape (vocab_size,); None if not known."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by name.

    Raises:
        TokenizerError: unknown or unreadable, or it has no end-of-text token.
    """
    if name == "gpt2":
        return _gpt2()
    if name == "byte":
        return ByteTokenizer()
    if name.startswith("hf:") and name != "hf:":
        return HuggingFaceTokenizer(name.removeprefix("hf:"))
    raise TokenizerError(
        f"Unknown tokenizer {name!r}. Known: gpt2 (bundled), byte, hf:<Hugging Face name or local directory>."
    )


class Gpt2Tokenizer:
    """The GPT-2 byte-level BPE from the bundled vocabulary, run by tiktoken unless another engine is asked for."""

    has_engines = True

    def __init__(self) -> None:
        self._folder = files("pretrain_assets") / "data" / "gpt2"
        vocabulary = json.loads((self._folder / "vocab.json").read_text(encoding="utf-8"))
        to_byte = byte_of_character()
        eos_id = vocabulary.pop(GPT2_EOS)
        ranks = {bytes(to_byte[c] for c in token): rank for token, rank in vocabulary.items()}
        self._tokens = {rank: token for token, rank in ranks.items()}
        self._spelled = self._tokens | {eos_id: GPT2_EOS.encode()}
        self._engines: dict[str, Encode] = {"tiktoken": TiktokenEngine(ByteLevel(ranks=ranks, pattern=GPT2_PATTERN))}
        self.identity = TokenizerIdentity(
            name="gpt2",
            fingerprint=_fingerprint(
                sorted((rank, token.hex()) for token, rank in ranks.items()), GPT2_PATTERN, eos_id
            ),
            vocab_size=len(ranks) + 1,
            eos_id=eos_id,
            pad_id=len(ranks) + 1,
        )

    def encode_batch(
        self, texts: Sequence[str], num_threads: int = 1
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Encode on some threads."""
        return self.engine("tiktoken")(texts, num_threads)

    def engine(self, name: str) -> Encode:
        """Any engine; transformers' part is played by the `tokenizers` package that it stands on."""
        if name not in self._engines:
            tokenizer_json = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            self._engines[name] = FastokensEngine(tokenizer_json) if name == "fastokens" else _reference(tokenizer_json)
        return self._engines[name]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; padding is left out."""
        known = self._spelled
        return b"".join(known[i] for i in ids if i in known).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each id."""
        return _lengths(self._tokens, self.identity)


_gpt2 = cache(Gpt2Tokenizer)
"""Loaded once per process: its files come with the package and do not change."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, end-of-text 256."""

    has_engines = False
    identity = TokenizerIdentity(name="byte", fingerprint="utf-8-bytes", vocab_size=257, eos_id=256, pad_id=257)

    def encode_batch(
        self, texts: Sequence[str], num_threads: int = 1
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """One id per UTF-8 byte."""
        import numpy as np

        return concatenate([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts])

    def engine(self, name: str) -> Encode:
        """There is one."""
        return self.encode_batch

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; end-of-text is left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """One, but for end-of-text."""
        return _lengths({i: b"x" for i in range(256)}, self.identity)


class HuggingFaceTokenizer:
    """Any tokenizer that transformers can load; remote code is never run."""

    def __init__(self, name: str) -> None:
        import transformers

        folder = Path(name).expanduser()
        local = folder.is_dir()
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder) if local else name, trust_remote_code=False, local_files_only=local, use_fast=True
            )
        except Exception as error:  # the Rust tokenizers raise bare Exception for a file they cannot read
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"Cannot load tokenizer hf:{name}: {reason}. Give a directory with tokenizer.json, "
                "or the name of a model on the hub that this machine can reach."
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise TokenizerError(
                f"Tokenizer hf:{name} names no end-of-text token (eos_token). The packer puts one between documents: "
                "set eos_token in its tokenizer_config.json."
            )
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.encode_special_tokens = True
            self._fast.no_truncation()  # a tokenizer.json may carry both: documents would be cut, or filled up
            self._fast.no_padding()
        eos_id, pad_id = int(self._tokenizer.eos_token_id), self._tokenizer.pad_token_id
        unknown_id = self._tokenizer.unk_token_id
        self._unknown_id = None if unknown_id in (eos_id, pad_id) else unknown_id
        self._special_ids = sorted(set(self._tokenizer.all_special_ids) - {self._unknown_id})
        vocab_size = 1 + max(self._tokenizer.get_vocab().values())  # not the number of entries: ids may have gaps
        vocabulary = self._stored if self._fast else sorted(self._tokenizer.get_vocab().items())
        self.identity = TokenizerIdentity(
            name=f"hf:{folder.resolve().name if local else name}",
            fingerprint=_fingerprint(vocabulary, eos_id),
            vocab_size=vocab_size,
            eos_id=eos_id,
            pad_id=vocab_size if pad_id in (None, eos_id, unknown_id) else int(pad_id),
        )

    def encode_batch(
        self, texts: Sequence[str], num_threads: int = 1
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Encode without adding or recognising special tokens.

        Raises:
            TokenizerError: a word is a special token in the model's own vocabulary, and there is no unknown token.
        """
        import numpy as np

        if self._fast is not None:
            values, offsets = self._reference(texts)
        else:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
            values, offsets = concatenate(encoded)
        spelled = np.isin(values, self._special_ids)
        if spelled.any():
            if self._unknown_id is None:
                raise TokenizerError(
                    f"Tokenizer {self.identity.name} turns a text into the special token "
                    f"{self.decode(values[spelled][:1].tolist())!r}, and has no unknown token of its own to put there: "
                    "set unk_token in its tokenizer_config.json to a token that is neither end-of-text nor padding."
                )
            values[spelled] = self._unknown_id
        return values, offsets

    @property
    def has_engines(self) -> bool:
        """Not where transformers has only its slow implementation in Python."""
        return self._fast is not None

    def engine(self, name: str) -> Encode:
        """Transformers for all, the others for a byte-level BPE.

        Raises:
            TokenizerError: it is none, or not one that this engine can run.
        """
        if name == "transformers":
            return self.encode_batch
        level = byte_level(self._stored) if name == "tiktoken" else None
        check_merges(self._stored)
        return TiktokenEngine(level, self.encode_batch) if level else FastokensEngine(self._fast.to_str())

    @cached_property
    def _stored(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads(self._fast.to_str())
        return stored

    @cached_property
    def _reference(self) -> ReferenceEngine:
        return ReferenceEngine(self._fast)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of each id of a byte-level BPE, whose tokens are spelled by one character per byte; None for others."""
        stored = self._stored if self._fast is not None else {}
        if (stored.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        to_byte, added = byte_of_character(), {entry["id"]: entry for entry in stored["added_tokens"]}
        tokens: dict[int, bytes] = {}
        for token, number in self._tokenizer.get_vocab().items():
            if number in added:  # spelled as it is in the text
                tokens[number] = b"" if added[number]["special"] else token.encode()
            elif all(character in to_byte for character in token):
                tokens[number] = bytes(to_byte[character] for character in token)
            else:
                return None
        tokens |= {number: b"" for number in {*self._special_ids, self._unknown_id} - {None}}
        return _lengths(tokens, self.identity)


def _reference(tokenizer_json: str) -> ReferenceEngine:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    backend.encode_special_tokens = True
    return ReferenceEngine(backend)


def _lengths(tokens: Mapping[int, bytes], identity: TokenizerIdentity) -> npt.NDArray[np.int64]:
    """Bytes of every id, 0 for those that are no key."""
    import numpy as np

    lengths = np.zeros(identity.vocab_size, np.int64)
    lengths[list(tokens)] = [len(token) for token in tokens.values()]
    return lengths


def _fingerprint(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
