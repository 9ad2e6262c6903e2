"""Every error a user can meet, in one place.

    PretrainError(ValueError)            anything a user can mend; the CLI prints it without a traceback, exit code 1
    ├── ConfigError                      a setting that cannot work (recipe field, splits, batch size)
    ├── InputError                       a source file or row: missing, corrupt, wrong type, null
    ├── FilterError                      a SQL predicate that does not parse, names no column or keeps no row
    ├── TokenizerError                   an unknown tokenizer, or one without an end-of-text token
    ├── ModelError                       a model that reads documents cannot be loaded, or has not what is asked of it
    ├── TableError                       the table is missing, was recreated, or a version or tag does not exist
    │   └── CommitError                  a commit lost a race that cannot be merged; staged work is kept
    │       └── BusyError                another living process does the same work, or maintenance, now
    ├── ColumnError                      a row that a stage's function cannot compute, or values of another type
    ├── WorkerError                      worker processes that die at the same work again and again, or do not meet
    ├── DataIdentityError                a checkpoint and the data it is asked to go on with are not the same
    ├── StorageError                     a run's folder cannot be read or written: full, read-only, gone, no answer
    ├── CheckpointError                  a checkpoint cannot be written or read
    │   └── ReplacedError                a run that goes on has put a newer one in its place
    └── DivergenceError                  a loss or gradient is not finite; names the step and its documents

Each message says what was wrong, the value, the file or row it came from, and what to do next.
"""


class PretrainError(ValueError):
    """Base of all errors that a user can mend."""


class ConfigError(PretrainError):
    """A setting that cannot work."""


class InputError(PretrainError):
    """A source file or row that cannot be ingested."""


class FilterError(PretrainError):
    """A SQL predicate that is not SQL, names no column, or keeps no row."""


class TokenizerError(PretrainError):
    """A tokenizer that is unknown, unreadable or lacks an end-of-text token."""


class ModelError(PretrainError):
    """A model that reads documents (embeddings, scores) cannot be loaded, or has not what is asked of it."""


class TableError(PretrainError):
    """The table, a version or a tag is not there, or is not the one a pin names."""


class CommitError(TableError):
    """A commit lost a race that cannot be merged; staged work is kept for the next try."""


class BusyError(CommitError):
    """Another living process holds the table's lease for this work."""


class ColumnError(PretrainError):
    """A row that a stage's function cannot compute, or values of another type or number than declared."""


class WorkerError(PretrainError):
    """Worker processes died at the same work again and again, or did not meet."""


class DataIdentityError(PretrainError):
    """The data offered differs from the data a checkpoint was trained on."""


class StorageError(PretrainError):
    """The folder of a run cannot be read or written: full, read-only, gone, or an object store that does not answer."""


class CheckpointError(PretrainError):
    """A checkpoint cannot be written or read."""


class ReplacedError(CheckpointError):
    """A checkpoint was there, until the run that goes on put a newer one in its place."""


class DivergenceError(PretrainError):
    """A loss or gradient is not finite."""
