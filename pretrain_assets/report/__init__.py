"""The report room: plots small enough to show at once in the Dagster UI, and text for people."""
