"""A large corpus of real English text: the manuals in Debian's documentation packages, one document per section.

`python -m benchmarks.debian_corpus [FOLDER]` downloads the packages (`apt-get download`), unpacks their HTML with
`dpkg -x`, strips it with the standard library's parser, splits pages at headings and writes one parquet file with
`doc_id` (package/page#section), `text` and `source` (the package). Nothing is deduplicated and nothing rewritten:
repeated boilerplate, templates and tables are what a real corpus has.

Invariant: the file is a pure function of the packages (name and version, kept in its metadata) and `VERSION`. The
folder keeps packages and file, so that a second run downloads and builds nothing. Default folder: the environment
variable PRETRAIN_BENCHMARK_CACHE, else the user's cache folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

VERSION = "1"
"""Raised when the same packages give another text."""
PACKAGES = (
    ("postgresql-doc-15", "postgresql-doc-17", "postgresql-doc-16"),
    ("python3.11-doc", "python3.13-doc", "python3.12-doc"),
    ("debian-handbook",),
    ("git-doc",),
    ("sqlite3-doc",),
    ("python-django-doc",),
    ("python-sqlalchemy-doc",),
    ("libreoffice-help-en-us",),
    ("debian-policy",),
    ("developers-reference",),
    ("debian-reference-en",),
    ("vim-doc",),
    ("octave-doc",),
    ("maxima-doc",),
    ("gimp-help-en",),
    ("nodejs-doc",),
    ("linux-doc-6.1", "linux-doc-6.12", "linux-doc"),
    ("erlang-doc",),
    ("python-sympy-doc",),
    ("python-pandas-doc",),
    ("python-scipy-doc",),
    ("rust-doc",),
    ("ghc-doc",),
    ("scala-doc",),
)
"""Taken in this order until there is enough; of each entry the first that the release has."""
MIN_CHARS = 200
"""Shorter sections are left out: mostly tables of contents and lists of links."""
LEFT_OUT = re.compile(
    r"(^|/)(_modules|translations|(?!en)[a-z]{2}[-_][A-Z]{2})/|\.(?!en)[a-z]{2}(-[a-z]{2})?\.html$", re.ASCII
)
"""Pages of source code or in another language than English, by their path."""


class CorpusError(RuntimeError):
    """The corpus cannot be built here."""


def main() -> None:
    """Build, and say what came of it."""
    from benchmarks.curation import FULL_BYTES

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder()
    try:
        corpus = build(folder, FULL_BYTES)
    except CorpusError as error:
        sys.exit(str(error))
    print(json.dumps({"corpus": str(corpus), **facts(corpus)}, indent=2))


def default_folder() -> Path:
    """Where packages and text are kept between runs."""
    found = os.environ.get("PRETRAIN_BENCHMARK_CACHE")
    return Path(found) if found else Path.home() / ".cache" / "pretrain_assets" / "debian-corpus"


def build(folder: Path, min_bytes: int) -> Path:
    """The corpus of at least `min_bytes` of UTF-8 text, built if the folder has it not.

    Raises:
        CorpusError: no apt here, no network, or not enough text in all packages.
    """
    path = folder / f"documents-v{VERSION}-{min_bytes // 1_000_000}mb.parquet"
    if path.exists():
        return path
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise CorpusError(f"the corpus is built from Debian packages, and there is no {tool} here: use --quick")
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables: list[pa.Table] = []
    packages: list[str] = []
    total = 0
    for names in PACKAGES:
        if total >= min_bytes:
            break
        package = _download(folder / "packages", names)
        tables.append(pq.read_table(_sections_of(package, folder / f"sections-v{VERSION}")))
        packages.append("_".join(package.stem.split("_")[:2]).replace("%3a", ":"))
        total += text_bytes(tables[-1])
        print(f"{total / 1e6:6.1f} MB of text with {packages[-1]}", file=sys.stderr, flush=True)
    if total < min_bytes:
        raise CorpusError(f"all packages together hold {total:,} bytes of text, and {min_bytes:,} are wanted")
    _write(pa.concat_tables(tables).replace_schema_metadata({"packages": json.dumps(packages)}), path)
    return path


def write_bundled(path: Path, max_bytes: int) -> Path:
    """At most `max_bytes` of the bundled documents, in a file of the same form."""
    import pyarrow.parquet as pq

    with (files("pretrain_assets") / "data" / "public_domain_docs.parquet").open("rb") as file:
        table = pq.read_table(file, columns=["id", "text", "source"]).rename_columns(["doc_id", "text", "source"])
    pq.write_table(table.take(spread_rows(table, max_bytes)), path)
    return path


def documents(corpus: Path, max_bytes: int | None = None) -> pa.Table:
    """`doc_id`, `text` and `source`; of a larger corpus rows spread over it, with at most `max_bytes` of text."""
    import pyarrow.parquet as pq

    table = pq.read_table(corpus)
    return table if max_bytes is None else table.take(spread_rows(table, max_bytes))


def texts(corpus: Path, max_bytes: int | None = None) -> list[str]:
    """The texts of `documents`."""
    return list(documents(corpus, max_bytes)["text"].to_pylist())


def text_bytes(table: pa.Table) -> int:
    """UTF-8 bytes of a table's texts."""
    import pyarrow.compute as pc

    return int(pc.sum(pc.binary_length(table["text"]), min_count=0).as_py())


