"""Test that notebooks/walkthrough.ipynb is built from walkthrough.py and runs."""

import jupytext
import nbformat
import pytest

from notebooks.build import NOTEBOOK, SOURCE, execute


def test_the_committed_notebook_has_the_cells_of_its_source_run_from_top_to_bottom():
    cells, source = nbformat.read(NOTEBOOK, as_version=4).cells, jupytext.read(SOURCE)
    assert [cell.source for cell in cells] == [cell.source for cell in source.cells]
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("text/html" in output.get("data", {}) for output in outputs) == 4


@pytest.mark.slow
def test_the_notebook_runs():
    # Its cells assert what they show: e_B of a fresh, a stale and a hot batch.
    execute(jupytext.read(SOURCE))
