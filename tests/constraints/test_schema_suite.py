"""JSON Schema's own test suite, which the package index has in the source of `jsonschema`; and what is refused."""

import json
import random
import subprocess
import sys
import tarfile
from importlib.metadata import version

import pytest

from offload.errors import SettingsError
from tests.constraints.test_random_schemas import answer
from tests.support.constraints import accepts, byte_matcher
from tests.support.paths import ROOT

jsonschema = pytest.importorskip("jsonschema")
DRAFTS = {"draft2020-12": "Draft202012Validator", "draft7": "Draft7Validator"}
REFUSED = {
    **{name: {} for name in ("contains", "dependentSchemas", "if", "not", "propertyNames")},
    **{"dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["b"]}, "$dynamicRef": "#a", "uniqueItems": True},
    **{"unevaluatedItems": False, "unevaluatedProperties": False},
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return the groups of tests of each draft: a schema, and values with whether they are valid."""
    folder, found = tmp_path_factory.mktemp("suite"), {draft: [] for draft in DRAFTS}
    wanted = ["--no-binary=jsonschema", "--no-deps", f"jsonschema=={version('jsonschema')}"]
    got = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", folder, *wanted], capture_output=True)
    if got.returncode:
        pytest.skip("the package index cannot be reached")
    with tarfile.open(next(folder.glob("jsonschema-*.tar.gz"))) as source:
        for name in source.getnames():
            *_, tests, draft, file = (*name.split("/"), "", "")[:5] if name.count("/") == 4 else ("", "", "")
            if tests == "tests" and draft in DRAFTS and file.endswith(".json"):
                found[draft] += json.load(source.extractfile(name))
    return found


@pytest.mark.long
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_value_is_accepted_and_random_answers_are_valid(suite, draft):
    validator, compiled, refused, answers = getattr(jsonschema, DRAFTS[draft]), 0, 0, 0
    for group in suite[draft]:
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": validator.META_SCHEMA["$schema"]} | schema
        try:
            matcher = byte_matcher("json-schema", json.dumps(schema))
        except SettingsError:
            refused += 1
            continue
        compiled += 1
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False).encode()
            assert test["valid"] or not accepts(matcher.fork(), text), (group["description"], test["description"])
        for seed in range(3):
            text = answer(random.Random(seed), matcher.fork())
            if text is not None:
                answers += 1
                validator(schema).validate(json.loads(text.decode()))
    assert compiled > 120 and refused > 80 and answers > 2 * compiled


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_not_supported_is_named_with_its_place_and_in_the_docs(keyword):
    schema = {"type": "object", "properties": {"a": {"items": {keyword: REFUSED[keyword]}}}}
    with pytest.raises(SettingsError, match=f"not supported, at /properties/a/items: .*{keyword.replace('$', '[$]')}"):
        byte_matcher("json-schema", json.dumps(schema))
    assert f"`{keyword}`" in (ROOT / "docs" / "structured.md").read_text("utf-8").partition("## What is accepted")[2]


@pytest.mark.parametrize("schema", [{"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}}])
def test_references_by_name_are_followed(schema):
    assert accepts(byte_matcher("json-schema", json.dumps(schema)), b"12")
