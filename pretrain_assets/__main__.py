"""Entry point of `pretrain`, and of `python -m pretrain_assets`.

Invariant: Ctrl-C ends it with one word also while the verbs are still being imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from pretrain_assets.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit("\nAborted!")


if __name__ == "__main__":
    main()
