"""Training from the command line: start a run here, wait for it, and say how it ended if not with its last step.

Invariant: being interrupted or terminated, a run saves before the command returns.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from pretrain_assets.config import RunSpec


def run_here(spec: RunSpec, ranks: int) -> dict[str, Any]:
    """Train on this machine until the run ends or is stopped; returns its result."""
    import signal

    from pretrain_assets.launch import contract, local

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both wait until the run has saved
    try:
        return local.run_local(spec, ranks)
    except KeyboardInterrupt:
        return contract.read_result(spec.run_dir) or {"status": "stopped"}


def exit_unfinished(spec: RunSpec, result: dict[str, Any], json_output: bool) -> NoReturn:
    """Say why a run was stopped or failed and how it goes on, and exit with the contract's code."""
    from pretrain_assets.launch import contract

    at = f" at step {result['step']}" if "step" in result else ""
    said = "error_type" in result and not json_output  # by a rank, on this terminal
    why = "the reason is above" if said else result.get("error", "on request")
    click.echo(f"{result['status']}{at}: {why}", err=True)
    if not result.get("is_mistake"):
        some = "the newest checkpoint" if result.get("step") else "its newest checkpoint, if there is one,"
        click.echo(f"The same command again goes on from {some} in {spec.run_dir}.", err=True)
    sys.exit(contract.EXIT_STOPPED if result["status"] == "stopped" else contract.EXIT_FAILED)
