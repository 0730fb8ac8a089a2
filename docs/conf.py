"""How Sphinx builds these pages: ``./scripts/docs``. Nothing is downloaded."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from rooms import rooms  # noqa: E402
from state import state_table  # noqa: E402
from tables import summary  # noqa: E402

import torchstrat as ts  # noqa: E402

project = "torchstrat"
author = "The torchstrat authors"
project_copyright = author
version = release = ts.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 4
myst_substitutions = {"tables": summary(), "state_kinds": state_table(), "rooms": rooms()}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "torchstrat"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False

default_role = "py:obj"  # docstrings write `Strategy.run`; a name that is not in the reference is shown as code
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
maximum_signature_line_length = 90
# References to other projects would need their inventories, and so the network. Those to this one are checked where
# they are written in full.
nitpick_ignore_regex = [("py:.*", r"(?!torchstrat\.).*"), ("py:.*", r"torchstrat\.[a-z_]+(\.\w+)*")]


def _public_places() -> dict[int, str]:
    """Public objects, by identity, and the name that the reference has them under."""
    places: dict[int, str] = {}
    pages = [*(ROOT / "docs" / "api").glob("*.rst"), *(ROOT / "docs" / "errors").glob("*.md")]
    for page in sorted(pages):
        for name in re.findall(r"^\.\. auto(?:class|function|exception)::\s+(\S+)", page.read_text(), re.MULTILINE):
            module, _, member = name.rpartition(".")
            places[id(getattr(importlib.import_module(module), member))] = name
    return places


_PLACES = _public_places()


def _find(target: str) -> Any:
    module, _, member = target.rpartition(".")
    if module not in sys.modules:
        return None
    return getattr(sys.modules[module], member, None)


def _resolve(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """A link to where a class is public, from an annotation that names the module in which it is written."""
    name = _PLACES.get(id(_find(node.get("reftarget", ""))))
    if node.get("refdomain") != "py" or name is None:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)  # type: ignore[no-any-return]


def setup(app: Any) -> None:
    app.connect("missing-reference", _resolve)
