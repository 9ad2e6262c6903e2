"""Entry point of `python -m pretrain_assets.cli`, the same as `pretrain`."""

from pretrain_assets.cli import main

main()
