"""What a page says about how its figures were made."""

import platform
import subprocess
from datetime import date

import torch

__all__ = ["origin"]


def origin(command: str) -> dict[str, str]:
    """Return the command, the commit, the day and the machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, torch {torch.__version__}"
    return {"command": command, "commit": commit, "date": f"{date.today()}", "machine": machine}
