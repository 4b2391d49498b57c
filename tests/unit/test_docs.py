"""README and docs: code parses, imports name what exists, links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def defined(module: str) -> set[str]:
    """Names at the top level of a module's source, which may need what is not installed."""
    path = ROOT / Path(*module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    found: set[str] = {p.stem for p in path.glob("*.py")} if path.is_dir() else set()
    for node in ast.parse(source.read_text()).body if source.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name for a in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_of_the_pages(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for node in (n for block in blocks for n in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fc_optim"):
            missing = {a.name for a in node.names} - defined(str(node.module))
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_of_the_pages(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    paths = re.findall(r"`((?:fc_optim|kernels|integrations|examples|tests|docs)/[\w/.-]+)", text)
    for link in links:
        assert link.startswith("http") or (page.parent / link).exists(), link
    for path in paths:
        assert (ROOT / path).exists(), path
