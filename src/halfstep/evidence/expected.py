"""What the plan says of a module path."""

from __future__ import annotations

from halfstep.precision.plan import ROOT, WHOLE_MODEL, Plan, Row


class Expected:
    """The plan's rows by module, and what holds where there is none."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        rows = (*plan.rows, *plan.frozen)
        self.rows = {row.module: row for row in rows if row.kind != "island" and row.module != WHOLE_MODEL}

    def row(self, module: str) -> Row | None:
        return self.rows.get(module)

    def compute(self, module: str) -> str:
        """The format of its matmuls and convolutions: of its own row, of the part it lies in, or the plan's."""
        row = self.rows.get(module)
        while row is None and module not in ("", ROOT):
            module = module.rpartition(".")[0]
            enclosing = self.rows.get(module)
            row = enclosing if enclosing is not None and enclosing.is_part else None
        return row.compute if row is not None else self.plan.compute

    def storage(self, module: str) -> str:
        row = self.rows.get(module)
        return row.storage if row is not None else ""
