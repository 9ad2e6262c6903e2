"""Tokenizers in the layout of transformers: written beside an exported model, and recognised in any model's folder.

Invariant: the files give ordinary text the same ids as the tokenizer they were written for. (transformers reads the
name of a special token in a text as that token; no tokenizer of this project does.)
"""

from __future__ import annotations

import json
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pretrain_assets.config import TokenizerIdentity
from pretrain_assets.errors import TokenizerError
from pretrain_assets.tokenize.bytelevel import byte_of_character
from pretrain_assets.tokenize.tokenizers import GPT2_EOS, Tokenizer, load_tokenizer

TOKENIZER_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
GPT2_FILES = ("vocab.json", "merges.txt", TOKENIZER_NAME)
OF_THIS_MACHINE = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "is_local", "local_files_only")
"""Settings that transformers may store and that say where a tokenizer was loaded from."""


def tokenizer_of(identity: TokenizerIdentity, place: str | None = None) -> Tokenizer:
    """The tokenizer with this identity.

    Args:
        identity: Of the tokens.
        place: Where a tokenizer named `hf:...` is, as `hf:<name or directory>`: the name of one from a directory is not
            its whole path. Others need none.

    Raises:
        TokenizerError: it cannot be loaded, or is another one.
    """
    name = (place or identity.name) if identity.name.startswith("hf:") else identity.name
    try:
        found = load_tokenizer(name)
    except TokenizerError as error:
        raise TokenizerError(f"{error} Give its place with --tokenizer hf:<name or directory>.") from error
    if found.identity.fingerprint != identity.fingerprint:
        raise TokenizerError(
            f"Tokenizer {name} has the fingerprint {found.identity.fingerprint}; the model was trained on tokens of "
            f"{identity.name} with the fingerprint {identity.fingerprint}. Give that one's place with --tokenizer."
        )
    return found


def save_tokenizer(identity: TokenizerIdentity, folder: Path, *, max_tokens: int, place: str | None = None) -> None:
    """Write a tokenizer's files into a folder, for `AutoTokenizer.from_pretrained(folder)`.

    Args:
        identity: The tokenizer.
        folder: An existing folder.
        max_tokens: Longest input of the model, in tokens.
        place: As for `tokenizer_of`.

    Raises:
        TokenizerError: as `tokenizer_of`.
    """
    tokenizer_of(identity, place)
    if identity.name == "gpt2":
        with as_file(files("pretrain_assets") / "data" / "gpt2") as bundled:
            for name in GPT2_FILES:
                shutil.copyfile(bundled / name, folder / name)
        config: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer", **_ends(GPT2_EOS)}
    elif identity.name == "byte":
        (folder / TOKENIZER_NAME).write_text(json.dumps(_byte_level(identity.eos_id)), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **_ends(GPT2_EOS)}
    else:
        import transformers

        name = (place or identity.name).removeprefix("hf:")
        transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(str(folder))
        saved = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        config = {key: value for key, value in saved.items() if key not in OF_THIS_MACHINE}
    config["model_max_length"] = max_tokens
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def identify(folder: Path) -> TokenizerIdentity:
    """The tokenizer whose files lie in a model's folder; `gpt2` where they are its vocabulary and merges.

    Raises:
        TokenizerError: no files of a tokenizer, or none that can be used.
    """
    path, gpt2 = folder / TOKENIZER_NAME, files("pretrain_assets") / "data" / "gpt2" / TOKENIZER_NAME
    if not path.exists():  # transformers would make one up, with an empty vocabulary
        raise TokenizerError(f"{folder} has no {TOKENIZER_NAME}.")
    try:
        found = _bpe(path.read_bytes())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path} is damaged, or not a tokenizer's: {error}.") from error
    if found == _bpe(gpt2.read_bytes()):
        return load_tokenizer("gpt2").identity
    return load_tokenizer(f"hf:{folder}").identity


def _bpe(tokenizer_json: bytes) -> Any:
    """What decides the ids of a byte-level BPE: pieces, vocabulary and merges, in whichever way they are written."""
    parts = json.loads(tokenizer_json)
    model = parts["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
    return parts.get("normalizer"), parts.get("pre_tokenizer"), model.get("vocab"), merges


def _ends(token: str) -> dict[str, Any]:
    """Settings of a tokenizer whose one special token stands between documents."""
    return {
        "bos_token": token,
        "eos_token": token,
        "unk_token": token,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def _byte_level(eos_id: int) -> dict[str, Any]:
    """A byte-level BPE without merges: the id of each byte is its value."""
    stages = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"id": eos_id, "content": GPT2_EOS, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": stages,
        "post_processor": None,
        "decoder": stages,
        "model": {"type": "BPE", "vocab": byte_of_character(), "merges": []},
    }