def facts(corpus: Path) -> dict[str, Any]:
    """Rows, bytes of text, and what it was made from."""
    import pyarrow.parquet as pq

    table = documents(corpus)
    metadata = pq.read_schema(corpus).metadata or {}
    made = json.loads(metadata.get(b"packages", b'["the bundled documents"]'))
    return {"rows": table.num_rows, "text_bytes": text_bytes(table), "packages": made}


def spread_rows(table: pa.Table, max_bytes: int | None) -> npt.NDArray[np.int64]:
    """Row numbers, ascending and spread over the table, with at most `max_bytes` of text; all rows if they fit."""
    import numpy as np
    import pyarrow.compute as pc

    whole, num_rows = text_bytes(table), table.num_rows
    if max_bytes is None or whole <= max_bytes:
        return np.arange(num_rows)
    wanted = num_rows * max_bytes // whole
    rows = np.arange(wanted) * num_rows // max(1, wanted)
    ends = np.cumsum(pc.binary_length(table["text"]).to_numpy()[rows])
    return rows[: int(np.searchsorted(ends, max_bytes, side="right"))]


def _download(folder: Path, names: tuple[str, ...]) -> Path:
    """The package file of the first of these names that the release has."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = []
    for name in names:
        if kept := sorted(folder.glob(f"{name}_*.deb")):
            return kept[-1]
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            done = subprocess.run(["apt-get", "download", name], cwd=fresh, capture_output=True, text=True)
            found = sorted(Path(fresh).glob("*.deb"))
            if done.returncode == 0 and found:
                return found[0].rename(folder / found[0].name)
        errors.append((done.stderr.strip().splitlines() or ["no message"])[-1])
    raise CorpusError(
        f"`apt-get download` gives none of {', '.join(names)}: {'; '.join(errors)}. Run `apt-get update` on a Debian "
        "that reaches its archive, or use --quick."
    )


def _sections_of(package: Path, folder: Path) -> Path:
    """A parquet file with every section of every English HTML page of a package, written if it is not there."""
    import pyarrow as pa

    path = folder / f"{package.stem}.parquet"
    if not path.exists():
        name = package.name.split("_")[0]
        with tempfile.TemporaryDirectory(dir=package.parent) as unpacked:
            subprocess.run(["dpkg", "-x", str(package), unpacked], check=True)
            rows = list(_rows(Path(unpacked), name))
        columns = {"doc_id": [row[0] for row in rows], "text": [row[1] for row in rows], "source": [name] * len(rows)}
        _write(pa.table(columns, schema=pa.schema([(key, pa.string()) for key in columns])), path)
    return path


def _write(table: pa.Table, path: Path) -> None:
    """Write a file that appears whole."""
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pq.write_table(table, part)
    part.rename(path)


def _rows(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Id and text of every section, in the order of paths."""
    pages = [page for page in folder.rglob("*") if page.suffix in (".html", ".xhtml") and page.is_file()]
    for page in sorted(pages):
        relative = page.relative_to(folder).as_posix()
        if page.is_symlink() or LEFT_OUT.search(relative):
            continue
        for number, text in enumerate(sections(page.read_text("utf-8", errors="replace"))):
            yield f"{name}/{relative}#{number}", text


def sections(html: str) -> list[str]:
    """The text of an HTML page, split before every heading; short sections left out."""
    parser = _Stripper()
    parser.feed(html)
    parser.close()
    found = ("".join(section) for section in parser.sections)
    lines = ("\n".join(line.rstrip() for line in text.split("\n")) for text in found)
    whole = (re.sub(r"\n{3,}", "\n\n", text).strip() for text in lines)
    return [text for text in whole if len(text) >= MIN_CHARS]


class _Stripper(HTMLParser):
    """Collects the text of a page: white space as a browser shows it, line breaks around blocks."""

    HEADINGS = frozenset({"h1", "h2", "h3"})
    SKIPPED = frozenset({"script", "style", "nav", "header", "footer", "head", "svg", "button", "form", "template"})
    PARAGRAPHS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "ul", "ol", "dl", "blockquote"})
    LINES = frozenset({"br", "div", "li", "tr", "dt", "dd", "section", "article", "hr", "figure", "caption"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[list[str]] = [[]]
        self._skipping, self._verbatim = 0, 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self.SKIPPED:
            self._skipping += 1
        if tag in self.HEADINGS:
            self.sections.append([])
        self._verbatim += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        if tag == "pre":
            self._verbatim = max(0, self._verbatim - 1)
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._add(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in self.PARAGRAPHS:
            self._add("\n\n")
        elif tag in self.LINES:
            self._add("\n")
        elif tag in ("td", "th"):
            self._add(" ")

    def _add(self, text: str) -> None:
        pieces = self.sections[-1]
        if not self._verbatim and text.startswith(" ") and pieces and pieces[-1][-1:] in ("\n", " "):
            text = text[1:]
        if text:
            pieces.append(text)


if __name__ == "__main__":
    main()
