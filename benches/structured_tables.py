"""Makes the table of the schemas that structured output refuses."""

from collections.abc import Callable
from typing import Any

from benches.table_cells import table

Figures = dict[str, Any]


def refused_schemas(figures: Figures) -> str:
    """Why schemas of JSON Schema's test suite are refused, and how many."""
    suite = figures["suite"]
    rows = [(cause, str(number)) for cause, number in suite["refused"].items()]
    told = (
        f"Of {suite['schemas']} schemas {suite['taken']} are taken. {suite['ended_texts']} texts "
        f"at temperature 2 ended by themselves, and {suite['invalid_texts']} of these did not fit."
    )
    return f"{table(('refused for', 'schemas'), rows)}\n\n{told}"


TABLES: dict[str, Callable[[Figures], str]] = {"structured output": refused_schemas}
