"""Who may use the endpoint: addresses, keys, origins, host names; and what the page may do."""

import re

import pytest

from offload.errors import SettingsError
from tests.support.serving import opened_model, serve_options, serving
from triforce_cli.serve.serve_options import read_keys

KEYS = ("first-key-0123456789", "other-key-0123456789")


def test_only_names_of_this_machine_are_answered(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1", "a@127.0.0.1/"):
        response = client.get("/v1/models", headers={"host": host})
        assert response.status_code == 400 and "tiny" not in response.text
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:9"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_page_of_another_site_cannot_ask(client):
    """Without --cors no preflight request is answered, which a browser sends before JSON."""
    preflight = {"origin": "https://a.b", "access-control-request-method": "POST"}
    assert client.options("/v1/chat/completions", headers=preflight).status_code == 405
    assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "https://a.b"}).headers


def test_keys_and_named_origins(opened, loaded):
    page = "https://notes.example.org"
    with serving(opened, loaded, serve_options(*KEYS, origins=(page,))) as served:
        client = served.client
        for header in (None, "Bearer", "Bearer wrong-key-0123456789", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x"):
            headers = {} if header is None else {"authorization": header}
            for path in ("/v1/models", "/metrics", "/nothing"):
                response = client.get(path, headers=headers)
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        for key in KEYS:
            allowed = client.get("/v1/models", headers={"authorization": f"Bearer {key}", "origin": page})
            assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == page
        preflight = {"origin": page, "access-control-request-method": "POST"}
        preflight["access-control-request-headers"] = "authorization, x-stainless-lang"  # as openai's client in a page
        assert client.options("/v1/chat/completions", headers=preflight).status_code == 200
        assert client.options("/v1/chat/completions", headers=preflight | {"origin": "https://a.b"}).status_code == 400
        assert [client.get(path).status_code for path in ("/", "/health", "/ready")] == [200] * 3


def test_prompts_that_begin_alike_are_run_once(model_dir, tiny_model_dir):
    """On the native kernel, with the pages of the sequence that has ended last."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model_dir / name).exists() and not (model_dir / name).exists():
            (model_dir / name).write_bytes((tiny_model_dir / name).read_bytes())
    opened = opened_model(model_dir)
    if opened.model.kernel == "off":
        pytest.skip("there is no native kernel here")
    with serving(opened, opened.model.load(), serve_options()) as served:

        def cached(question):
            body = {"prompt": "x" * 300 + question, "max_tokens": 2, "temperature": 0}
            usage = served.client.post("/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached("who?"), cached("why?")] == [0, 302]


@pytest.mark.parametrize(
    ("keys", "changes", "words"),
    [
        ((), {"host": "0.0.0.0"}, "no API key"),
        ((), {"host": "example.org"}, "no API key"),
        ((), {"origins": ("*",)}, "no API key"),
        (KEYS, {"origins": ("https://a.b/c",)}, "--cors"),
        (KEYS, {"origins": ("a.b",)}, "--cors"),
    ],
)
def test_what_would_be_open_to_others_is_refused(keys, changes, words):
    with pytest.raises(SettingsError, match=re.escape(words)):
        serve_options(*keys, **changes)


def test_keys_come_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text(f"# of the notebook\n{KEYS[0]}\n\n  {KEYS[1]}\n")
    keys = read_keys(file, {"TRIFORCE_API_KEY": "third-key-0123456789\n"})
    assert all(map(keys.have, (*KEYS, "third-key-0123456789"))) and not keys.have("# of the notebook")
    assert not read_keys(None, {})


@pytest.mark.parametrize(
    "content", [None, b"", b"# only\n", b"short\n", b"with a blank 0123456789\n", b"caf\xe9-0123456789012\n"]
)
def test_keys_that_are_none_are_refused_and_not_shown(tmp_path, content):
    file = tmp_path / "keys.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_keys(file, {})
    assert "0123456789" not in str(caught.value)


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert re.findall(r'(?:src|href)="(.*?)"', page.text) == ["data:,", "page.css", "page.js"]
    assert not re.search(r"\son\w+=|style=|<script>|<style>", page.text)
    assert "#form { position: sticky; bottom: 0;" in client.get("/page.css").text  # the question stays in view
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css")):
        found = client.get(f"/{name}")
        assert found.headers["content-type"].startswith(kind)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", found.text)
