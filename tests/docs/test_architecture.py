"""The example of a cache in docs/architecture.md is the file itself."""

import ast

from tests.support.paths import ROOT


class _Bare(ast.NodeTransformer):
    """Removes annotations, docstrings and assertions."""

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.visit_ClassDef(node)

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        node.body = node.body[1:] if ast.get_docstring(node) else node.body
        return node

    def visit_Assert(self, node):
        return None


def _class(source):
    tree = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return ast.unparse(_Bare().visit(tree))


def test_the_example_of_an_evicting_cache_is_its_file_without_docstrings():
    shown = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("```python\n")
    (example,) = [part.split("```")[0] for part in shown if part.startswith("class H2OCache")]
    assert _class(example) == _class((ROOT / "offload" / "caches" / "h2o.py").read_text("utf-8"))
