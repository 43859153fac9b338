"""Builds walkthrough.ipynb from walkthrough.py by running it.

    python notebooks/build.py

Text and code are in walkthrough.py, because changes to a script are easier to read than
changes to JSON. A line "# %% [markdown]" starts a cell of text, and "# %%" a cell of
code.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "walkthrough.py"
NOTEBOOK = HERE / "walkthrough.ipynb"
SECONDS = 600  # limit for a cell; the slowest takes 15 s on an idle machine


def cells_of(source: str) -> list[NotebookNode]:
    """Return the cells of a script, without outputs."""
    cells = []
    for number, text in enumerate(source.split("# %%")[1:]):
        if text.startswith(" [markdown]"):
            lines = text.removeprefix(" [markdown]").strip().splitlines()
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            cell = nbformat.v4.new_code_cell(text.strip())
        cell["id"] = f"cell-{number}"  # the same in every build
        cells.append(cell)
    return cells


def execute(notebook: NotebookNode) -> None:
    """Run all cells in a new kernel. Raises CellExecutionError if one fails."""
    folder = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook, timeout=SECONDS, resources=folder, coalesce_streams=True
    ).execute()


def main() -> None:
    notebook = nbformat.v4.new_notebook(cells=cells_of(SOURCE.read_text()))
    execute(notebook)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in every build
        if cell.cell_type == "code":
            # Warnings go to stderr.
            cell.outputs = [
                each for each in cell.outputs if each.get("name") != "stderr"
            ]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
