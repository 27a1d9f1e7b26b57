"""Loading a model by its hub id, with the hub there, away, or refusing."""

import http.server
import shutil
import threading

import huggingface_hub
import pytest
import transformers

from kvcache.hf import load_model
from tests.hf.model_files import check_error


def test_a_name_that_cannot_be_on_the_hub_does_not_exist():
    for name in ("a/b/c", "two words", "models/"):
        check_error(name, repr(name), "does not exist; expected 'smollm2', an existing path or a hub id")


def use_hub(monkeypatch, port):
    address = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)


def test_without_the_hub_the_message_says_what_to_do(monkeypatch):
    use_hub(monkeypatch, 9)  # nothing answers there
    parts = ("'org/no-such-model'", "the hub cannot be reached", "connect once, or pass the path of a local model")
    error = check_error("org/no-such-model", *parts, "Connection refused")
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "RepoNotFound", "is not on the hub: check the name, or log in"),
        (403, "GatedRepo", "is behind a gate on the hub: accept its terms"),
        (404, "EntryNotFound", "has no config.json"),
        (503, "", "the hub cannot be reached: connect once"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch, status, code, expected):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        use_hub(monkeypatch, server.server_port)
        check_error("org/model", "'org/model'", expected)
        server.shutdown()


def test_offline_mode_is_honoured(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_error("org/no-such-model", "the hub cannot be reached", "HF_HUB_OFFLINE")


def test_a_cached_hub_model_loads_without_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(folder, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    lines = []
    _, tokenizer = load_model("org/tiny", progress=lines.append)
    assert tokenizer("the cat").input_ids == [3, 4]
    assert lines == ["Loading org/tiny"]
