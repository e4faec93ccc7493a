"""Tools that make parts of the documentation; no part of the package."""
