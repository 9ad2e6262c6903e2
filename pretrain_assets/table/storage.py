"""Where the table lives: one `Location` for local disk and object storage, opened at an exact version.

Secrets and endpoints come from the environment only (the standard `AWS_*` names, read by both the Rust and the Python
S3 clients); nothing here is ever written to a file, a log or a hash.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import check_name
from pretrain_assets.errors import ConfigError, TableError

if TYPE_CHECKING:
    import lance
    import lancedb

# Lance warns at every DataReplacement that the operation is young; table/filler/columnfile.py checks what it commits.
# It also prints where io_uring is not allowed; loader/read.py then reads without and says so once.
os.environ.setdefault("LANCE_LOG", "warn,lance_table::transaction::manifest_build=error,lance_io::uring=off")
os.environ.setdefault("LANCE_INCLUDE_VECTOR_CENTROIDS", "false")  # statistics of an index without its large part

STORAGE_ENV_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
"""Environment variables that reach the storage clients. Names only: values stay in the environment."""


OPTION_PREFIX = "PRETRAIN_STORAGE_"
"""Environment variables with this beginning are options of the Rust object store."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """A LanceDB database and the one table in it."""

    database_uri: str
    """Directory of the LanceDB database: a local path or `s3://bucket/prefix`."""
    table_name: str = "corpus"
    """Name of the table inside the database."""

    def __post_init__(self) -> None:
        check_name(self.table_name, "table name")

    @property
    def uri(self) -> str:
        """The Lance dataset's own uri, `<database>/<table>.lance`."""
        return join(self.database_uri, f"{self.table_name}.lance")

    @property
    def staging_uri(self) -> str:
        """Journals of unfinished work, beside the table so that table maintenance never touches them."""
        return join(self.database_uri, f"{self.table_name}.staging")

    @property
    def plans_uri(self) -> str:
        """Plans of training runs, beside the table: nodes fetch them instead of scanning it again."""
        return join(self.database_uri, f"{self.table_name}.plans")


def is_remote(uri: str) -> bool:
    """Whether `uri` names an object store rather than a local path."""
    return "://" in uri and not uri.startswith("file://")


def join(base: str, *parts: str) -> str:
    """Join path parts under a local path or a remote uri."""
    return "/".join([base.rstrip("/"), *parts])


def absolute(uri: str, root: str | Path | None = None) -> str:
    """Resolve a local path against `root` (default: the working directory); remote uris stay as they are."""
    if is_remote(uri):
        return uri.rstrip("/")
    return os.path.normpath(Path(root or "").absolute() / Path(uri.removeprefix("file://")).expanduser())


def storage_options(uri: str) -> dict[str, str] | None:
    """Options for the Rust object store that it does not already take from `AWS_*` variables.

    Plain-http endpoints must be allowed explicitly. `PRETRAIN_STORAGE_<NAME>` in the environment is the option `<name>`
    of the store, such as `timeout` or `client_max_retries`. `None` for local paths.
    """
    if not is_remote(uri):
        return None
    extra = {
        name.removeprefix(OPTION_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(OPTION_PREFIX)
    }
    if not uri.startswith("s3://"):
        return extra or None
    options = {"aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["aws_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = "true"
    return {**options, **extra}


def filesystem(uri: str) -> tuple[Any, str]:
    """The fsspec filesystem for `uri` and the path inside it."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is not installed
        raise ConfigError(f"{uri!r} cannot be opened: {error}. Give a local path or s3://bucket/prefix.") from error
    return fs, path


def exists(location: Location) -> bool:
    """Whether the table has been created."""
    fs, path = filesystem(location.uri)
    if is_remote(location.uri):
        fs.invalidate_cache()
    return bool(fs.glob(f"{path}/_versions/*.manifest"))  # a creation that was killed leaves the bare folder


def open_dataset(location: Location, version: int | str | None = None) -> lance.LanceDataset:
    """Open the table with pylance at a version number, a tag, or (None) the newest version.

    Raises:
        TableError: the table, version or tag does not exist.
    """
    import lance

    if not exists(location):
        raise TableError(
            f"No table at {location.uri}. Ingest first: `pretrain ingest SOURCE`, or materialize corpus/ingested."
        )
    try:
        return lance.dataset(location.uri, version=version, storage_options=storage_options(location.uri))
    except (ValueError, OSError) as error:
        wanted = f"version {version}" if isinstance(version, int) else f"tag {version!r}"
        reason = "" if "not found" in str(error).lower() or "not exist" in str(error) else f": {_first_line(error)}"
        raise TableError(f"{location.uri} has no {wanted}{reason}. `pretrain versions` lists what is there.") from error


def open_lancedb(location: Location, version: int | None = None) -> lancedb.table.Table:
    """Open the table with lancedb, pinned at `version` when given."""
    import lancedb

    connection = lancedb.connect(location.database_uri, storage_options=storage_options(location.uri))
    return connection.open_table(location.table_name, version=version)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
