"""Finding rows of a pinned version: by words, SQL, vectors or both, and the neighbourhoods of vectors."""
