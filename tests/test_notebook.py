"""notebooks/walkthrough.ipynb is built from walkthrough.py and runs to its end."""

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.build import NOTEBOOK, SOURCE, cells_of, execute


@pytest.fixture(scope="module")
def committed() -> NotebookNode:
    """The committed notebook, with its outputs."""
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook: NotebookNode) -> str:
    """Everything that its cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_the_notebook_has_the_cells_of_its_source(committed):
    source = cells_of(SOURCE.read_text())
    assert [cell.source for cell in committed.cells] == [cell.source for cell in source]


def test_the_notebook_was_run_from_top_to_bottom(committed):
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("text/html" in output.get("data", {}) for output in outputs) == 4


@pytest.mark.slow
def test_the_notebook_runs(committed):
    # Its cells assert what they show: e_B of a fresh, a stale and a hot batch.
    again = nbformat.v4.new_notebook(cells=cells_of(SOURCE.read_text()))
    execute(again)
    lines = [text.splitlines() for text in (printed(again), printed(committed))]
    assert len(lines[0]) == len(lines[1])
