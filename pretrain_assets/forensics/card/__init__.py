"""The facts of a run card; `report/card` renders them."""
