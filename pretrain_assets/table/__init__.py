"""The table room: storage, schema and column ownership, versions, tags, lineage, and the column filler.

Invariant: a stage that has work makes exactly one new table version, and a committed version never changes.
Works without Dagster.
"""
