"""The indexes on text and vectors: built once, extended after every append, measured; which version answers."""
