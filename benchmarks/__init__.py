"""Measured comparisons and campaigns: `python -m benchmarks.NAME [--quick] [--json]`; see README.md.

Invariant: numbers come out of this folder as one JSON object with the commit, the machine and the command; nothing here
is imported by the package.
"""
