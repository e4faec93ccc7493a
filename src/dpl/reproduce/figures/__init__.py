"""The paper's figures: one module for each, drawn from the same stored runs as the tables."""

from dpl.reproduce.figures import figure1, figure2, figure3, figure4, figure5

__all__ = ["figure1", "figure2", "figure3", "figure4", "figure5"]
