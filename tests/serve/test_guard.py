"""Who may use the endpoint: addresses, keys, origins, host names; and what the page may do."""

import re

import pytest

from offload.errors import SettingsError, TriforceError
from tests.support.paths import ROOT
from tests.support.serving import connected, serve_options, serving
from triforce_cli.serve.guard import is_local_host
from triforce_cli.serve.serve_options import check_installed, exposure, read_keys

KEYS = ("first-key-0123456789", "other-key-0123456789")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "10.0.0.1",
        "evil@127.0.0.1/",
        "localhost:1.evil.example",
    ],
)
def test_other_host_names_are_refused(client, host):
    response = client.get("/v1/models", headers={"host": host})
    assert response.status_code in (400, 421) and "tiny" not in response.text
    assert not is_local_host(host, "127.0.0.1")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:9", "127.1.2.3"])
def test_names_of_this_machine_are_not(host):
    assert is_local_host(host, "127.0.0.1")


def test_other_origins_are_refused_and_the_pages_own_is_not(client, served):
    """An origin is a scheme, a host and a port: no other of the three is the page's."""
    tls, port = served.url.replace("http", "https"), f"{served.url[:-1]}{(int(served.url[-1]) + 1) % 10}"
    for origin in ("https://evil.example", "null", "http://[x", tls, port, "http://127.0.0.1", f"{served.url}/"):
        assert client.get("/v1/models", headers={"origin": origin}).status_code == 403
    own = client.get("/v1/models", headers={"origin": served.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_keys_and_named_origins(opened, loaded):
    page = "https://notes.example.org"
    with serving(opened, loaded, serve_options(*KEYS, origins=(page,))) as served, connected(served) as client:
        for header in (None, "Bearer", "Bearer wrong-key-0123456789", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x"):
            headers = {} if header is None else {"authorization": header}
            for path in ("/v1/models", "/metrics", "/nothing"):
                response = client.get(path, headers=headers)
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        for key in KEYS:
            allowed = client.get("/v1/models", headers={"authorization": f"Bearer {key}", "origin": page})
            assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == page
            assert allowed.headers["access-control-expose-headers"] == "retry-after"
        stranger = {"authorization": f"Bearer {KEYS[0]}", "origin": "https://a.b"}
        assert client.get("/v1/models", headers=stranger).status_code == 403
        preflight = {"origin": page, "access-control-request-method": "POST"}
        preflight["access-control-request-headers"] = "authorization, x-stainless-lang"  # as openai's client in a page
        assert client.options("/v1/chat/completions", headers=preflight).status_code == 200
        assert client.options("/v1/chat/completions", headers=preflight | {"origin": "https://a.b"}).status_code == 400
        assert [client.get(path).status_code for path in ("/", "/health")] == [200, 200]


@pytest.mark.parametrize(
    ("keys", "changes", "words"),
    [
        ((), {"host": "0.0.0.0"}, "no API key"),
        ((), {"host": "example.org"}, "no API key"),
        ((), {"separates_keys": True}, "separates by API key"),
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
    scopes = [keys.scope(key) for key in (*KEYS, "third-key-0123456789")]
    assert None not in scopes and len(set(scopes)) == 3 and keys.scope("# of the notebook") is None
    assert not read_keys(None, {}) and not any(key in "".join(scopes) for key in KEYS)


def test_a_file_of_keys_that_others_may_read_is_named_with_what_to_do(triforce_here, tmp_path):
    file = tmp_path / "my keys"
    file.write_text(KEYS[0])
    text = f"other users may read --api-key-file {file}: chmod 600 '{file}'"
    for mode, warns in ((0o600, False), (0o604, True), (0o640, True)):
        file.chmod(mode)
        assert exposure(file) == (text if warns else "")
    written = triforce_here("serve", "--api-key-file", file, "--tensor-parallel", 2).stderr
    assert f"warning: {text}\n" in written and KEYS[0] not in written


@pytest.mark.parametrize(
    "content", [b"", b"# only\n", b"short\n", b"with a blank 0123456789\n", b"caf\xe9-0123456789012\n"]
)
def test_keys_that_are_none_are_refused_and_not_shown(tmp_path, content):
    file = tmp_path / "keys.txt"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_keys(file, {})
    assert "0123456789" not in str(caught.value)
    file.write_bytes(b"#" * (1 << 20) + b"\n" + KEYS[0].encode())
    with pytest.raises(SettingsError, match="larger than 1 MiB"):
        read_keys(file, {})
    with pytest.raises(SettingsError, match="No such file"):
        read_keys(tmp_path / "none.txt", {})


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert re.findall(r'(?:src|href)="(.*?)"', page.text) == ["data:,", "page.css", "page.js"]
    assert not re.search(r"\son\w+=|style=|<script>|<style>", page.text)
    scripts = ("page.js", "api.js", "thread.js", "markdown.js")
    for name, kind in (*((script, "text/javascript") for script in scripts), ("page.css", "text/css")):
        found = client.get(f"/{name}")
        assert found.headers["content-type"].startswith(kind) and found.headers["x-content-type-options"] == "nosniff"
        assert "//" not in re.sub(r"(^|\s)// .*$", "", found.text, flags=re.MULTILINE)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", found.text)
    assert {path.name for path in (ROOT / "triforce_cli" / "serve" / "page").iterdir()} == {
        *("index.html", "page.css", *scripts)
    }


def test_without_the_extra_there_is_one_error_that_says_how_to_install_it():
    check_installed()
    with pytest.raises(TriforceError, match="no_such_package") as caught:
        check_installed(["starlette", "no_such_package"])
    assert 'pip install ".[serve]"' in caught.value.hint
