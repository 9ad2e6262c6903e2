"""The column filler, from a declaration (`spec`) to one committed version (`fill`).

`plan` says what is missing; `staging` has it computed as `tasks` by one of the `engines`, through `rows`, into staged
files (`columnfile`); `operations` are the commits. Nothing outside this room writes a computed column.
"""
