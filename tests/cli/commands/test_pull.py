"""`triforce pull --list`: every well-known model, and where it comes from."""

from offload.architecture.known_models import KNOWN


def test_pull_lists_the_well_known_models(triforce):
    result = triforce("pull", "--list")
    assert (result.returncode, result.stderr) == (0, "")
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert [name.lower() for name in names[1:]] == [name.lower() for name in KNOWN if name != "SmolLM2-135M"]
    assert names[0] == "smollm2-135m"
    assert "mistralai/Mistral-7B-Instruct-v0.3: Apache 2.0" in result.stdout
