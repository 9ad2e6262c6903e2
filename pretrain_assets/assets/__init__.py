"""Dagster assets: the only folder that imports dagster. One file per stage, each a thin shell around a domain call.

Invariant: a corpus asset's data version is the pin of the version that its stage last committed, so unchanged work
leaves everything downstream fresh, and a downstream run reads the version its input materialization names.
"""
