"""Builds walkthrough.ipynb from walkthrough.py by running it.

    python notebooks/build.py

Text and code are in walkthrough.py, because changes to a script are easier to read than
changes to JSON. The script is in jupytext's percent format: a line "# %% [markdown]"
starts a cell of text, and "# %%" a cell of code.
"""

from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "walkthrough.py"
NOTEBOOK = HERE / "walkthrough.ipynb"
SECONDS = 600  # limit for a cell; the slowest takes 15 s on an idle machine


def execute(notebook: NotebookNode) -> None:
    """Run all cells in a new kernel. Raises CellExecutionError if one fails."""
    folder = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook, timeout=SECONDS, resources=folder, coalesce_streams=True
    ).execute()


def main() -> None:
    notebook = jupytext.read(SOURCE)
    notebook.metadata.clear()  # jupytext's own
    execute(notebook)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same in every build
        cell.metadata.clear()  # such as times, which differ in every build
        if cell.cell_type == "code":
            # Warnings go to stderr.
            cell.outputs = [
                each for each in cell.outputs if each.get("name") != "stderr"
            ]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
