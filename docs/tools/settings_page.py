"""The settings that methods share, as a page."""

from dpl.methods.settings import GradientSettings, Settings
from tools.markdown import render
from tools.settings_table import HEADERS, table_rows

__all__ = ["settings_page"]


def settings_page() -> str:
    """Return the page of the shared settings as Markdown."""
    every = table_rows(Settings)
    gradient = [row for row in table_rows(GradientSettings) if row not in every]
    return render("settings.md.jinja", headers=HEADERS, every=every, gradient=gradient)
