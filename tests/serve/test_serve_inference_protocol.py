"""The Open Inference Protocol, with the client that Triton's users have."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from live import Live, adaptive, batch, live, raw

from dpl.serve.middleware import Tokens

TOKEN = "the-token-of-tenant-one"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("state"), tokens=Tokens([(TOKEN, "one-")]), token=TOKEN) as running:
        yield running


def tensor(images: torch.Tensor, **changes: object) -> dict:
    data = images.flatten().tolist()
    return {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": data} | changes


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client(server: Live, binary: bool) -> None:
    triton = pytest.importorskip("tritonclient.http")
    headers, stream = {"Authorization": f"Bearer {TOKEN}"}, f"one-triton-{binary}"
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(stream, headers=headers)
    assert client.get_server_metadata(headers=headers)["name"] == "dpl"
    about = client.get_model_metadata(stream, headers=headers)
    assert about["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, 32, 32]}]
    model = adaptive()
    for number in range(2):
        images = batch(number)
        given = triton.InferInput("images", list(images.shape), "FP32")
        given.set_data_from_numpy(images.numpy(), binary_data=binary)
        answer = client.infer(stream, [given], headers=headers, request_id=f"mine-{number}")
        wanted = model(images).softmax(1)
        np.testing.assert_allclose(answer.as_numpy("probabilities"), wanted.numpy(), rtol=1e-5)
        assert answer.as_numpy("class").tolist() == wanted.argmax(1).tolist()
        assert answer.get_response()["id"] == f"mine-{number}"
    assert server.settled(stream)["adapted_batches"] == 2
    client.close()


def test_the_same_answer_as_predict(server: Live) -> None:
    body = {"inputs": [tensor(batch(3))], "id": "a"}
    infer = server.good("POST", "/v2/models/one-a/infer?adapt=off", json=body)
    predict = server.good("POST", "/v1/streams/one-a/predict?adapt=off&probabilities=true", **raw(batch(3)))
    values = [value for row in predict["predictions"] for value in row["probabilities"]]
    assert infer["outputs"][0] | {"data": values} == infer["outputs"][0]
    assert infer["parameters"]["adaptation"] == "off"
    assert infer["model_name"] == "one-a"


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "one tensor"),
        ({"inputs": "x"}, "one tensor"),
        ({"inputs": [tensor(batch(0), datatype="BYTES")]}, "FP32"),
        ({"inputs": [tensor(batch(0), shape=[4, 3, 32, 31])]}, "shape"),
        ({"inputs": [tensor(batch(0), data=[1.0])]}, "numbers"),
        ({"inputs": [tensor(batch(0), data={})]}, "list"),
        ({"inputs": [{"datatype": "FP32", "shape": [4, 3, 32, 32]}]}, "bytes"),
        ([], "inputs"),
    ],
)
def test_other_bodies_get_422(server: Live, body: object, hint: str) -> None:
    answer = server.http.post("/v2/models/one-b/infer", json=body)
    assert answer.status_code == 422, answer.text
    assert hint in answer.json()["error"]["message"]


def test_tokens_hold_here_too(server: Live) -> None:
    for method, path in (("GET", ""), ("GET", "/ready"), ("POST", "/infer")):
        assert server.http.request(method, f"/v2/models/two-a{path}").status_code in (404, 422)
        assert server.http.request(method, f"/v2/models/one-a{path}", headers={"Authorization": ""}).status_code == 401
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert server.http.get(path, headers={"Authorization": ""}).status_code == 200
