"""Running the notebooks: their graph, their execution, and the record of what ran.

The pipeline knows notebooks only by path, and it imports nothing heavy before a notebook is due.
"""

from unmask.study.pipeline.graph import Folders, PipelineError, Stage, discover, select

__all__ = ["Folders", "PipelineError", "Stage", "discover", "select"]
