"""The files in deploy/: well formed, consistent with the command and with the metrics that it has."""

import argparse
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from live import live

from dpl.cli import serve

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_command(words: list[str]) -> None:
    """The options of `dpl serve` exist and fit."""
    assert words[0].endswith("dpl")
    assert words[1] == "serve"
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(words[2:])
    assert args.token_file is not None


def test_the_image_starts_the_server() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    commands = {line.split()[0]: line.partition(" ")[2] for line in lines if line and line[0] not in "# "}
    assert commands.keys() <= {"FROM", "WORKDIR", "RUN", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK",
                               "ENTRYPOINT", "CMD"}  # fmt: skip
    check_command(json.loads(commands["ENTRYPOINT"]) + json.loads(commands["CMD"]))
    assert commands["USER"] == "dpl"
    sources = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert all((DEPLOY.parent / name).exists() for name in sources), sources
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources  # nothing else is sent to the build
    assert "*" in ignored


def test_the_health_check_asks_the_port_of_the_server(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    words = json.loads(text.partition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0])
    assert words[0] == "python"
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert f"127.0.0.1:{parser.get_default('port')}/readyz" in words[2]
    with live(tmp_path) as server:
        host = server.http.base_url.netloc.decode()
        check = [sys.executable, words[1], words[2].replace("127.0.0.1:8000", host)]
        assert subprocess.run(check, check=False).returncode == 0
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[(.*)\]'", (DEPLOY / "Dockerfile").read_text())
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_the_unit_starts_the_server() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "dpl.service").read_text())
    check_command(shlex.split(unit["Service"]["ExecStart"]))
    assert int(unit["Service"]["TimeoutStopSec"]) > 30  # --stop-seconds


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "dpl.service").read_text()
    (tmp_path / "dpl.service").write_text(text.replace("/opt/dpl/bin/dpl", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "dpl.service")], capture_output=True, text=True
    )
    own = [line for line in done.stderr.splitlines() if "dpl.service" in line]
    assert not own, own


def test_the_files_of_compose_exist_and_the_stop_has_time() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"dpl", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).is_file(), volume
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
    assert int(compose["services"]["dpl"]["stop_grace_period"].rstrip("s")) > 30
    build = compose["services"]["dpl"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for name in ("prometheus.yml", "grafana/datasources.yaml", "grafana/dashboards.yaml"):
        assert yaml.safe_load((DEPLOY / name).read_text())


def test_dashboard_and_alerts_use_metrics_that_exist(tmp_path: Path) -> None:
    with live(tmp_path, guard=True) as server:
        server.predict("cam", 1, adapt="wait")
        text = server.http.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    known |= {f"{name}_bucket" for name in known}
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    dashboard = json.loads((DEPLOY / "grafana" / "dpl.json").read_text())
    queries = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"dpl_\w+", query)}
    assert used
    assert used <= known, used - known
