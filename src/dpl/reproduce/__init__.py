"""The paper's tables and figures: run, put beside the printed figures, written as text, pages and pictures.

`paper` holds the printed figures as data. A target (`targets.py`) makes one table or figure from an experiment file.
Nothing here adapts a model by itself: runs go through `dpl.bench`.
"""
