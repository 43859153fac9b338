"""Makes walkthrough.ipynb of walkthrough.py, by running it: python notebooks/build.py

walkthrough.py has the text and the code, which is easier to read and to compare there
than in JSON. A line "# %% [markdown]" begins a cell of text, and "# %%" one of code.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "walkthrough.py"
NOTEBOOK = HERE / "walkthrough.ipynb"
SECONDS = 600  # a cell; on a machine that nobody else uses, the slowest takes fifteen


def cells_of(source: str) -> list[NotebookNode]:
    """The cells of a script, without outputs."""
    cells = []
    for number, text in enumerate(source.split("# %%")[1:]):
        if text.startswith(" [markdown]"):
            lines = text.removeprefix(" [markdown]").strip().splitlines()
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            cell = nbformat.v4.new_code_cell(text.strip())
        cell["id"] = f"cell-{number}"  # the same one each time
        cells.append(cell)
    return cells


def execute(notebook: NotebookNode) -> None:
    """Run all cells in a kernel of their own; CellExecutionError where one fails."""
    folder = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=SECONDS, resources=folder).execute()


def kept_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """What a cell shows: all that it printed as one text, and no warnings of others."""
    printed = [output.text for output in outputs if output.get("name") == "stdout"]
    kept = [output for output in outputs if output.output_type != "stream"]
    if printed:
        text = "".join(printed)
        kept.insert(0, nbformat.v4.new_output("stream", name="stdout", text=text))
    return kept


def main() -> None:
    notebook = nbformat.v4.new_notebook(cells=cells_of(SOURCE.read_text()))
    execute(notebook)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ each time
        if cell.cell_type == "code":
            cell.outputs = kept_outputs(cell.outputs)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
