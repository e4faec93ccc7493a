"""The recipe of docs/interop.md for the Hugging Face Hub: its own client against a small hub on this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from docs.pages import DOCS, blocks

pytest.importorskip("huggingface_hub")
COMMIT = "c0ffee" + "0" * 34
PRELUDE = """
import torch, dpl
from dpl.backbones import create
torch.manual_seed(0)
network = create("debug_cnn")
model = dpl.adapt(network, "tent")
model(torch.rand(8, 3, 32, 32))
"""
COMPARISON = """
images = torch.rand(8, 3, 32, 32)
assert restored is not model and torch.equal(restored.predict(images), model.predict(images))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as one upload and one download of small files use."""

    files: dict[str, bytes]

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        content = [json.loads(line) for line in lines]
        if "/preupload/" in self.path:
            asked = [file["path"] for file in content[0]["files"]]
            self.tell({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in asked]})
            return
        assert "/commit/" in self.path
        for file in (line["value"] for line in content if line["key"] == "file"):
            self.files[file["path"]] = base64.b64decode(file["content"])
        url = f"http://{self.headers['Host']}/you/adapted/commit/{COMMIT}"
        self.tell({"success": True, "commitUrl": url, "commitOid": COMMIT})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            self.tell([{"type": "file", "path": p, "size": len(d), "oid": p} for p, d in self.files.items()])
        elif self.path.startswith("/api/models/"):
            self.tell({"id": "you/adapted", "sha": COMMIT, "siblings": [{"rfilename": p} for p in self.files]})
        else:
            self.send(self.files[self.path.rpartition("/")[2]])

    do_HEAD = do_GET

    def tell(self, document: object) -> None:
        self.send(json.dumps(document).encode())

    def send(self, data: bytes) -> None:
        self.send_response(200)
        headers = {"ETag": f'"{len(data)}-{hash(data)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    handler = type("OwnHub", (Hub,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_snapshot_goes_to_the_hub_and_comes_back(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    (recipe,) = [block.text for block in blocks(DOCS / "interop.md", "python") if "upload_folder" in block.text]
    here = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
    environment = {**os.environ, **here, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    code = f"{PRELUDE}\n{recipe}\n{COMPARISON}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(hub.RequestHandlerClass.files) == {"manifest.json", "state.safetensors"}
